"""Checkpoints of optimizers that cannot be installed here: their published formulas take the steps before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came, ConvertedStateWarning, Lamb
from bighorn.compat.torch_npu import NpuFusedLamb
from tests.support import peer_came_formulas, peer_formulas
from tests.support.case_tensors import Leaf
from tests.support.cases import Case, set_gradients
from tests.support.optimizer_runs import copies, saved_and_loaded

GROUPED_STEPS = "each group's count of steps is its parameters' own"


def note(optimizer: Lamb | Came, state: dict[str, Any]) -> str:
    """Load a checkpoint of another optimizer, and return the words of the warning."""
    with pytest.warns(ConvertedStateWarning) as caught:
        optimizer.load_state_dict(state)
    (warning,) = caught
    assert warning.filename == __file__
    return str(warning.message)


SANA_LEAVES = (
    Leaf("linear", (7, 5)),
    Leaf("large", (150, 128)),
    Leaf("conv1x1", (6, 4, 1, 1)),
    Leaf("conv", (5, 4, 3, 3)),
    Leaf("bias", (9,)),
)
SANA = Case("sana", {}, SANA_LEAVES)
CAME_GROUP = {"lr": 0.1, "eps": (1e-30, 1e-16), "clip_threshold": 1.0, "betas": (0.9, 0.999, 0.9999)}
CAME_GROUP |= {"weight_decay": 0.1}
LINEAR = "its state means factor='linear'"
IN_8_BITS = "min_8bit_size=16384 is min_8bit_size=16385, state_dtype='int8'"


@dataclass(frozen=True)
class Sana:
    """A CAME of SANA's family. Its formula takes the steps, since importing it requires mmcv or OneTrainer."""

    name: str
    formula: peer_came_formulas.Step
    group: Mapping[str, Any]
    says: tuple[str, ...]
    codes: str = ""
    """The name of codes in a chunk of 8 bits."""


FAMILY = (
    Sana("SANA's CAMEWrapper", peer_came_formulas.sana, {}, (LINEAR,)),
    Sana(
        "SANA's CAME8BitWrapper",
        peer_came_formulas.came8bit,
        {"block_size": 2048, "min_8bit_size": 16384},
        (IN_8_BITS, LINEAR),
        "data",
    ),
    Sana(
        "OneTrainer's CAME8bit",
        peer_came_formulas.came8bit,  # without the error in 1x1 convolutions, which is not reproduced
        {"stochastic_rounding": False, "min_8bit_size": 16384, "quant_block_size": 2048},
        (IN_8_BITS, "stochastic_rounding=False is weight_rounding='nearest'", LINEAR),
        "value",
    ),
)

NAMES = {*(sana.name for sana in FAMILY), "apex's FusedLAMB", "torch_npu's NpuFusedLamb"}
"""The formats that this file tests."""


def chunks(values: torch.Tensor, codes: str) -> list[dict[str, torch.Tensor]]:
    """Return the 8 bits of a matrix, as `_quantize_state` does."""
    parts = []
    for chunk in values.split(2048):  # type: ignore[no-untyped-call]
        scale = (chunk.max() - chunk.min()) / 255
        parts.append({codes: ((chunk - chunk.min()) / scale).round().byte(), "scale": scale, "min": chunk.min()})
    return parts


def sana_checkpoint(sana: Sana, leaves: list[peer_came_formulas.Leaf]) -> dict[str, Any]:
    """Return the `state_dict()` of such an optimizer."""
    state: dict[int, dict[str, Any]] = {}
    for i, leaf in enumerate(leaves):
        m = torch.tensor(leaf.m).view(leaf.shape)
        large = len(leaf.shape) == 2 and len(leaf.m) > 16384
        mine: dict[str, Any] = {"step": leaf.t, "exp_avg": chunks(m, sana.codes) if sana.codes and large else m}
        for name, averages in (("sq", leaf.sq), ("res", leaf.res)):
            for row, col in averages:
                mine |= {f"exp_avg_{name}_row": torch.tensor(row), f"exp_avg_{name}_col": torch.tensor(col)}
        if not leaf.sq:
            mine["exp_avg_sq"] = torch.tensor(leaf.v).view(leaf.shape)
        state[i] = {**mine, "RMS": torch.tensor(1.0)}
    group = {**CAME_GROUP, **sana.group, "params": list(range(len(leaves)))}
    return {"state": state, "param_groups": [group]}


def sana_goes_on(sana: Sana, leaves: list[peer_came_formulas.Leaf], steps: range) -> None:
    for step in steps:
        for leaf, gradient in zip(leaves, SANA.gradients(step), strict=True):
            assert gradient is not None
            leaf.g = gradient.flatten().tolist()
        sana.formula(leaves, 0.1)


@pytest.mark.parametrize("sana", FAMILY, ids=lambda sana: sana.name)
def test_a_run_of_sanas_family_goes_on_as_its_formula_would(sana: Sana, backend: str) -> None:
    leaves = [peer_came_formulas.Leaf(p.flatten().tolist(), tuple(p.shape)) for p in SANA.parameters()]
    sana_goes_on(sana, leaves, range(3))
    ours = [Parameter(torch.tensor(leaf.x).view(leaf.shape)) for leaf in leaves]
    optimizer = Came(ours, lr=7.0, backend=backend)
    told = note(optimizer, saved_and_loaded(sana_checkpoint(sana, leaves)))
    text = f"state_dict is a checkpoint of {sana.name} (1 group), and was converted"
    assert told == "; ".join([text, *sana.says])
    assert optimizer.state[ours[1]]["exp_avg"].dtype == (torch.int8 if sana.codes else torch.float32)
    before = [param.detach().clone() for param in ours]
    for step in range(3, 6):
        set_gradients(ours, SANA.gradients(step))
        optimizer.step()
    sana_goes_on(sana, leaves, range(3, 6))
    for x, a, leaf, name in zip(before, ours, leaves, SANA_LEAVES, strict=True):
        theirs = torch.tensor(leaf.x).view(leaf.shape)
        rounded = sana.codes and name.name == "large"  # in another form of 8 bits
        assert float((a.detach() - theirs).norm() / (theirs - x).norm()) < (0.03 if rounded else 1e-5), name
        assert optimizer.state[a]["step"] == 6


def test_a_damaged_chunk_of_8_bits_is_refused() -> None:
    leaves = [peer_came_formulas.Leaf([0.1] * 19200, (150, 128))]
    leaves[0].g = [float(i % 7) for i in range(19200)]
    peer_came_formulas.came8bit(leaves, 0.1)
    checkpoint = sana_checkpoint(FAMILY[1], leaves)
    del checkpoint["state"][0]["exp_avg"][0]["scale"]
    optimizer = Came([Parameter(torch.ones(150, 128))], lr=0.1)
    with pytest.raises(ValueError, match="damaged: its state of 0 is not of SANA's CAME8BitWrapper"):
        optimizer.load_state_dict(checkpoint)
    assert not optimizer.state


def apex_checkpoint(leaves: list[peer_formulas.Leaf]) -> dict[str, Any]:
    """Return the `state_dict()` of `apex.optimizers.FusedLAMB`, whose groups have the arguments of its constructor."""
    group = {"lr": 0.1, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
    group |= {"grad_averaging": True, "max_grad_norm": 1.0, "step": leaves[0].t, "params": list(range(len(leaves)))}
    state = {i: {"exp_avg": torch.tensor(leaf.m), "exp_avg_sq": torch.tensor(leaf.v)} for i, leaf in enumerate(leaves)}
    return {"state": state, "param_groups": [group]}


def test_a_run_of_apex_goes_on_as_its_formula_would(backend: str) -> None:
    """Apex's formula takes the steps, since importing Apex requires CUDA."""
    flat = Case("apex", {}, (Leaf("weight", (35,)), Leaf("bias", (17,), fill="small")))
    leaves = [peer_formulas.Leaf(f"{i}", p.tolist()) for i, p in enumerate(flat.parameters())]

    def go_on(steps: range) -> None:
        for step in steps:
            for leaf, gradient in zip(leaves, flat.gradients(step), strict=True):
                assert gradient is not None
                leaf.g = gradient.tolist()
            peer_formulas.apex(leaves, 0.1)

    go_on(range(3))
    ours = [Parameter(torch.tensor(leaf.x)) for leaf in leaves]
    optimizer = Lamb.like("apex", ours, lr=7.0, backend=backend)
    with pytest.warns(ConvertedStateWarning, match=f"{GROUPED_STEPS}. Note: checkpoints of .* do not tell use_nvlamb"):
        optimizer.load_state_dict(saved_and_loaded(apex_checkpoint(leaves)))
    for step in range(3, 6):
        set_gradients(ours, flat.gradients(step))
        optimizer.step()
    go_on(range(3, 6))
    for a, leaf in zip(ours, leaves, strict=True):
        torch.testing.assert_close(a, torch.tensor(leaf.x), rtol=1e-5, atol=1e-6)
        assert optimizer.state[a]["step"] == 6


def npu_checkpoint(parameters: list[Parameter], optimizer: Lamb) -> dict[str, Any]:
    """Return the `state_dict()` of torch_npu's NpuFusedLamb, whose groups have four options."""
    group = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    names = ("exp_avg", "exp_avg_sq")
    state = {
        i: {"step": int(optimizer.state[p]["step"]), **{name: optimizer.state[p][name] for name in names}}
        for i, p in enumerate(parameters)
    }
    return {"state": state, "param_groups": [{**group, "initial_lr": 0.1, "params": list(range(len(parameters)))}]}


@pytest.mark.parametrize("adam", [False, True])
def test_a_run_of_torch_npu_goes_on(adam: bool, backend: str) -> None:
    case = Case("npu", {}, (Leaf("weight", (5, 7)), Leaf("bias", (17,), fill="small")))

    def go_on(parameters: list[Parameter], optimizer: Lamb, steps: range) -> None:
        for step in steps:
            set_gradients(parameters, case.gradients(step))
            optimizer.step()

    theirs = case.parameters()
    peer = NpuFusedLamb(theirs, 0.1, weight_decay=0.01, adam=adam)
    go_on(theirs, peer, range(3))
    ours = copies(theirs)
    optimizer = Lamb.like("torch_npu", ours, lr=7.0, adam=adam, backend=backend)
    state = saved_and_loaded(npu_checkpoint(theirs, peer))
    with pytest.warns(ConvertedStateWarning, match="NpuFusedLamb do not tell adam and use_global_grad_norm"):
        optimizer.load_state_dict(state)
    go_on(ours, optimizer, range(3, 6))
    go_on(theirs, peer, range(3, 6))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    notes = note(Lamb(copies(theirs)), state)
    assert "bias_correction=True stays, where torch_npu's NpuFusedLamb has False" in notes
    assert "weight_norm_bounds=None stays" in notes
