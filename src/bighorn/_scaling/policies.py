"""Policies for the loss scale: pure transitions from one step's state to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bighorn._arguments import Check, integer, knows_its_keywords, number


class ScaleState(NamedTuple):
    """The state of a policy, as 0-dim tensors on any device, so that the host does not wait for their values.

    Attributes:
        scale: The factor of the loss, float32.
        good_steps: Steps without an overflow since the last overflow or change of the scale, int32.
        bad_steps: Steps with an overflow since the last change of the scale, int32.
    """

    scale: Tensor
    good_steps: Tensor
    bad_steps: Tensor


FLOAT32 = torch.finfo(torch.float32)

MOST_STEPS = 2**31 - 1
"""The most steps that int32 counts. torch would wrap a longer interval, which users give to keep the scale."""


def check_scale(name: str, value: object) -> float:
    """Return a number above 0 that float32 can hold."""
    return number(name, value, FLOAT32.tiny, FLOAT32.max, span="above 0 that float32 can hold")


CHECKS: Mapping[str, Check] = {
    "init_scale": check_scale,
    "growth_factor": partial(number, low=1, high=FLOAT32.max, above=True, span="above 1 that float32 can hold"),
    "backoff_factor": partial(number, low=0, high=1, above=True, below=True),
    "growth_interval": partial(integer, least=1),
    "backoff_interval": partial(integer, least=1),
}
"""The check of each number of a policy."""


@dataclass(frozen=True)
class ScalePolicy(ABC):
    """An initial scale, and a pure transition from one step's state to the next."""

    CHECKS: ClassVar[Mapping[str, Check]] = CHECKS

    init_scale: float

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, self.CHECKS[field.name](field.name, getattr(self, field.name)))

    def start(self) -> ScaleState:
        """Return the state before the first step, on the CPU."""
        zero = torch.zeros((), dtype=torch.int32, device="cpu")
        return ScaleState(torch.tensor(self.init_scale, dtype=torch.float32, device="cpu"), zero, zero)

    @abstractmethod
    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:
        """Return the state after a step.

        Args:
            state: The state before the step.
            overflow: Whether a gradient was not finite; 0-dim, bool, on the state's device.
        """


@knows_its_keywords
@dataclass(frozen=True)
class FixedScale(ScalePolicy):
    """A constant scale, as TensorFlow's and MindSpore's `FixedLossScaleManager`.

    Args:
        init_scale: The scale, above 0.

    Raises:
        TypeError: `init_scale` is not a number.
        ValueError: `init_scale` is out of range.
    """

    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:  # noqa: ARG002 - ScalePolicy's signature
        """Return the state unchanged."""
        return state


@knows_its_keywords
@dataclass(frozen=True)
class WindowScale(ScalePolicy):
    """A scale that grows after a number of consecutive good steps, and shrinks at every overflow.

    This is the policy of `torch.amp.GradScaler`, with its names and defaults, and of MindSpore's
    `DynamicLossScaleManager`.

    Args:
        init_scale: The scale to start at, above 0. Default: 65536.0.
        growth_factor: The factor by which the scale grows, above 1. Default: 2.0.
        backoff_factor: The factor by which the scale shrinks, between 0 and 1. Default: 0.5.
        growth_interval: The number of consecutive good steps after which the scale grows. Default: 2000.

    Raises:
        TypeError: A value is not a number, or `growth_interval` is not an integer.
        ValueError: A value is out of range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:
        """Return the state after a step, as in `ScalePolicy.next`."""
        return _adapted(self, 1, state, overflow)


@knows_its_keywords
@dataclass(frozen=True)
class ExponentialScale(ScalePolicy):
    """A scale that grows after a number of consecutive good steps, and shrinks after a number of overflows.

    This is the policy of TensorFlow's `ExponentialUpdateLossScaleManager`, which Ascend's npu_bridge has adopted.
    Overflows need not be consecutive: a good step does not clear the count of bad ones, a bad step clears the count of
    good ones, and a change of the scale clears both.

    Args:
        init_scale: The scale to start at, above 0. Default: 65536.0.
        growth_factor: The factor by which the scale grows, above 1. Default: 2.0.
        backoff_factor: The factor by which the scale shrinks, between 0 and 1. Default: 0.8.
        growth_interval: The number of consecutive good steps after which the scale grows. Default: 2000.
        backoff_interval: The number of overflows since the last change after which the scale shrinks. Default: 2.

    Raises:
        TypeError: A value is not a number, or an interval is not an integer.
        ValueError: A value is out of range.

    Example:
        >>> import torch
        >>> from bighorn import ExponentialScale
        >>> policy = ExponentialScale(8.0, growth_interval=3, backoff_factor=0.5)
        >>> state, scales = policy.start(), []
        >>> for overflow in (True, False, True, False, False, False):
        ...     state = policy.next(state, torch.tensor(overflow))
        ...     scales.append(state.scale.item())
        >>> scales
        [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.8
    growth_interval: int = 2000
    backoff_interval: int = 2

    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:
        """Return the state after a step, as in `ScalePolicy.next`."""
        return _adapted(self, self.backoff_interval, state, overflow)


def _adapted(
    policy: WindowScale | ExponentialScale, backoff_interval: int, state: ScaleState, overflow: Tensor
) -> ScaleState:
    """Compute one transition. A scale that would overflow float32 does not grow, but the counts are cleared."""
    zero = torch.zeros_like(state.good_steps)
    good = torch.where(overflow, zero, state.good_steps + 1)
    bad = torch.where(overflow, state.bad_steps + 1, state.bad_steps)
    grows, shrinks = good >= min(policy.growth_interval, MOST_STEPS), bad >= min(backoff_interval, MOST_STEPS)
    grown = state.scale * policy.growth_factor
    scale = torch.where(grows & grown.isfinite(), grown, state.scale)
    scale = torch.where(shrinks, state.scale * policy.backoff_factor, scale)
    changes = grows | shrinks
    return ScaleState(scale, torch.where(changes, zero, good), torch.where(changes, zero, bad))
