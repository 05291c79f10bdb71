"""Checks of options and of attributes of tasks: each returns the value, or raises an error that names it."""

import math
import operator
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

Check = Callable[[str, object], Any]
"""A function of a value's name and the value."""


def number(name: str, value: object, low: float = 0.0, high: float = math.inf, *, above: bool = False) -> float:
    """Return a finite number from ``low`` to ``high``; ``above`` excludes ``low`` itself."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r} ({type(value).__name__})")
    try:
        exact = float(value)
    except OverflowError:
        exact = math.inf
    if not math.isfinite(exact) or not low <= exact <= high or (above and exact == low):
        least = f" above {low:g}" if above else f" at least {low:g}" if low > -math.inf else ""
        allowed = least if high == math.inf else f" in {'[('[above]}{low:g}, {high:g}]"
        raise ValueError(f"{name}={value!r} is out of range: it must be a finite number{allowed}")
    return exact


finite = partial(number, low=-math.inf)


def integer(name: str, value: object, least: int = 0, most: float = math.inf) -> int:
    """Return an integer, given in any integer type, from ``least`` to ``most``."""
    try:
        exact = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        exact = None
    if exact is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if not least <= exact <= most:
        span = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r} is out of range: it must be an integer, {span}")
    return exact


def flag(name: str, value: object) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r} ({type(value).__name__})")
    return value


def optional(check: Check) -> Check:
    """Return a check for None or a value that ``check`` accepts."""
    return lambda name, value: None if value is None else check(name, value)
