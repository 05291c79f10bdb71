"""How the scale moves: pure transitions from one step's state to the next one's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bighorn.arguments import integer, knows_its_keywords, number


class ScaleState(NamedTuple):
    """What a policy goes by, as 0-dim tensors on any device, so that nobody waits for their values.

    Attributes:
        scale: What the loss is multiplied with, float32.
        good_steps: Steps without an overflow since the last overflow or change of the scale, int32.
        bad_steps: Steps with an overflow since the last change of the scale, int32.
    """

    scale: Tensor
    good_steps: Tensor
    bad_steps: Tensor


FLOAT32 = torch.finfo(torch.float32)


def check_scale(name: str, value: object) -> float:
    """A number above 0 that float32 can hold."""
    return number(name, value, FLOAT32.tiny, FLOAT32.max, span="above 0 that float32 can hold")


CHECKS: dict[str, Callable[[str, object], float]] = {
    "init_scale": check_scale,
    "growth_factor": partial(number, low=1, high=FLOAT32.max, above=True, span="above 1 that float32 can hold"),
    "backoff_factor": partial(number, low=0, high=1, above=True, below=True),
    "growth_interval": partial(integer, least=1),
    "backoff_interval": partial(integer, least=1),
}
"""What each number of a policy may be."""


@dataclass(frozen=True)
class ScalePolicy(ABC):
    """A first scale, and a pure transition from one step's state to the next one's."""

    init_scale: float

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, CHECKS[field.name](field.name, getattr(self, field.name)))

    def start(self) -> ScaleState:
        """The state before the first step, on the CPU."""
        zero = torch.zeros((), dtype=torch.int32, device="cpu")
        return ScaleState(torch.tensor(self.init_scale, dtype=torch.float32, device="cpu"), zero, zero)

    @abstractmethod
    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:
        """The state after a step.

        Args:
            state: The one before.
            overflow: Whether a gradient was not finite; 0-dim, bool, on the state's device.
        """


@knows_its_keywords
@dataclass(frozen=True)
class FixedScale(ScalePolicy):
    """A scale that stays as it is. TensorFlow's and MindSpore's `FixedLossScaleManager`.

    Args:
        init_scale: The scale, above 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range.
    """

    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:  # noqa: ARG002 - ScalePolicy's signature
        """The state after a step: the same."""
        return state


@knows_its_keywords
@dataclass(frozen=True)
class WindowScale(ScalePolicy):
    """Grows after so many good steps in a row, shrinks at every overflow.

    `torch.amp.GradScaler`'s way, with its names and defaults, and that of MindSpore's `DynamicLossScaleManager`.

    Args:
        init_scale: The scale to start at, above 0. Default: 65536.0.
        growth_factor: What the scale is multiplied with to grow, above 1. Default: 2.0.
        backoff_factor: What the scale is multiplied with to shrink, between 0 and 1. Default: 0.5.
        growth_interval: After how many consecutive good steps it grows. Default: 2000.

    Raises:
        TypeError: A value is no number, or `growth_interval` no whole one.
        ValueError: A value is out of range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:
        """The state after a step, as `ScalePolicy.next`."""
        return _adapted(self, 1, state, overflow)


@knows_its_keywords
@dataclass(frozen=True)
class ExponentialScale(ScalePolicy):
    """Grows after so many good steps in a row, shrinks after so many overflows, which need not be in a row.

    TensorFlow's `ExponentialUpdateLossScaleManager`, which Ascend's npu_bridge takes over: a good step does not clear
    the count of bad ones, a bad step clears the count of good ones, and a change of the scale clears both.

    Args:
        init_scale: The scale to start at, above 0. Default: 65536.0.
        growth_factor: What the scale is multiplied with to grow, above 1. Default: 2.0.
        backoff_factor: What the scale is multiplied with to shrink, between 0 and 1. Default: 0.8.
        growth_interval: After how many consecutive good steps it grows. Default: 2000.
        backoff_interval: After how many overflows since the last change it shrinks. Default: 2.

    Raises:
        TypeError: A value is no number, or an interval no whole one.
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
        """The state after a step, as `ScalePolicy.next`."""
        return _adapted(self, self.backoff_interval, state, overflow)


def _adapted(
    policy: WindowScale | ExponentialScale, backoff_interval: int, state: ScaleState, overflow: Tensor
) -> ScaleState:
    """One transition; a scale that would leave float32 stays, and the counts are cleared as if it had changed."""
    zero = torch.zeros_like(state.good_steps)
    good = torch.where(overflow, zero, state.good_steps + 1)
    bad = torch.where(overflow, state.bad_steps + 1, state.bad_steps)
    grows, shrinks = good >= policy.growth_interval, bad >= backoff_interval
    grown = state.scale * policy.growth_factor
    scale = torch.where(grows & grown.isfinite(), grown, state.scale)
    scale = torch.where(shrinks, state.scale * policy.backoff_factor, scale)
    changes = grows | shrinks
    return ScaleState(scale, torch.where(changes, zero, good), torch.where(changes, zero, bad))
