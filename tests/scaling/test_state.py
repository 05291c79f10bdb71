"""The loss scaler's state is saved and loaded, also from and to torch's GradScaler."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import ExponentialScale, FixedScale, LossScaler, WindowScale
from bighorn.scaling import ScalePolicy
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
