"""Schedules: a learning rate or a weight decay by step, counted from 0.

A schedule is a small frozen dataclass that is called with the step. It keeps nothing, so it can be shared between
groups, compared, hashed, copied and pickled; its repr is the code that makes it. Where a schedule is taken, any other
callable from the step to a number will do as well.

In the formulas s is the step and D is `decay_steps`.

Example:
    >>> from bighorn.schedules import Cosine
    >>> schedule = Cosine(lr=0.1, decay_steps=4).after_warmup(2)
    >>> [round(lr, 3) for lr in schedule.as_list(8)]
    [0.05, 0.1, 0.1, 0.085, 0.05, 0.015, 0.0, 0.0]
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from itertools import islice, pairwise
from numbers import Real

__all__ = [
    "Chain",
    "Cosine",
    "Exponential",
    "Inverse",
    "NaturalExp",
    "PiecewiseConstant",
    "Polynomial",
    "Schedule",
    "Values",
    "WarmUp",
    "large_batch",
    "scaled_lr",
]

MAX_VALUES = 2**22
"""Steps that `Values.of` takes before it calls an iterable infinite."""


# ---- what may stand in a schedule and come out of it -------------------------------------------------------------


def real_number(name: str, value: object) -> float:
    """A real number as a float, infinite where that cannot hold it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_value(name: str, value: object, *, above_zero: bool = False) -> float:
    """A finite number that is not negative: all that a learning rate or a weight decay can be at any step."""
    value = _plain(value)
    exact = real_number(name, value)
    if not 0 <= exact < math.inf or (above_zero and exact == 0):
        allowed = "above 0" if above_zero else "at least 0"
        raise ValueError(f"{name}={value!r} is out of range: it must be a finite number {allowed}")
    return exact


def check_count(name: str, value: object, *, least: int = 0) -> int:
    """An integer that is not less than `least`."""
    try:
        exact = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        exact = None
    if exact is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if exact < least:
        raise ValueError(f"{name}={value!r} is out of range: it must be an integer, at least {least}")
    return exact


def _check_length(name: str, value: object) -> int:
    return check_count(name, value, least=1)


def _check_positive(name: str, value: object) -> float:
    return check_value(name, value, above_zero=True)


def _check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r} ({type(value).__name__})")
    return value


def _check_callable(name: str, value: object) -> object:
    if not callable(value):
        raise TypeError(f"{name} must be a schedule or another callable of the step, not {value!r}")
    return value


def _check_values(name: str, value: object) -> tuple[float, ...]:
    values = tuple(check_value(f"{name}[{i}]", item) for i, item in enumerate(_sequence(name, value)))
    if not values:
        raise ValueError(f"{name} is empty: it must hold a number for every step (was a generator used up before?)")
    return values


def _check_boundaries(name: str, value: object) -> tuple[int, ...]:
    boundaries = tuple(_check_length(f"{name}[{i}]", item) for i, item in enumerate(_sequence(name, value)))
    if any(later <= earlier for earlier, later in pairwise(boundaries)):
        raise ValueError(f"{name}={boundaries!r} must ascend, each step once")
    return boundaries


def _sequence(name: str, value: object) -> Sequence[object]:
    value = _plain(value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list or a tuple of numbers, not {value!r} ({type(value).__name__})")
    return value


def _plain(value: object) -> object:
    """A tensor's or an array's content in Python's own numbers and lists; anything else as it is."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


CHECKS: dict[str, Callable[[str, object], object]] = {
    "lr": check_value,
    "end_lr": check_value,
    "decay_rate": _check_positive,
    "power": _check_positive,
    "decay_steps": _check_length,
    "stair_steps": _check_length,
    "warmup_steps": _check_length,
    "at": _check_length,
    "staircase": _check_flag,
    "update_decay_steps": _check_flag,
    "from_zero": _check_flag,
    "boundaries": _check_boundaries,
    "values": _check_values,
    "first": _check_callable,
    "second": _check_callable,
}
"""What each argument may be: a name means the same in every schedule."""


# ---- the schedules -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule(ABC):
    """What all schedules can do.

    Raises:
        TypeError: An argument, or the step, is of a wrong type.
        ValueError: An argument, the step or the value at that step is not finite or out of range.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, CHECKS[field.name](field.name, getattr(self, field.name)))

    def __call__(self, step: int) -> float:
        """The value at a step, counted from 0."""
        step = check_count("step", step)
        try:
            value = self._at(step)
        except OverflowError:
            value = math.inf
        return check_value(f"{type(self).__name__}(...)({step})", value)

    @abstractmethod
    def _at(self, step: int) -> float:
        """The formula, for a step that is an integer and not negative."""

    def as_list(self, steps: int) -> list[float]:
        """The values of the first `steps` steps.

        Example:
            >>> WarmUp(lr=1.0, warmup_steps=4).as_list(6)
            [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
        """
        return [self(step) for step in range(check_count("steps", steps))]

    def then(self, second: Callable[[int], float], at: int) -> Chain:
        """This schedule before step `at`, and from there on another one, which sees steps from 0 again.

        Args:
            second: A schedule, or any callable from the step to a number.
            at: The first step of the second schedule, at least 1.

        Example:
            >>> WarmUp(1.0, 2).then(Polynomial(1.0, 4), at=2).then(PiecewiseConstant([], [0.1]), at=5).as_list(7)
            [0.0, 0.5, 1.0, 0.75, 0.5, 0.1, 0.1]
        """
        return Chain(self, second, at)

    def after_warmup(self, warmup_steps: int) -> Schedule:
        """A linear warm-up to this schedule's first value, and then this schedule from its beginning.

        The warm-up does not start from zero, since a step at a learning rate of 0 is a step lost: see
        `WarmUp.from_zero`.

        Args:
            warmup_steps: Steps of the warm-up; 0 for none.

        Example:
            >>> Polynomial(lr=1.0, decay_steps=4).after_warmup(2).as_list(7)
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        if check_count("warmup_steps", warmup_steps) == 0:
            return self
        return WarmUp(self(0), warmup_steps, from_zero=False).then(self, at=warmup_steps)


@dataclass(frozen=True)
class Exponential(Schedule):
    """lr * decay_rate ** (s / D); as a staircase lr * decay_rate ** floor(s / D).

    Args:
        lr: The value at step 0.
        decay_rate: The factor of D steps, above 0.
        decay_steps: D, at least 1.
        staircase: Whether the value falls once in D steps and not at each. Default: False.

    Example:
        >>> Exponential(lr=1.0, decay_rate=0.25, decay_steps=2).as_list(5)
        [1.0, 0.5, 0.25, 0.125, 0.0625]
        >>> Exponential(lr=1.0, decay_rate=0.25, decay_steps=2, staircase=True).as_list(5)
        [1.0, 1.0, 0.25, 0.25, 0.0625]
    """

    lr: float
    decay_rate: float
    decay_steps: int
    staircase: bool = False

    def _at(self, step: int) -> float:
        return self.lr * math.pow(self.decay_rate, _decays(step, self.decay_steps, self.staircase))


@dataclass(frozen=True)
class NaturalExp(Schedule):
    """lr * exp(-decay_rate * floor(s / n) * n), where n is `stair_steps`; without stairs lr * exp(-decay_rate * s).

    Args:
        lr: The value at step 0.
        decay_rate: The rate of each step, above 0.
        stair_steps: Steps that share a value, at least 1. Default: 1.

    Example:
        >>> [round(lr, 3) for lr in NaturalExp(lr=1.0, decay_rate=0.5).as_list(4)]
        [1.0, 0.607, 0.368, 0.223]
        >>> [round(lr, 3) for lr in NaturalExp(lr=1.0, decay_rate=0.5, stair_steps=2).as_list(4)]
        [1.0, 1.0, 0.368, 0.368]
    """

    lr: float
    decay_rate: float
    stair_steps: int = 1

    def _at(self, step: int) -> float:
        return self.lr * math.exp(-self.decay_rate * (step // self.stair_steps * self.stair_steps))


@dataclass(frozen=True)
class Inverse(Schedule):
    """lr / (1 + decay_rate * s / D); as a staircase lr / (1 + decay_rate * floor(s / D)).

    Args:
        lr: The value at step 0.
        decay_rate: What D steps add to the divisor, above 0.
        decay_steps: D, at least 1.
        staircase: Whether the value falls once in D steps and not at each. Default: False.

    Example:
        >>> Inverse(lr=1.0, decay_rate=2.0, decay_steps=2).as_list(4)
        [1.0, 0.5, 0.3333333333333333, 0.25]
    """

    lr: float
    decay_rate: float
    decay_steps: int
    staircase: bool = False

    def _at(self, step: int) -> float:
        return self.lr / (1 + self.decay_rate * _decays(step, self.decay_steps, self.staircase))


def _decays(step: int, decay_steps: int, staircase: bool) -> float:
    """How many times the decay was applied so far: in stairs, or with fractions."""
    return step // decay_steps if staircase else step / decay_steps


@dataclass(frozen=True)
class Cosine(Schedule):
    """end_lr + (lr - end_lr) / 2 * (1 + cos(pi * min(s, D) / D)): half a wave, and `end_lr` ever after.

    Args:
        lr: The value at step 0.
        decay_steps: D, the first step that gets `end_lr`; at least 1.
        end_lr: The value at the end. Default: 0.0.

    Example:
        >>> [round(lr, 3) for lr in Cosine(lr=1.0, decay_steps=4, end_lr=0.2).as_list(6)]
        [1.0, 0.883, 0.6, 0.317, 0.2, 0.2]
    """

    lr: float
    decay_steps: int
    end_lr: float = 0.0

    def _at(self, step: int) -> float:
        done = min(step, self.decay_steps) / self.decay_steps
        return self.end_lr + (self.lr - self.end_lr) / 2 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Polynomial(Schedule):
    """(lr - end_lr) * (1 - min(s, D) / D) ** power + end_lr, and `end_lr` ever after; linear for a power of 1.

    Args:
        lr: The value at step 0.
        decay_steps: D, the first step that gets `end_lr`; at least 1.
        end_lr: The value at the end. Default: 0.0.
        power: The exponent, above 0. Default: 1.0.
        update_decay_steps: Whether D grows with the step, to D * max(ceil(s / D), 1): after each D steps the value
            leaps up and falls to `end_lr` again, more slowly each time. Default: False.

    Example:
        >>> Polynomial(lr=1.0, decay_steps=2, power=2.0).as_list(4)
        [1.0, 0.25, 0.0, 0.0]
        >>> Polynomial(lr=1.0, decay_steps=2, update_decay_steps=True).as_list(5)
        [1.0, 0.5, 0.0, 0.25, 0.0]
    """

    lr: float
    decay_steps: int
    end_lr: float = 0.0
    power: float = 1.0
    update_decay_steps: bool = False

    def _at(self, step: int) -> float:
        rounds = max(math.ceil(step / self.decay_steps), 1) if self.update_decay_steps else 1
        decay_steps = self.decay_steps * rounds
        left = (decay_steps - min(step, decay_steps)) / decay_steps
        return (self.lr - self.end_lr) * math.pow(left, self.power) + self.end_lr


@dataclass(frozen=True)
class WarmUp(Schedule):
    """lr * min(s, W) / W, where W is `warmup_steps`: from 0 to `lr`, and `lr` ever after.

    Args:
        lr: The value after the warm-up.
        warmup_steps: W, at least 1.
        from_zero: Whether step 0 gets 0, which moves nothing. If not, s is counted from 1: step 0 gets lr / W, and step
            W - 1 gets `lr`. Default: True.

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


@dataclass(frozen=True)
class PiecewiseConstant(Schedule):
    """values[0] before step boundaries[0], values[1] from there to before boundaries[1], and so on.

    Args:
        boundaries: The steps at which the value changes, ascending; none for a constant.
        values: The values, one more than boundaries.

    Raises:
        ValueError: The boundaries do not ascend, or there is not one value more than boundaries.

    Example:
        >>> PiecewiseConstant(boundaries=[2, 3], values=[1.0, 0.5, 0.1]).as_list(5)
        [1.0, 1.0, 0.5, 0.1, 0.1]
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"values must be one more than boundaries, but they are {len(self.values)} for "
                f"{len(self.boundaries)}: give the value before the first boundary and the one from each boundary on"
            )

    def _at(self, step: int) -> float:
        return self.values[bisect_right(self.boundaries, step)]


@dataclass(frozen=True)
class Values(Schedule):
    """values[s]: a list with one value for every step, and an error past its end.

    Args:
        values: The values in a list or a tuple, at least one; `Values.of` takes other iterables.

    Raises:
        ValueError: There are no values, one of them cannot be a learning rate, or the step is past the end.

    Example:
        >>> Values([0.1, 0.05]).as_list(2)
        [0.1, 0.05]
        >>> Values([0.1, 0.05])(2)
        Traceback (most recent call last):
        ...
        ValueError: step=2 is past the end of a schedule of 2 values, for steps 0 to 1: make it as long as the training
    """

    values: Sequence[float]

    @classmethod
    def of(cls, values: Iterable[float]) -> Values:
        """The values of any iterable: a list, a generator, a 1-D tensor or array. It is read to its end at once.

        Args:
            values: Numbers in the order of the steps, at least 1 and at most 4194304 of them (2**22).

        Raises:
            TypeError: It is not iterable, has no order, or holds something that is not a number.
            ValueError: It is empty, endless, or holds a number that is negative or not finite.

        Example:
            >>> Values.of(0.1 / (step + 1) for step in range(4))(3)
            0.025
        """
        plain = _plain(values)
        if isinstance(plain, (str, bytes, Set, Mapping)) or not isinstance(plain, Iterable):
            raise TypeError(f"values must be numbers in an order, as a list or a generator, not {values!r}")
        read = tuple(islice(plain, MAX_VALUES + 1))
        if len(read) > MAX_VALUES:
            raise ValueError(
                f"values go on after {MAX_VALUES} steps, perhaps without an end: "
                "give a schedule or a function of the step instead"
            )
        return cls(read)

    def _at(self, step: int) -> float:
        if step >= len(self.values):
            raise ValueError(
                f"step={step} is past the end of a schedule of {len(self.values)} values, for steps 0 to "
                f"{len(self.values) - 1}: make it as long as the training"
            )
        return self.values[step]


@dataclass(frozen=True)
class Chain(Schedule):
    """first(s) before step `at`, and second(s - at) from there on: what `Schedule.then` returns.

    Args:
        first: A schedule, or any callable from the step to a number.
        second: Another one; its steps are counted from its own start.
        at: The first step of the second one, at least 1.

    Example:
        >>> Chain(WarmUp(1.0, 2), Polynomial(1.0, 2), at=2).as_list(5)
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    first: Callable[[int], float]
    second: Callable[[int], float]
    at: int

    def _at(self, step: int) -> float:
        return self.first(step) if step < self.at else self.second(step - self.at)


# ---- from one batch size to another ------------------------------------------------------------------------------

RULES: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "linear": float}
"""How the learning rate grows with the batch."""


def scaled_lr(base_lr: float, base_batch: int, batch: int, rule: str = "sqrt") -> float:
    """The learning rate for `batch`, where `base_lr` is good for `base_batch`.

    Args:
        base_lr: A learning rate.
        base_batch: The samples per step that it is meant for.
        batch: The samples per step to use.
        rule: "sqrt" multiplies the learning rate by the square root of batch / base_batch, as LAMB's authors do;
            "linear" by batch / base_batch itself. Default: "sqrt".

    Example:
        >>> scaled_lr(0.01, base_batch=256, batch=4096), scaled_lr(0.01, base_batch=256, batch=4096, rule="linear")
        (0.04, 0.16)
    """
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not known: use {' or '.join(map(repr, RULES))}")
    growth = _check_length("batch", batch) / _check_length("base_batch", base_batch)
    return check_value("base_lr", base_lr) * RULES[rule](growth)


def large_batch(
    base_lr: float, base_batch: int, batch: int, *, steps: int, base_warmup: float, rule: str = "sqrt"
) -> Schedule:
    """The schedule for `batch` from what is good for `base_batch`, untuned: how LAMB's authors scale the batch.

    The learning rate grows by the square root of the batch and the warm-up's share of the run grows linearly, so that
    at a fixed number of epochs the warm-up always takes as many steps; after it, linear decay to 0.

    Source: You et al., arXiv:1904.00962v5, section 4.3 with Table 4 (BERT) and Table 5 (ResNet-50); the decay,
    lr * (1 - t / T), is that of section 4.1. The paper does not say from where t counts: here, from the warm-up's end.

    Args:
        base_lr: The peak learning rate that is good for `base_batch`.
        base_batch: Samples per step that `base_lr` and `base_warmup` are meant for.
        batch: Samples per step of this run.
        steps: Steps of this run, warm-up included.
        base_warmup: The share of the run that is warm-up at `base_batch`, at least 0 and below 1.
        rule: How the learning rate grows: "sqrt", the paper's, or "linear". Default: "sqrt".

    Raises:
        ValueError: A value is out of range, or at this batch the warm-up would fill the run.

    Example:
        Three columns of Table 4: at batches 512, 4K and 32K the learning rates 5 / (2^3 * 10^3), 5 / (2^1.5 * 10^3)
        and 5 / (2^0 * 10^3), and warm-up for 1/320, 1/40 and 1/5 of the steps.

        >>> for batch, steps in ((512, 1_000_000), (4096, 125_000), (32768, 15_625)):
        ...     schedule = large_batch(5 / (2**3 * 10**3), 512, batch, steps=steps, base_warmup=1 / 320)
        ...     print(batch, round(schedule.first.lr, 6), f"1/{steps // schedule.at}")
        512 0.000625 1/320
        4096 0.001768 1/40
        32768 0.005 1/5
    """
    lr = scaled_lr(base_lr, base_batch, batch, rule)
    share = check_value("base_warmup", base_warmup) * batch / base_batch
    warmup_steps = round(share * _check_length("steps", steps))
    if warmup_steps >= steps:
        raise ValueError(
            f"base_warmup={base_warmup!r} of the run at batch {base_batch} becomes {share:g} of it at batch {batch}, "
            f"which leaves no step of {steps}: take a smaller batch or a shorter warm-up"
        )
    return Polynomial(lr, steps - warmup_steps).after_warmup(warmup_steps)
