"""`corrected_weight_decay`: the largest learning rate, and learning rates above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import ConvertedStateWarning, Lamb
from bighorn.compat import timm
from tests.support.error_checks import same, snapshot
from tests.support.tables import for_every


def warm_up(step: int) -> float:
    return 0.01 * step


OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "decay_mode": "decoupled"}


@for_every(
    ("lr", "largest"),
    [(0.1, 0.1), (torch.tensor(0.25), 0.25), (torch.tensor([0.25]), 0.25)],
)
def test_true_takes_the_constructors_rate(lr: Any, largest: float) -> None:
    optimizer = Lamb([Parameter(torch.ones(2, 2))], lr=lr, corrected_weight_decay=True, **OPTIONS)
    assert optimizer.param_groups[0]["corrected_weight_decay"] == largest


def test_true_does_not_take_a_schedule() -> None:
    with pytest.raises(TypeError, match="give the peak of a schedule instead: lr must be a number"):
        Lamb([Parameter(torch.ones(2, 2))], lr=warm_up, corrected_weight_decay=True, **OPTIONS)


def test_bytes_of_state_need_no_rate() -> None:
    params = [("weight", Parameter(torch.ones(2, 2)))]
    assert Lamb.state_bytes(params, corrected_weight_decay=True, **OPTIONS) == {"weight": 36}


@for_every("largest", [True, 1e-3])
def test_a_rate_above_the_largest_is_refused(largest: bool | float) -> None:
    """Decay would grow by their ratio: a group's own rate of 0.1 under the default of 1e-3 zeroed its weights."""
    matrix = Parameter(torch.ones(3, 4))
    optimizer = Lamb([{"params": [matrix], "lr": 0.1}], corrected_weight_decay=largest, **OPTIONS)
    matrix.grad = torch.ones(3, 4)
    before = snapshot([matrix], optimizer)
    with pytest.raises(ValueError, match=r"lr=0.1 is above .*corrected_weight_decay=0.001: give the peak"):
        optimizer.step()
    assert same(snapshot([matrix], optimizer), before)
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + 1e-9)  # a scheduler's rounding
    optimizer.step()


def test_a_flag_as_a_number_is_not_taken_for_the_largest_rate() -> None:
    with pytest.raises(TypeError, match=r"corrected_weight_decay must be .* such as 1\.0, not 1; .* takes True"):
        Lamb([Parameter(torch.ones(2, 2))], lr=0.01, corrected_weight_decay=1, **OPTIONS)


def test_the_message_about_decay_on_the_ball_has_the_value_that_was_given() -> None:
    with pytest.raises(ValueError, match=r"against weight_decay=0.1:"):
        Lamb([Parameter(torch.ones(2, 2))], lr=warm_up, hyperball=True, corrected_weight_decay=0.02, **OPTIONS)


TIMM: dict[str, Any] = {
    "bias_correction": True,
    "grad_averaging": True,
    "max_grad_norm": 1.0,
    "trust_clip": False,
    "always_adapt": False,
    "caution": False,
    "decoupled_decay": False,
    "max_lr_snapshot": 0.01,
}


@for_every("make", [Lamb, timm.Lamb])
def test_timms_checkpoint_without_decoupled_decay_has_nothing_to_correct(make: Callable[..., Lamb]) -> None:
    group = dict(
        **TIMM,
        lr=0.01,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.01,
        corrected_weight_decay=True,
        step=3,
        params=[0],
    )
    state = {"exp_avg": torch.zeros(3, 4), "exp_avg_sq": torch.ones(3, 4)}
    optimizer = make([Parameter(torch.ones(3, 4))], lr=0.01)
    with pytest.warns(ConvertedStateWarning, match="decoupled_decay=False is decay_mode='ratio'"):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert optimizer.param_groups[0]["corrected_weight_decay"] is False
