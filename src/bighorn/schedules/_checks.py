"""Checks of the arguments and the values of schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from bighorn._arguments import flag, integer, number


def check_value(name: str, value: object, *, above_zero: bool = False) -> float:
    """Return a finite number that is not negative, which a learning rate or a weight decay must be at any step."""
    return number(name, plain(value), above=above_zero)


def check_length(name: str, value: object) -> int:
    """Return a number of steps or samples, at least 1."""
    return integer(name, value, least=1)


def _check_positive(name: str, value: object) -> float:
    return check_value(name, value, above_zero=True)


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
    boundaries = tuple(check_length(f"{name}[{i}]", item) for i, item in enumerate(_sequence(name, value)))
    if any(later <= earlier for earlier, later in pairwise(boundaries)):
        raise ValueError(f"{name}={boundaries!r} must ascend, each step once")
    return boundaries


def _sequence(name: str, value: object) -> Sequence[object]:
    value = plain(value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list or a tuple of numbers, not {value!r} ({type(value).__name__})")
    return value


def plain(value: object) -> object:
    """Return the content of a tensor or an array as Python's own numbers and lists, and anything else unchanged."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


CHECKS: dict[str, Callable[[str, object], object]] = {
    "lr": check_value,
    "end_lr": check_value,
    "factor": check_value,
    "decay_rate": _check_positive,
    "power": _check_positive,
    "decay_steps": check_length,
    "stair_steps": check_length,
    "warmup_steps": check_length,
    "at": check_length,
    "staircase": flag,
    "update_decay_steps": flag,
    "from_zero": flag,
    "warmup_init": flag,
    "boundaries": _check_boundaries,
    "values": _check_values,
    "first": _check_callable,
    "second": _check_callable,
}
"""The check of each argument; a name has the same meaning in every schedule."""
