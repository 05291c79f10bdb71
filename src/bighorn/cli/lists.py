"""Comma-separated values on the command line."""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bighorn.cli.errors import InputError
from bighorn.cli.optimizers import OPTIMIZERS

Number = TypeVar("Number", int, float)


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


def optimizers(text: str) -> tuple[str, ...]:
    """Read names of optimizers, each once."""
    names = tuple(word.strip() for word in text.split(","))
    for name in names:
        _known("--optimizers", name, list(OPTIMIZERS))
    if len(set(names)) < len(names):
        raise InputError(f"--optimizers {text!r} names an optimizer twice.")
    return names


def learning_rates(texts: Sequence[str], names: Sequence[str]) -> Mapping[str, tuple[float, ...]]:
    """Read ``OPTIMIZER=LR,LR,...`` for some of ``names``; the others get their recipe's own."""
    grids = {name: OPTIMIZERS[name].grid for name in names}
    for text in texts:
        name, equals, rates = text.partition("=")
        if not equals:
            raise InputError(f"--lrs {text!r} is not of the form OPTIMIZER=LR,LR,... like lamb=0.01,0.02.")
        _known("--lrs", name, names)
        grids[name] = numbers("--lrs", rates, float)
    return grids


def _known(flag: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
        raise InputError(f"{flag}: no optimizer {name!r} here; {hint}")
