"""What an option's value may be: a number in a range, a list of numbers, names out of a table."""

import difflib
import math
from collections.abc import Callable, Collection
from typing import TypeVar

from bighorn.cli.errors import InputError

Number = TypeVar("Number", int, float)


def at_least(flag: str, value: float | None, least: float, most: float = math.inf) -> None:
    """Refuse a number below ``least``, above ``most`` or not finite; None is an option that was not given."""
    if value is not None and not (least <= value <= most and value < math.inf):
        raise InputError(
            f"{flag} is {value}, but must be at least {least}{f' and at most {most}' * (most < math.inf)}."
        )


def positive(flag: str, value: float | None) -> None:
    """Refuse a number that is not above 0 or not finite; None is an option that was not given."""
    if value is not None and not 0 < value < math.inf:
        raise InputError(f"{flag} is {value}, but must be a number above 0.")


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
