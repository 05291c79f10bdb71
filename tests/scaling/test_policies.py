"""The loss scaler's policies step by step, and its scale, which a policy or a user changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from bighorn import ExponentialScale, FixedScale, LossScaler, WindowScale
from bighorn._scaling import ScalePolicy
from tests.support.loss_scaling import B, G, scales_of, train_on

# Whether each step was good or bad, and the scale and the counts of good and bad steps after it, computed by hand.
POLICIES: dict[str, tuple[ScalePolicy, list[tuple[bool, float, int, int]]]] = {
    "fixed": (FixedScale(8.0), [(B, 8, 0, 0), (G, 8, 0, 0), (B, 8, 0, 0)]),
    "window": (
        WindowScale(8.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=3),
        [
            (G, 8, 1, 0),
            (G, 8, 2, 0),
            (B, 2, 0, 0),  # shrinks at every overflow, which resets the good steps
            (B, 0.5, 0, 0),
            (G, 0.5, 1, 0),
            (G, 0.5, 2, 0),
            (G, 1, 0, 0),
            (G, 1, 1, 0),
        ],
    ),
    "exponential": (
        ExponentialScale(100.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2, backoff_interval=2),
        [
            (B, 100, 0, 1),
            (G, 100, 1, 1),  # a good step does not reset the bad one,
            (B, 50, 0, 0),  # so this is the second; the change resets both
            (G, 50, 1, 0),
            (B, 50, 0, 1),  # a bad step resets the good one,
            (G, 50, 1, 1),
            (G, 100, 0, 0),  # so only now are there two in a row; the change resets the bad one too
            (B, 100, 0, 1),
            (B, 50, 0, 0),
        ],
    ),
    "exponential-3": (
        ExponentialScale(10.0, growth_factor=1.5, backoff_factor=0.8, growth_interval=1, backoff_interval=3),
        [(B, 10, 0, 1), (B, 10, 0, 2), (B, 8, 0, 0), (G, 12, 0, 0), (G, 18, 0, 0), (B, 18, 0, 1)],
    ),
    "ceiling": (
        WindowScale(2.0**126, growth_interval=2),
        [(G, 2.0**126, 1, 0), (G, 2.0**127, 0, 0), (G, 2.0**127, 1, 0), (G, 2.0**127, 0, 0), (B, 2.0**126, 0, 0)],
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_counts_as_written_out(name: str) -> None:
    policy, steps = POLICIES[name]
    param = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = LossScaler(policy, min_scale=2.0**-20)
    state = policy.start()
    for overflow, *expected in steps:
        before, param_before = [value.item() for value in state], param.detach().clone()
        after = policy.next(state, torch.tensor(overflow))
        assert [value.item() for value in after] == pytest.approx(expected, rel=1e-6)
        assert [value.item() for value in state] == before
        assert [value.dtype for value in after] == [torch.float32, torch.int32, torch.int32]
        state = after
        train_on(scaler, optimizer, param, overflow, 1.0)
        saved = scaler.state_dict()
        assert [saved["scale"], saved["_growth_tracker"], saved["bad_steps"]] == pytest.approx(expected, rel=1e-6)
        assert param.equal(param_before) == overflow


def test_bounds() -> None:
    policy = WindowScale(8.0, growth_interval=1)
    assert scales_of(LossScaler(policy), [B] * 5) == [4, 2, 1, 1, 1]
    assert scales_of(LossScaler(policy, min_scale=0.25), [B] * 7) == [4, 2, 1, 0.5, 0.25, 0.25, 0.25]
    assert scales_of(LossScaler(policy, min_scale=3.0, max_scale=20.0), [G, G, B, B, B, G]) == [16, 20, 10, 5, 3, 6]
    assert scales_of(LossScaler(FixedScale(8.0), min_scale=8.0, max_scale=8.0), [B, G]) == [8, 8]


@pytest.mark.parametrize("never", [2**31, 2**32 + 2, 2**63])
def test_intervals_that_never_end_keep_the_scale(never: int) -> None:
    """torch compares an int32 counter with these numbers modulo 2^32."""
    policies = WindowScale(8.0, growth_interval=never), ExponentialScale(8.0, 2.0, 0.5, never, never)
    for policy in policies:
        assert scales_of(LossScaler(policy), [G] * 4) == [8] * 4
    assert scales_of(LossScaler(policies[1]), [B] * 4) == [8] * 4


def test_a_new_scale_by_hand() -> None:
    param = Parameter(torch.ones(3))
    scaler = LossScaler(WindowScale(8.0), max_scale=64.0)
    with pytest.raises(AssertionError, match="update"):
        scaler.update(4.0)
    scaler.scale(param.sum())
    for new_scale, expected in ((4.0, 4.0), (16, 16.0), (torch.tensor([2.0]), 2.0), (torch.tensor(1e9), 64.0)):
        scaler.update(new_scale)
        assert scaler.get_scale() == expected
    for wrong, error in (
        (0.5, ValueError),
        (65.0, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("8", TypeError),
        (torch.ones(2), TypeError),
        (param, TypeError),
    ):
        with pytest.raises(error, match="new_scale"):
            scaler.update(wrong)  # type: ignore[arg-type]
        assert scaler.get_scale() == 64.0


def test_numbers_of_the_policy_by_hand() -> None:
    """Torch's own getters and setters read and write the policy; FixedScale does not support them."""
    scaler = LossScaler(ExponentialScale(8.0))
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.8, 2000)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    with pytest.raises(ValueError, match="growth_factor=1"):
        scaler.set_growth_factor(1.0)
    assert scaler.policy == ExponentialScale(8.0, 4.0, 0.25, 1)
    assert scales_of(scaler, [G, B, B]) == [32, 32, 8]
    with pytest.raises(AttributeError, match="growth_factor"):
        LossScaler(FixedScale(8.0)).get_growth_factor()
    with pytest.raises(TypeError, match="growth_factor"):
        LossScaler(FixedScale(8.0)).set_growth_factor(2.0)
