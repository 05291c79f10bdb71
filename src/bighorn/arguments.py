"""What an argument may be: checks that return it in its canonical form, or name it, its value and what is allowed."""

from __future__ import annotations

import difflib
import inspect
import math
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from numbers import Real
from typing import TypeVar

Kind = TypeVar("Kind")

ELSEWHERE = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "weight_decay_rate": "weight_decay",
    "wd": "weight_decay",
    "beta_1": "betas",
    "beta_2": "betas",
}
"""What arguments are called elsewhere, too unlike ours for `difflib`."""


def hint(name: object, known: Iterable[object]) -> str:
    """The known name that was probably meant, as a question; nothing if there is none like it."""
    words = [str(word) for word in known]
    same = [word for word in words if ELSEWHERE.get(word, word) == ELSEWHERE.get(str(name), name)]
    near = same or difflib.get_close_matches(str(name), words, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def unknown_name(where: str, name: object, known: Iterable[str], noun: str = "option") -> TypeError:
    """The error about a name that is not known, with what was probably meant."""
    known = list(known)
    return TypeError(f"{where} got an unknown {noun} {name!r}{hint(name, known)}. Known: {', '.join(known)}")


def knows_its_keywords(kind: type[Kind]) -> type[Kind]:
    """A class whose constructor refuses keywords that it does not have with the nearest one that it has."""
    init = kind.__init__
    known = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Kind, *args: object, **kwargs: object) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown_name(type(self).__name__, name, known, "argument")
        init(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind


@contextmanager
def about(what: str) -> Iterator[None]:
    """Errors begin with what they are about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: {error}") from error


def real_number(name: str, value: object) -> float:
    """A real number as a float, infinite where that cannot hold it.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def number(
    name: str,
    value: object,
    low: float = 0.0,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    span: str | None = None,
) -> float:
    """A finite number from `low` to `high`.

    Args:
        name: The argument.
        value: What it is.
        low: The least.
        high: The most.
        above: Not `low` itself.
        below: Not `high` itself.
        span: What is allowed, in words; by default the interval.

    Raises:
        TypeError: It is no real number.
        ValueError: It is out of range.
    """
    exact = real_number(name, value)
    if not math.isfinite(exact) or not low <= exact <= high or (above and exact == low) or (below and exact == high):
        least = f"above {low:g}" if above else f"at least {low:g}"
        interval = f"in {'[('[above]}{low:g}, {high:g}{'])'[below]}"
        allowed = span or (interval if high < math.inf else least)
        raise ValueError(f"{name}={value!r} is out of range: it must be a finite number {allowed}")
    return exact


def integer(name: str, value: object, least: int = 0) -> int:
    """An integer of any type that is one, not less than `least`.

    Raises:
        TypeError: It is no integer.
        ValueError: It is less.
    """
    try:
        exact = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        exact = None
    if exact is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if exact < least:
        raise ValueError(f"{name}={value!r} is out of range: it must be an integer, at least {least}")
    return exact


def flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r} ({type(value).__name__})")
    return value
