"""Checkpoints of optimizers that cannot be installed here: published formulas take the steps before and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came, ConvertedStateWarning, Lamb
from bighorn.compat.torch_npu import NpuFusedLamb
from tests.support import peer_formulas
from tests.support.case_tensors import Leaf
from tests.support.cases import Case, Optimizer, set_gradients
from tests.support.optimizer_runs import copies, saved_and_loaded

GROUPED_STEPS = "each group's count of steps is its parameters' own"


def note(optimizer: Optimizer, state: dict[str, Any]) -> str:
    """Load a checkpoint of another optimizer, and return the text of the warning."""
    with pytest.warns(ConvertedStateWarning) as caught:
        optimizer.load_state_dict(state)
    (warning,) = caught
    assert warning.filename == __file__
    return str(warning.message)


NAMES = {"apex's FusedLAMB", "torch_npu's NpuFusedLamb", "LoRA_Easy's CAME"} | {
    "OneTrainer's CAME8bit",
    "SANA's CAME8BitWrapper",
    "SANA's CAMEWrapper",
}
"""The formats that this file tests."""


def in_blocks(exp_avg: torch.Tensor, rows: int, name: str) -> list[dict[str, torch.Tensor]]:
    """Encode a momentum in 8 bits between the least and the greatest value of each block of rows."""
    blocks = []
    for block in torch.split(exp_avg, rows):
        scale = (block.max() - block.min()) / 255
        blocks.append({name: ((block - block.min()) / scale).round().byte(), "scale": scale, "min": block.min()})
    return blocks


def sana_checkpoint(optimizer: Came, code: str | None, **options: Any) -> dict[str, Any]:
    """Return the `state_dict()` of a relative of SANA's CAME after the steps of ours, which continues from its bits.

    Its averages of a 1x1 convolution have one dim, and its 8 bits are in blocks of 4 rows.
    """
    group: dict[str, Any] = {"lr": 0.1, "eps": (1e-30, 1e-16), "clip_threshold": 1.0, "betas": (0.9, 0.999, 0.9999)}
    group |= {"weight_decay": 0.01, **options}
    states = {}
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        state: dict[str, Any] = {**optimizer.state[p], "step": 3, "RMS": p.detach().square().mean().sqrt()}
        for name in ("exp_avg_sq_col", "exp_avg_res_col"):
            if name in state:
                state[name] = state[name].flatten()
        if code is not None and p.dim() != 1 and p.numel() > options["min_8bit_size"]:
            state["exp_avg"] = in_blocks(state["exp_avg"], 4, code)
            decoded = [each[code].float() * each["scale"] + each["min"] for each in state["exp_avg"]]
            optimizer.state[p]["exp_avg"].copy_(torch.cat(decoded))
        states[i] = state
    return {"state": states, "param_groups": [{**group, "params": list(states)}]}


@pytest.mark.parametrize(
    ("name", "code", "options", "said"),
    [
        (
            "OneTrainer's CAME8bit",
            "value",
            {"stochastic_rounding": True, "use_cautious": True, "min_8bit_size": 100, "quant_block_size": 4},
            "use_cautious=True is cautious=True; stochastic_rounding=True is weight_rounding='stochastic'; "
            "min_8bit_size=100 is min_8bit_size=101; ",
        ),
        (
            "SANA's CAME8BitWrapper",
            "data",
            {"block_size": 4, "min_8bit_size": 100},
            "min_8bit_size=100 is min_8bit_size=101; ",
        ),
        ("SANA's CAMEWrapper", None, {}, ""),
    ],
)
def test_a_run_of_sanas_family_goes_on(name: str, code: str | None, options: Any, said: str) -> None:
    case = Case(
        "sana",
        {},
        (
            Leaf("linear", (11, 12)),
            Leaf("small", (5, 7)),
            Leaf("conv", (6, 4, 3, 3)),
            Leaf("pointwise", (12, 10, 1, 1)),
        ),
    )

    def go_on(parameters: list[Parameter], optimizer: Came, steps: range) -> None:
        for step in steps:
            set_gradients(parameters, case.gradients(step))
            optimizer.step()

    theirs = case.parameters()
    cautious = options.get("use_cautious", False)
    peer = Came(theirs, 0.1, weight_decay=0.01, factor="linear", cautious=cautious)
    go_on(theirs, peer, range(3))
    ours = copies(theirs)
    optimizer = Came(ours, 7.0)
    stays = "" if code is None else f". Note: state_dtype=None stays, where {name} has 'int8'"
    assert note(optimizer, saved_and_loaded(sana_checkpoint(peer, code, **options))) == (
        f"state_dict is a checkpoint of {name} (1 group), and was converted; {said}its state means factor='linear'"
        f"{stays}"
    )
    go_on(ours, optimizer, range(3, 6))
    go_on(theirs, peer, range(3, 6))
    assert all(a.equal(b) and optimizer.state[a]["step"] == 6 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([{"value": torch.zeros(2, 3), "scale": torch.tensor(1.0)}], "KeyError.'min'"),
        ([{"scale": torch.tensor(1.0), "min": torch.tensor(0.0)}], "KeyError.'data'"),
        ([{"value": "0", "scale": 1.0, "min": 0.0}], "AttributeError"),
        ([{"value": torch.zeros(2, 5), "scale": 1.0, "min": 0.0}], "RuntimeError"),
        ([{"value": torch.zeros(1, 3), "scale": 1.0, "min": 0.0}], "'exp_avg'.*shape"),
        (["not a block"], "TypeError"),
        ([], "damaged"),
        (None, "AttributeError"),
    ],
)
@pytest.mark.filterwarnings("ignore::bighorn.ConvertedStateWarning")
def test_a_damaged_momentum_of_8_bits_is_refused(blocks: Any, message: str) -> None:
    parameter = Parameter(torch.ones(2, 3))
    optimizer = Came([parameter], lr=0.1, factor="linear")
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    checkpoint = sana_checkpoint(optimizer, None, block_size=4, min_8bit_size=100)
    checkpoint["state"][0]["exp_avg"] = blocks
    before = repr(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(checkpoint)
    assert repr(optimizer.state_dict()) == before


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


def lora_easy_checkpoint(optimizer: Came, **options: Any) -> dict[str, Any]:
    """Return the `state_dict()` of LoRA_Easy's CAME after the steps of ours, with its defaults."""
    group: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999, 0.9999), "weight_decay": 0.01, "weight_decouple": True}
    group |= {"fixed_decay": False, "clip_threshold": 1.0, "ams_bound": False, "eps1": 1e-30, "eps2": 1e-16}
    group |= {"cautious": False, "update_strategy": "unmodified", "sync_chunk_size": 128}
    group |= {"state_storage_dtype": torch.float32, "state_storage_device": "cpu", "cautious_weight_decay": False}
    group |= {"compile_step": False, "foreach": False, "non_factored_confidence": True, "step": 3, **options}
    states = {i: {**optimizer.state[p]} for i, p in enumerate(optimizer.param_groups[0]["params"])}
    for state in states.values():
        del state["step"]
    return {"state": states, "param_groups": [{**group, "params": list(states)}]}


@pytest.mark.parametrize(("strategy", "cautious"), [("unmodified", False), ("cautious", True), ("both", True)])
def test_a_run_of_lora_easy_goes_on(strategy: str, cautious: bool) -> None:
    """Its mask of equal signs, with the share that it keeps, is ours."""
    case = Case("lora-easy", {}, (Leaf("down", (5, 7)), Leaf("up", (7, 4))))

    def go_on(parameters: list[Parameter], optimizer: Came, steps: range) -> None:
        for step in steps:
            set_gradients(parameters, case.gradients(step))
            optimizer.step()

    theirs = case.parameters()
    peer = Came(theirs, 0.1, weight_decay=0.01, factor="last_two", cautious=cautious)
    go_on(theirs, peer, range(3))
    ours = copies(theirs)
    optimizer = Came(ours, 7.0, cautious=not cautious)
    assert note(optimizer, saved_and_loaded(lora_easy_checkpoint(peer, update_strategy=strategy))) == (
        "state_dict is a checkpoint of LoRA_Easy's CAME (1 group), and was converted; "
        f"update_strategy='{strategy}' is cautious={cautious}; {GROUPED_STEPS}; its state means factor='last_two'. "
        "Note: checkpoints of LoRA_Easy's CAME do not tell its stochastic rounding of bfloat16 weights, here "
        'weight_rounding="stochastic"; checkpoints of 2025 do not tell clip_threshold either'
    )
    go_on(ours, optimizer, range(3, 6))
    go_on(theirs, peer, range(3, 6))
    assert all(a.equal(b) and optimizer.state[a]["step"] == 6 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "state", "message"),
    [
        ({"update_strategy": "grams"}, {}, "update_strategy='grams', which is not known"),
        ({"cautious_weight_decay": True}, {}, "decay is of all elements"),
        ({}, {"exp_avg_res": torch.ones(4)}, "a state 'exp_avg_res'.*non_factored_confidence"),
    ],
)
def test_a_checkpoint_of_lora_easy_without_a_counterpart_is_refused(options: Any, state: Any, message: str) -> None:
    parameter = Parameter(torch.ones(4))
    optimizer = Came([parameter], lr=0.1)
    parameter.grad = torch.ones(4)
    optimizer.step()
    before = repr(optimizer.state_dict())
    checkpoint = lora_easy_checkpoint(optimizer, **options)
    checkpoint["state"][0] |= state
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(checkpoint)
    assert repr(optimizer.state_dict()) == before
