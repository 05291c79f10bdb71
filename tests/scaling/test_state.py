"""The loss scaler's state is saved and loaded, also from and to torch's GradScaler; bad input is refused."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import ExponentialScale, FixedScale, Lamb, LossScaler, WindowScale
from bighorn._scaling import ScalePolicy
from tests.support.loss_scaling import B, G, backward, scales_of, train_on
from tests.support.optimizer_runs import saved_and_loaded
from tests.support.tables import for_every


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("policy", [FixedScale(8.0), WindowScale(8.0, 2.0, 0.5, 3), ExponentialScale(8.0, 2.0, 0.5, 3)])
def test_a_run_goes_on_from_its_state(policy: ScalePolicy, started: bool) -> None:
    steps = [B, G, G, B, G, G, G, G, B, B]
    whole = scales_of(LossScaler(policy), steps)
    for cut in range(1, len(steps)):
        first = LossScaler(policy)
        assert scales_of(first, steps[:cut]) == whole[:cut]
        second = LossScaler(type(policy)(2.0**20))
        if started:
            scales_of(second, [B, B, G])
        second.load_state_dict(saved_and_loaded(first.state_dict()))
        for scaler in (second, pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
            assert {**scaler.state_dict(), "init_scale": 8.0} == first.state_dict()
            assert scales_of(scaler, steps[cut:]) == whole[cut:]


def test_states_of_torch_and_back() -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=7, backoff_factor=0.25)
    param = Parameter(torch.ones(3))
    for overflow in (B, G, G):
        train_on(torchs, torch.optim.SGD([param]), param, overflow, 1.0)
    ours = LossScaler()
    ours.load_state_dict(torchs.state_dict())
    assert (ours.get_scale(), ours.get_growth_interval(), ours.get_backoff_factor()) == (8.0, 7, 0.25)
    assert ours.state_dict()["_growth_tracker"] == 2
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == torchs.state_dict()


BAD_STATES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "empty": ({}, RuntimeError, "enabled=False"),
    "no-scale": ({"scale": None}, TypeError, "scale"),
    "other-policy": ({"policy": "FixedScale"}, ValueError, "FixedScale.*has a WindowScale.*init_scale=65536"),
    "unknown": ({"growth": 2.0}, ValueError, r"unknown \['growth'\]"),
    "below": ({"scale": 0.5}, ValueError, "scale=0.5 is not within min_scale=1.0"),
    "zero": ({"scale": 0.0}, ValueError, "scale=0.0"),
    "nan": ({"scale": math.nan}, ValueError, "scale=nan"),
    "bad-number": ({"growth_factor": 0.5}, ValueError, "growth_factor=0.5"),
    "negative-count": ({"bad_steps": -1}, ValueError, "bad_steps=-1"),
    "fraction": ({"_growth_tracker": 1.5}, TypeError, "_growth_tracker"),
    "beyond int32": ({"_growth_tracker": 2**31 - 1}, ValueError, "_growth_tracker"),
}


@for_every("name", BAD_STATES)
def test_a_bad_state_changes_nothing(name: str) -> None:
    change, error, message = BAD_STATES[name]
    scaler = LossScaler()
    state = scaler.state_dict()
    with pytest.raises(error, match=message):
        scaler.load_state_dict({**state, **change} if change else {})
    with pytest.raises(ValueError, match=r"misses \['_growth_tracker', 'scale'\]"):
        scaler.load_state_dict({"bad_steps": 0})
    assert scaler.state_dict() == state


def test_a_scaler_in_the_middle_of_a_step_cannot_be_pickled() -> None:
    param = Parameter(torch.ones(3))
    scaler = LossScaler()
    backward(scaler.scale(param.sum()))
    scaler.unscale_(torch.optim.SGD([param]))
    with pytest.raises(AssertionError, match="pickled"):
        pickle.dumps(scaler)


# ---- bad input ----------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "scale-0": (lambda: FixedScale(0.0), ValueError, "init_scale=0.0 .*above 0"),
    "scale-negative": (lambda: FixedScale(-1.0), ValueError, "init_scale=-1.0"),
    "scale-inf": (lambda: WindowScale(math.inf), ValueError, "init_scale=inf .*float32"),
    "scale-beyond": (lambda: WindowScale(1e39), ValueError, "init_scale=1e[+]39 .*float32"),
    "scale-nan": (lambda: WindowScale(math.nan), ValueError, "init_scale=nan"),
    "scale-text": (lambda: FixedScale("8"), TypeError, "init_scale must be a number, not '8'"),  # type: ignore[arg-type]
    "scale-bool": (lambda: FixedScale(True), TypeError, "init_scale must be a number"),
    "growth-1": (lambda: WindowScale(growth_factor=1.0), ValueError, "growth_factor=1.0 .*above 1"),
    "backoff-1": (lambda: ExponentialScale(backoff_factor=1), ValueError, "backoff_factor=1 .*in .0, 1.$"),
    "backoff-0": (lambda: ExponentialScale(backoff_factor=0), ValueError, "backoff_factor=0 "),
    "interval-0": (lambda: WindowScale(growth_interval=0), ValueError, "growth_interval=0 .*at least 1"),
    "interval-half": (lambda: WindowScale(growth_interval=1.5), TypeError, "growth_interval must be an integer"),  # type: ignore[arg-type]
    "bad-0": (lambda: ExponentialScale(backoff_interval=-2), ValueError, "backoff_interval=-2"),
    "policy-number": (lambda: LossScaler(1024.0), TypeError, "policy must be a FixedScale.*1024.0"),  # type: ignore[arg-type]
    "policy-device": (lambda: LossScaler("cuda"), TypeError, "policy must be .*'cuda'"),  # type: ignore[arg-type]
    "policy-class": (lambda: LossScaler(WindowScale), TypeError, "policy must be"),  # type: ignore[arg-type]
    "min-0": (lambda: LossScaler(min_scale=0.0), ValueError, "min_scale=0.0"),
    "max-text": (lambda: LossScaler(max_scale="big"), TypeError, "max_scale"),  # type: ignore[arg-type]
    "below-min": (lambda: LossScaler(FixedScale(0.5)), ValueError, "init_scale=0.5 is not within min_scale=1.0"),
    "above-max": (lambda: LossScaler(max_scale=2.0), ValueError, "init_scale=65536.0 .*max_scale=2.0"),
    "skip": (lambda: LossScaler(skip_on_overflow=1), TypeError, "skip_on_overflow must be True or False"),  # type: ignore[arg-type]
    "enabled": (lambda: LossScaler(enabled="no"), TypeError, "enabled must be True or False"),  # type: ignore[arg-type]
    "most-0": (lambda: LossScaler(max_consecutive_overflows=0), ValueError, "max_consecutive_overflows=0"),
    "most-text": (lambda: LossScaler(max_consecutive_overflows="3"), TypeError, "max_consecutive_overflows"),  # type: ignore[arg-type]
    "group": (lambda: LossScaler(process_group="world"), TypeError, "process_group.*'world'"),
    "torchs-option": (lambda: LossScaler(init_scale=2.0), TypeError, r"LossScaler\(WindowScale\(init_scale="),
    "device": (lambda: LossScaler(device="cuda"), TypeError, "'device'; the scale lives where"),
    "typo": (lambda: LossScaler(min_scal=2.0), TypeError, r"'min_scal' \(did you mean 'min_scale'"),
    "no-optimizer": (lambda: LossScaler().step(3), TypeError, "must be a torch.optim.Optimizer, not 3"),  # type: ignore[arg-type]
    "no-state": (lambda: LossScaler().load_state_dict(None), TypeError, "must be what state_dict.*not None"),  # type: ignore[arg-type]
    "half-a-state": (
        lambda: LossScaler().load_state_dict({"scale": 1.0}),
        ValueError,
        r"misses \['_growth_tracker'\]: it",
    ),
    "foreign": (lambda: LossScaler(xyz=2.0), TypeError, r"'xyz'\. Known: policy, min_scale"),
}


@for_every("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    make, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make()


def test_closures_are_refused() -> None:
    param = Parameter(torch.ones(3))
    for optimizer in (Lamb([param]), torch.optim.SGD([param])):
        scaler = LossScaler()
        backward(scaler.scale(param.sum()))
        with pytest.raises(RuntimeError, match="closure"):
            scaler.step(optimizer, lambda: 1.0)
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, closure=lambda: 1.0)
        scaler.step(optimizer, None)  # as Accelerate does
