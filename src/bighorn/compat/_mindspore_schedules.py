"""MindSpore's learning-rate schedules: the names and argument orders of MindSpore over `bighorn.schedules`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from bighorn import schedules
from bighorn.arguments import integer, knows_its_keywords
from bighorn.compat import _checks

_positive = partial(_checks.floating, low=0, inside=True)
_not_negative = partial(_checks.floating, low=0)
_length = partial(integer, least=1)

CHECKS: dict[str, Callable[[str, object], object]] = {
    "learning_rate": _positive,
    "end_learning_rate": _not_negative,
    "max_lr": _positive,
    "min_lr": _not_negative,
    "decay_rate": _positive,
    "power": _positive,
    "decay_steps": _length,
    "warmup_steps": _length,
    "is_stair": _checks.flag,
    "update_decay_steps": _checks.flag,
}
"""The check of each argument; a name has the same meaning in every schedule."""


class LearningRateSchedule(schedules.Schedule):
    """A schedule of ours with MindSpore's arguments."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, CHECKS[field.name](field.name, getattr(self, field.name)))

    @abstractmethod
    def native(self) -> schedules.Schedule:
        """Return the equivalent of `bighorn.schedules`."""

    def _at(self, step: int) -> float:
        return self.native()(step)


@knows_its_keywords
@dataclass(frozen=True)
class PolynomialDecayLR(LearningRateSchedule):
    """MindSpore's PolynomialDecayLR, as `bighorn.schedules.Polynomial`; it is called with the step, counted from 0.

    Args:
        learning_rate: The value at step 0, a float above 0.
        end_learning_rate: The value at the end, a float, at least 0.
        decay_steps: The first step that gets `end_learning_rate`, an int, at least 1.
        power: The exponent, a float above 0.
        update_decay_steps: Whether, after each `decay_steps` steps, the value jumps up and falls again. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> schedule = PolynomialDecayLR(learning_rate=0.1, end_learning_rate=0.01, decay_steps=4, power=0.5)
        >>> round(schedule(2), 6)
        0.07364
    """

    learning_rate: float
    end_learning_rate: float
    decay_steps: int
    power: float
    update_decay_steps: bool = False

    def native(self) -> schedules.Polynomial:
        """Return the equivalent of `bighorn.schedules`."""
        return schedules.Polynomial(
            self.learning_rate, self.decay_steps, self.end_learning_rate, self.power, self.update_decay_steps
        )


@knows_its_keywords
@dataclass(frozen=True)
class WarmUpLR(LearningRateSchedule):
    """MindSpore's WarmUpLR, as `bighorn.schedules.WarmUp`: from 0 at the first step.

    Args:
        learning_rate: The value after the warm-up, a float above 0.
        warmup_steps: The first step that gets `learning_rate`, an int, at least 1.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> WarmUpLR(learning_rate=0.1, warmup_steps=2).as_list(4)
        [0.0, 0.05, 0.1, 0.1]
    """

    learning_rate: float
    warmup_steps: int

    def native(self) -> schedules.WarmUp:
        """Return the equivalent of `bighorn.schedules`."""
        return schedules.WarmUp(self.learning_rate, self.warmup_steps)


@knows_its_keywords
@dataclass(frozen=True)
class CosineDecayLR(LearningRateSchedule):
    """MindSpore's CosineDecayLR, as `bighorn.schedules.Cosine`.

    Args:
        min_lr: The value at the end, a float, at least 0.
        max_lr: The value at step 0, a float above `min_lr`.
        decay_steps: The first step that gets `min_lr`, an int, at least 1.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> [round(lr, 3) for lr in CosineDecayLR(min_lr=0.01, max_lr=0.1, decay_steps=4).as_list(6)]
        [0.1, 0.087, 0.055, 0.023, 0.01, 0.01]
    """

    min_lr: float
    max_lr: float
    decay_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr >= self.max_lr:
            raise ValueError(f"min_lr={self.min_lr!r} must be below max_lr={self.max_lr!r}; min_lr is the first")

    def native(self) -> schedules.Cosine:
        """Return the equivalent of `bighorn.schedules`."""
        return schedules.Cosine(self.max_lr, self.decay_steps, self.min_lr)


@knows_its_keywords
@dataclass(frozen=True)
class ExponentialDecayLR(LearningRateSchedule):
    """MindSpore's ExponentialDecayLR, as `bighorn.schedules.Exponential`.

    Args:
        learning_rate: The value at step 0, a float above 0.
        decay_rate: The factor of `decay_steps` steps, a float above 0.
        decay_steps: The number of steps of one decay, an int, at least 1.
        is_stair: Whether the value falls once in `decay_steps` steps and not at each. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> round(ExponentialDecayLR(learning_rate=0.1, decay_rate=0.9, decay_steps=4)(2), 8)
        0.09486833
    """

    learning_rate: float
    decay_rate: float
    decay_steps: int
    is_stair: bool = False

    def native(self) -> schedules.Exponential:
        """Return the equivalent of `bighorn.schedules`."""
        return schedules.Exponential(self.learning_rate, self.decay_rate, self.decay_steps, self.is_stair)


@knows_its_keywords
@dataclass(frozen=True)
class NaturalExpDecayLR(LearningRateSchedule):
    """MindSpore's NaturalExpDecayLR, as `bighorn.schedules.NaturalExp`: it falls by e^-decay_rate at each step.

    MindSpore's documentation divides the step by `decay_steps`; its code does not, and this class follows the code.

    Args:
        learning_rate: The value at step 0, a float above 0.
        decay_rate: The rate of each step, a float above 0.
        decay_steps: The length of a stair, an int, at least 1.
        is_stair: Whether the value falls once in `decay_steps` steps and not at each. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> NaturalExpDecayLR(0.1, 0.9, 4, True)(2)
        0.1
    """

    learning_rate: float
    decay_rate: float
    decay_steps: int
    is_stair: bool = False

    def native(self) -> schedules.NaturalExp:
        """Return the equivalent of `bighorn.schedules`."""
        return schedules.NaturalExp(self.learning_rate, self.decay_rate, self.decay_steps if self.is_stair else 1)


@knows_its_keywords
@dataclass(frozen=True)
class InverseDecayLR(LearningRateSchedule):
    """MindSpore's InverseDecayLR, as `bighorn.schedules.Inverse`.

    Args:
        learning_rate: The value at step 0, a float above 0.
        decay_rate: The amount that `decay_steps` steps add to the divisor, a float above 0.
        decay_steps: The number of steps of one decay, an int, at least 1.
        is_stair: Whether the value falls once in `decay_steps` steps and not at each. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> InverseDecayLR(learning_rate=0.1, decay_rate=2.0, decay_steps=2).as_list(3)
        [0.1, 0.05, 0.03333333333333333]
    """

    learning_rate: float
    decay_rate: float
    decay_steps: int
    is_stair: bool = False

    def native(self) -> schedules.Inverse:
        """Return the equivalent of `bighorn.schedules`."""
        return schedules.Inverse(self.learning_rate, self.decay_rate, self.decay_steps, self.is_stair)
