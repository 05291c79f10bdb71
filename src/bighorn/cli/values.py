"""What an option's value may be: a number in a range, a list of numbers, names out of a table."""

import difflib
import math
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from bighorn.cli.errors import InputError

Number = TypeVar("Number", int, float)


def matches(value: object, hint: Any) -> bool:
    """Whether a value read from a file has the type of a field.

    Example:
        >>> matches([(1, 0.5)], list[tuple[int, float]]), matches("1", int | None)
        (True, False)
    """
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind in {types.UnionType, typing.Union}:
        return any(matches(value, part) for part in parts)
    if kind is dict:
        return isinstance(value, dict) and all(
            matches(key, parts[0]) and matches(inner, parts[1]) for key, inner in value.items()
        )
    if kind is list or (kind is tuple and parts[1:] == (...,)):
        return isinstance(value, kind) and all(matches(inner, parts[0]) for inner in value)
    if kind is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(matches, value, parts))
    if hint in {int, float}:
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        return whole or (hint is float and isinstance(value, float))
    return isinstance(value, hint)


def at_least(flag: str, value: float | None, least: float, most: float = math.inf) -> None:
    """Refuse a number below ``least``, above ``most`` or not finite; None is an option that was not given."""
    if value is not None and not (least <= value <= most and value < math.inf):
        raise InputError(
            f"{flag} is {value}, but must be at least {least}{f' and at most {most}' * (most < math.inf)}."
        )


MOST = 3.4e38
"""Of a float32, in which the kernels compute."""


def positive(flag: str, value: float | None) -> None:
    """Refuse a number that is not above 0, or that no float32 can hold; None is an option that was not given."""
    if value is not None and not 0 < value <= MOST:
        raise InputError(f"{flag} is {value}, but must be a number above 0 and at most {MOST:g}.")


def numbers(flag: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Read positive numbers, each once.

    Example:
        >>> numbers("--batch-sizes", "32,256", int)
        (32, 256)
    """
    try:
        values = tuple(kind(word) for word in text.split(","))
    except ValueError as error:
        raise InputError(f"{flag} {text!r} is not a list of numbers like 1,2,3.") from error
    if not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
        raise InputError(f"{flag} {text!r} must hold positive numbers, each once.")
    return tuple(sorted(values))


def check_name(flag: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not among ``known``."""
    if name not in known:
        raise InputError(f"{flag}: no {name!r} here; {suggestion(name, known)}")


def suggestion(name: str, known: Collection[str]) -> str:
    """The nearest of ``known`` for a wrong name, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."


def names(flag: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Read names out of ``known``, each once.

    Example:
        >>> names("--optimizers", "lamb, adamw", ["sgd", "adamw", "lamb"])
        ('lamb', 'adamw')
    """
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        check_name(flag, word, known)
    if len(set(words)) < len(words):
        raise InputError(f"{flag} {text!r} names something twice.")
    return words
