"""Properties of every compatibility layer: checkpoints, copies, schedulers, and state in bighorn's format."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import bighorn
from bighorn.compat import apex, mindformers, mindspore, npu_bridge, torch_npu
from tests.support import compat_faces
from tests.support.compat_faces import FACES, name_of
from tests.support.compat_training import gradient, step, weights
from tests.support.processes import group_of_one
from tests.support.tables import for_every

DTYPES = (torch.float32, torch.bfloat16)
EACH_FACE = pytest.mark.parametrize("kind", FACES, ids=name_of)


def face(kind: Any, params: Mapping[str, Parameter], lr: Any) -> Any:
    return compat_faces.face(kind, params.items(), lr, FACES[kind].chosen[0])


def native(kind: Any, params: Mapping[str, Parameter], lr: Any) -> Optimizer:
    """Return bighorn's optimizer. Apex keeps float32 weights for parameters of the named dtype, and for no others."""
    masters = kind is apex.FusedMixedPrecisionLamb and params["fc.weight"].dtype == torch.bfloat16
    options = FACES[kind].chosen[1] | ({"weight_rounding": "master"} if masters else {})
    return FACES[kind].native(params.items(), lr, options)


def lr(number: int) -> float:
    return 0.1 / (number + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@EACH_FACE
def test_it_is_ours_with_its_options(kind: Any, dtype: torch.dtype) -> None:
    results = []
    for make in (face, native):
        params = weights(dtype)
        optimizer = make(kind, params, lr)
        for number in range(5):
            step(params, optimizer, number)
        results.append(params)
    assert all(param.equal(results[1][name]) for name, param in results[0].items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["load", "native", "deepcopy", "pickle"])
@EACH_FACE
def test_a_copy_goes_on(kind: Any, way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = weights(dtype)
    uninterrupted = face(kind, whole, lr)
    params = weights(dtype)
    optimizer = face(kind, params, lr)
    for number in range(6):
        step(whole, uninterrupted, number)
    for number in range(3):
        step(params, optimizer, number)
    if way == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    elif way == "pickle":
        optimizer = pickle.loads(pickle.dumps(optimizer))
    else:
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        fresh = {name: Parameter(param.detach().clone()) for name, param in params.items()}
        optimizer = (native if way == "native" else face)(kind, fresh, lr)
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    params = dict(zip(params, optimizer.param_groups[0]["params"], strict=True))
    for number in range(3, 6):
        step(params, optimizer, number)
    assert all(param.equal(whole[name]) for name, param in params.items())
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert dtypes <= {torch.float32, torch.float16 if kind is mindformers.Came else torch.float32}


def test_pickles_need_schedules_that_pickle() -> None:
    """A pickled optimizer that was called with gradients can be called again after loading."""
    params = weights(torch.float32)
    schedule = mindspore.CosineDecayLR(0.01, 0.1, 9)
    for optim in (mindspore.Lamb(params.items(), schedule), mindformers.Came(params.items(), schedule, loss_scale=2)):
        optim(tuple(torch.ones_like(param) for param in params.values()))
        again = pickle.loads(pickle.dumps(optim))
        again(tuple(torch.ones_like(param) for param in params.values()))
        assert again.param_groups[0]["lr"] == schedule(1)
        assert getattr(again, "loss_scale", 2) == 2


def test_state_bytes_in_the_words_of_a_face() -> None:
    params = weights(torch.float32)
    expected = bighorn.Lamb.state_bytes(params.items())
    for layer in (mindspore.Lamb, npu_bridge.LAMBOptimizer):
        assert layer.state_bytes(params.items()) == layer.state_bytes(params.items(), learning_rate=0.1) == expected
    assert mindformers.Came.state_bytes(params.items()) == bighorn.Came.state_bytes(params.items(), factor="last_two")
    assert torch_npu.NpuFusedLamb.state_bytes(params.items()) == expected


def test_it_is_itself_on_the_ranks_of_shard_update() -> None:
    """A rank's share has all options, such as a loss_scale."""
    with group_of_one():
        for kind in FACES:
            alone, shared = (weights(torch.float32) for _ in range(2))
            whole, optimizer = (face(kind, params, 0.1) for params in (alone, shared))
            parts = bighorn.shard_update(optimizer)
            for number in range(2):
                step(alone, whole, number)
                for name, param in shared.items():
                    param.grad = gradient(name, number, param.dtype) * getattr(optimizer, "loss_scale", 1)
                parts.step()
            assert all(param.equal(alone[name]) for name, param in shared.items()), name_of(kind)


def test_a_loss_scale_divides_whole_steps_alone() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = mindformers.Came(model.named_parameters(), 0.1, loss_scale=4)
    assert [copy.deepcopy(optimizer).loss_scale, pickle.loads(pickle.dumps(optimizer)).loss_scale] == [4, 4]
    with pytest.raises(ValueError, match="loss_scale=4 divides the gradients of a whole step; leave it at 1"):
        bighorn.release_gradients(model, optimizer)


def test_apex_groups_count_their_steps() -> None:
    """PolyWarmUpScheduler of NVIDIA's BERT reads the count, also right after a checkpoint has been loaded."""
    params = weights(torch.float32)
    optimizer = apex.FusedLAMB(params.values())
    for number in range(3):
        step(params, optimizer, number)
    of_apex = {
        "lr": 0.1,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "grad_averaging": True,
        "max_grad_norm": 1.0,
        "params": list(range(len(params))),
        "step": 3,
        "initial_lr": 0.1,  # of torch's schedulers
    }
    moments = ({name: state[name] for name in ("exp_avg", "exp_avg_sq")} for state in optimizer.state.values())
    checkpoint = {"state": dict(enumerate(moments)), "param_groups": [of_apex]}
    loaded = apex.FusedLAMB(params.values())
    with pytest.warns(bighorn.ConvertedStateWarning, match="checkpoint of apex's FusedLAMB") as caught:
        loaded.load_state_dict(checkpoint)
    assert "initial_lr" not in str(caught[0].message)
    again = apex.FusedMixedPrecisionLamb(weights(torch.float32).values())
    again.load_state_dict(optimizer.state_dict())
    for each in (optimizer, loaded, again, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [group["step"] for group in each.param_groups] == [3]
    step(params, loaded, 3)
    assert loaded.param_groups[0]["step"] == 4


@for_every("kind", (torch.amp.GradScaler, bighorn.LossScaler), ids=lambda kind: kind.__name__)
def test_apex_masters_step_float16_gradients_of_a_scaler(kind: Callable[..., Any]) -> None:
    """Torch's GradScaler refuses to unscale them for any other optimizer."""
    params = weights(torch.float16)
    optimizer = apex.FusedMixedPrecisionLamb(params.values(), reduced_precision_dtype=torch.float16)
    scaler = kind(device="cpu", init_scale=4.0) if kind is torch.amp.GradScaler else kind(bighorn.FixedScale(4.0))
    plain = weights(torch.float16)
    expected = apex.FusedMixedPrecisionLamb(plain.values(), reduced_precision_dtype=torch.float16)
    for number in range(2):
        for name, param in params.items():
            param.grad = scaler.scale(gradient(name, number, torch.float16))
        step(plain, expected, number)
        scaler.step(optimizer)
        scaler.update()
    assert all(param.equal(plain[name]) for name, param in params.items())
    before = {name: param.detach().clone() for name, param in params.items()}
    for param in params.values():
        param.grad = torch.full_like(param, float("inf"))
    scaler.step(optimizer)
    assert all(param.equal(before[name]) for name, param in params.items())
