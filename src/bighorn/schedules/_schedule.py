"""The base class of schedules, a warm-up, and the chain of one schedule and another."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from bighorn._arguments import Check, integer, knows_its_keywords
from bighorn.schedules._checks import CHECKS, check_value


@dataclass(frozen=True)
class Schedule(ABC):
    """The base class of all schedules. In their formulas s is the step, counted from 0.

    Raises:
        TypeError: An argument, or the step, is of a wrong type.
        ValueError: An argument, the step or the value at that step is not finite or out of range.
    """

    CHECKS: ClassVar[Mapping[str, Check]] = CHECKS

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, self.CHECKS[field.name](field.name, getattr(self, field.name)))

    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        step = integer("step", step)
        try:
            value = self._at(step)
        except OverflowError:
            value = math.inf
        return check_value(f"{type(self).__name__}(...)({step})", value)

    @abstractmethod
    def _at(self, step: int) -> float:
        """The formula, for a step that is an integer and not negative."""

    def as_list(self, steps: int) -> list[float]:
        """Return the values of the first `steps` steps.

        Example:
            >>> WarmUp(lr=1.0, warmup_steps=4).as_list(6)
            [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
        """
        return [self(step) for step in range(integer("steps", steps))]

    def __mul__(self, factor: float) -> Scaled:
        """Return this schedule times a number of at least 0.

        Example:
            >>> (WarmUp(lr=1.0, warmup_steps=4) * 0.1).as_list(3)
            [0.0, 0.025, 0.05]
        """
        return Scaled(self, factor)

    __rmul__ = __mul__

    def then(self, second: Callable[[int], float], at: int) -> Chain:
        """Return this schedule before step `at`, followed by another one, whose steps start at 0 again.

        Args:
            second: A schedule, or any callable from the step to a number.
            at: The first step of the second schedule, at least 1.

        Example:
            >>> from bighorn.schedules import PiecewiseConstant, Polynomial
            >>> WarmUp(1.0, 2).then(Polynomial(1.0, 4), at=2).then(PiecewiseConstant([], [0.1]), at=5).as_list(7)
            [0.0, 0.5, 1.0, 0.75, 0.5, 0.1, 0.1]
        """
        return Chain(self, second, at)

    def after_warmup(self, warmup_steps: int) -> Schedule:
        """Return a linear warm-up to this schedule's first value, followed by this schedule from its beginning.

        The warm-up does not start from zero, since a step at a learning rate of 0 is wasted: see `WarmUp.from_zero`.

        Args:
            warmup_steps: Steps of the warm-up; 0 for none.

        Example:
            >>> from bighorn.schedules import Polynomial
            >>> Polynomial(lr=1.0, decay_steps=4).after_warmup(2).as_list(7)
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        if integer("warmup_steps", warmup_steps) == 0:
            return self
        return WarmUp(self(0), warmup_steps, from_zero=False).then(self, at=warmup_steps)


@knows_its_keywords
@dataclass(frozen=True)
class WarmUp(Schedule):
    """lr * min(s, W) / W, where W is `warmup_steps`: from 0 to `lr`, and then `lr`.

    Args:
        lr: The value after the warm-up.
        warmup_steps: W, at least 1.
        from_zero: Whether step 0 has the value 0 and moves no weight. If not, s is counted from 1: step 0 gets
            lr / W, and step W - 1 gets `lr`. Default: True.

    Example:
        >>> WarmUp(lr=1.0, warmup_steps=4).as_list(5)
        [0.0, 0.25, 0.5, 0.75, 1.0]
        >>> WarmUp(lr=1.0, warmup_steps=4, from_zero=False).as_list(5)
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    lr: float
    warmup_steps: int
    from_zero: bool = True

    def _at(self, step: int) -> float:
        done = step if self.from_zero else step + 1
        return self.lr * min(done, self.warmup_steps) / self.warmup_steps


@knows_its_keywords
@dataclass(frozen=True)
class Chain(Schedule):
    """first(s) before step `at`, and second(s - at) from then on, as `Schedule.then` returns it.

    Args:
        first: A schedule, or any callable from the step to a number.
        second: Another schedule or callable; its steps are counted from its own start.
        at: The first step of the second schedule, at least 1.

    Example:
        >>> from bighorn.schedules import Polynomial
        >>> Chain(WarmUp(1.0, 2), Polynomial(1.0, 2), at=2).as_list(5)
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    first: Callable[[int], float]
    second: Callable[[int], float]
    at: int

    def _at(self, step: int) -> float:
        return self.first(step) if step < self.at else self.second(step - self.at)


@knows_its_keywords
@dataclass(frozen=True)
class Scaled(Schedule):
    """first(s) * factor, as `Schedule.__mul__` returns it.

    Args:
        first: A schedule, or any callable from the step to a number.
        factor: The factor, at least 0.

    Example:
        >>> Scaled(WarmUp(1.0, 2), 10.0).as_list(3)
        [0.0, 5.0, 10.0]
    """

    first: Callable[[int], float]
    factor: float

    def _at(self, step: int) -> float:
        return self.first(step) * self.factor
