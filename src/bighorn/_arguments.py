"""Checks of arguments: each returns the value in its canonical form, or raises an error that names the argument.

A `Check` is called with the name of an argument and its value. The error contains the value and the allowed values.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from bighorn._foreign_options import OF_TORCH, SYNONYMS, Foreign

if TYPE_CHECKING:
    from torch import Tensor

Kind = TypeVar("Kind")
Check = Callable[[str, object], Any]
StepFunction = Callable[[int], Any]
"""A schedule, or any other function of the step (0 for the first)."""

# ---- names ----------------------------------------------------------------------------------------------


def hint(name: object, allowed: Iterable[object]) -> str:
    """The known name that was probably meant, as a question; empty if no name is similar."""
    words, meant = [str(word) for word in allowed], str(name).lower()
    same = [word for word in words if SYNONYMS.get(word, word) == SYNONYMS.get(meant, meant)]
    near = same or difflib.get_close_matches(str(name), words, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def misspells(key: str, options: Sequence[str]) -> bool:
    """Whether a key resembles an option. A key that has an option's whole name as a part, as `max_lr`, does not."""
    spelt = [letters(option) for option in options]
    if letters(key) in spelt or SYNONYMS.get(key.lower()) in options:
        return True
    near = difflib.get_close_matches(letters(key), spelt, n=1, cutoff=0.8)
    return bool(near) and not any(key.startswith(f"{option}_") or key.endswith(f"_{option}") for option in options)


def letters(text: str) -> str:
    """Keep letters and digits only, so that `weightDecay` and `weight-decay` resemble `weight_decay`."""
    return re.sub("[^a-z0-9]", "", text.lower())


def nearest(patterns: Iterable[str], names: Iterable[str]) -> str:
    """The three names that are most similar to some patterns."""
    words = " ".join(patterns)
    likest = sorted(names, key=lambda name: difflib.SequenceMatcher(None, words, name).ratio(), reverse=True)
    return ", ".join(map(repr, likest[:3]))


def unknown_name(where: str, name: object, allowed: Iterable[str], noun: str = "option") -> TypeError:
    """Return the error about a name that is not known, with the name that was probably meant."""
    allowed = list(allowed)
    return TypeError(f"{where} got an unknown {noun} {name!r}{hint(name, allowed)}. Known: {', '.join(allowed)}")


def refuse_unknown(
    names: Iterable[object], allowed: Iterable[str], where: str, foreign: Mapping[str, Foreign] = OF_TORCH
) -> None:
    """Raise for the first name that is not known, with the name that was probably meant.

    Args:
        names: The names that were given.
        allowed: The names that there are.
        where: What has these names.
        foreign: Names in other packages.
    """
    allowed = list(allowed)
    for name in names:
        if name in allowed:
            continue
        if isinstance(name, str) and (option := foreign.get(name)):
            remedy = option.remedy_with(allowed)
            raise TypeError(f"{where} got {name!r}, an option of {option.package} but not of {where}: {remedy}")
        raise unknown_name(where, name, allowed)


def asked_for(options: Mapping[str, Any], foreign: Mapping[str, Foreign]) -> dict[str, Any]:
    """Drop foreign options that ask for the default here: some trainers pass `foreach=False` to all optimizers."""

    def is_default(name: str, value: object) -> bool:
        is_off = value is None or (isinstance(value, (bool, int, float)) and not value)
        return is_off and name in foreign and foreign[name].off_is_default

    return {name: value for name, value in options.items() if not is_default(name, value)}


def refuse_group_only(names: Iterable[object], group_only: Iterable[str], where: str) -> None:
    """Raise for an option that only groups have, with the remedy."""
    for name in set(names).intersection(group_only):
        raise TypeError(
            f'{where} got {name!r}, an option of a group: give [{{"params": ..., {name!r}: ...}}] as params'
        )


def knows_its_keywords(kind: type[Kind]) -> type[Kind]:
    """Make the constructor of a class refuse unknown keywords, with the nearest keyword that it has."""
    init = kind.__init__
    names = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Kind, *args: object, **kwargs: object) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{unknown_name(type(self).__name__, name, names, 'argument')}{_of_a_base(kind, name)}")
        init(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind


def _of_a_base(kind: type[Any], name: str) -> str:
    """The base class that has an argument that a class lacks, or torch's option and what that base has instead."""
    for base in kind.__mro__[1:]:
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        path = base.__name__ if base.__module__.startswith("bighorn.compat.") else f"bighorn.{base.__name__}"
        if name in parameters:
            return f"; {path} has it"
        if "backend" in parameters and (option := OF_TORCH.get(name)):
            return f"; it is an option of {option.package}: with {path}, {option.remedy_with(parameters)}"
    return ""


class about:  # noqa: N801 - it reads as `with about(...)`; contextlib's generators take five times as long
    """A context that prefixes the message of errors with their subject."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (TypeError, ValueError)):
            raise type(error)(f"{self.what}: {error}") from error


def checked(checks: Mapping[str, Check], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values that have a check, each in its canonical form.

    Raises:
        TypeError: A value is of a wrong type.
        ValueError: A value is out of range.
    """
    return {name: checks[name](name, value) for name, value in given.items() if name in checks}


# ---- numbers --------------------------------------------------------------------------------------------


def is_real(value: object) -> TypeGuard[Real]:
    """Whether the value is a real number; True and False are not."""
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


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
    """Return a finite number from `low` to `high`.

    Args:
        name: The name of the argument.
        value: The value of the argument.
        low: The lower bound.
        high: The upper bound.
        above: Whether `low` itself is excluded.
        below: Whether `high` itself is excluded.
        span: The allowed values, in words; by default the interval.

    Raises:
        TypeError: The value is not a real number.
        ValueError: The value is out of range.
    """
    if not is_real(value):
        raise TypeError(f"{name} must be a number, not {value!r} ({type(value).__name__})")
    try:
        exact = float(value)
    except OverflowError:
        exact = math.inf
    if not math.isfinite(exact) or not low <= exact <= high or (above and exact == low) or (below and exact == high):
        least = f"above {low:g}" if above else f"at least {low:g}"
        interval = f"in {'[('[above]}{low:g}, {high:g}{'])'[below]}"
        allowed = span or (interval if high < math.inf else least)
        raise ValueError(f"{name}={value!r} is out of range: it must be a finite number {allowed}")
    return exact


def integer(name: str, value: object, least: int = 0, most: float = math.inf) -> int:
    """Return an integer, given in any integer type, from `least` to `most`.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is out of range.
    """
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
    """Return True or False.

    Raises:
        TypeError: The value is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r} ({type(value).__name__})")
    return value


def truth(name: str, value: object) -> bool:
    """Return True or False, also for 1 and 0 and for tensors of one element, as other packages' classes take them."""
    value = _read(value)
    return flag(name, bool(value) if is_real(value) and value in (0, 1) else value)


def between(low: float, high: float = math.inf) -> Check:
    """Return a check for a real number from `low` to `high`."""
    return lambda name, value: number(name, value, low, high)


def positive(name: str, value: object) -> float:
    """Return a finite number above 0."""
    return number(name, value, above=True)


def count(name: str, value: object) -> int:
    """Return an integer that is not negative, below 2**63."""
    exact = integer(name, value)
    if exact >= 2**63:
        raise ValueError(f"{name}={value!r} is out of range: it must be at least 0 and below 2**63")
    return exact


def max_norm(name: str, value: object) -> float | None:
    """Return None or a positive number."""
    return None if value is None else number(name, value, above=True, span="above 0, or None for no clip")


# ---- choices and several numbers --------------------------------------------------------------------------


def optional(check: Check) -> Check:
    """Return a check for None or a value that `check` accepts."""
    return lambda name, value: None if value is None else check(name, value)


def choice(*allowed: str | bool) -> Check:
    """Return a check for one of a few words (or True and False)."""

    def check(name: str, value: object) -> str | bool:
        if isinstance(value, (str, bool)) and any(value is word or value == word for word in allowed):
            return value
        raise ValueError(f"{name}={value!r} is not known: use {', '.join(map(repr, allowed))}{hint(value, allowed)}")

    return check


def dtype_among(dtypes: Iterable[str]) -> Check:
    """Return a check for None or the name of a dtype that state can be kept in (torch dtypes are accepted too)."""

    def check(name: str, value: object) -> str | None:
        is_dtype = not isinstance(value, str) and str(value).startswith("torch.")
        text = str(value).removeprefix("torch.") if is_dtype else value
        if text is None or (isinstance(text, str) and text in dtypes):
            return text
        names = ", ".join(f'"{dtype}"' if dtype.startswith("int") else f"torch.{dtype}" for dtype in dtypes)
        raise ValueError(f"{name}={value!r} is not supported: use None, {names}{hint(value, dtypes)}")

    return check


def _are(value: object, count: int) -> TypeGuard[Sequence[Any]]:
    """Whether the value is a sequence of this length: a tuple, a list, or the list type of a configuration library."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == count


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether the value is a tensor. This module does not import torch, so that schedules work without it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _read(value: object) -> object:
    """Return the number in a real tensor of one element, as OneCycleLR and CyclicLR write betas, or the value."""
    return value.item() if _is_tensor(value) and value.numel() == 1 and not value.is_complex() else value


def beta(name: str, value: object) -> float:
    """Return a number in [0, 1)."""
    return number(name, _read(value), 0, 1, below=True)


def came_beta1(name: str, value: object) -> float:
    """Return a number in (0, 1), for CAME's first beta."""
    exact = number(name, _read(value), 0, 1, below=True, span="in (0, 1)")
    if exact == 0:
        raise ValueError(
            f"{name}={value!r} is out of range: CAME divides by how far the momentum misses the update, and without "
            "momentum it never does; use a value in (0, 1), such as 0.9"
        )
    return exact


def came_beta3(name: str, value: object) -> float:
    """Return a number in [0, 1), for CAME's third beta."""
    if _read(value) == 1:
        raise ValueError(
            f"{name}={value!r} is out of range: the averages of the instability, by which CAME divides, would stay at "
            "0; use a value in [0, 1), such as 0.9999"
        )
    return beta(name, value)


def _betas(*checks: Check) -> Check:
    names = ", ".join(f"beta{i + 1}" for i in range(len(checks)))

    def check(name: str, value: object) -> tuple[object, ...]:
        if not _are(value, len(checks)):
            more = (
                ": beta3 is CAME's"
                if _are(value, 3)
                else ": beta3 is missing, such as 0.9999"
                if _are(value, 2)
                else ""
            )
            raise TypeError(f"{name} must be {len(checks)} numbers ({names}), not {value!r}{more}")
        return tuple(check(f"{name}[{i}]", value[i]) for i, check in enumerate(checks))

    return check


def betas(count: int) -> Check:
    """Return a check for `count` numbers in [0, 1)."""
    return _betas(*[beta] * count)


came_betas = _betas(came_beta1, beta, came_beta3)
"""The check of CAME's betas: three numbers in [0, 1), the first above 0."""


LEAST_EPS = 1.2e-38
"""The least eps of CAME, about float32's least normal number. If a gradient is 0, the averages begin as
(1 - beta2) * eps: a much smaller eps makes them 0 in float32, and u NaN."""


def came_eps(name: str, value: object) -> tuple[object, ...]:
    """Return two numbers from `LEAST_EPS`."""
    if not _are(value, 2):
        raise TypeError(
            f"{name} must be two numbers, for the squared gradient and for the instability, such as (1e-30, 1e-16), "
            f"not {value!r}"
        )
    return tuple(number(f"{name}[{i}]", eps, LEAST_EPS) for i, eps in enumerate(value))


def bounds(name: str, value: object) -> tuple[float, float] | None:
    """Return None, or a lower and an upper bound, which may be infinite."""
    if value is None:
        return None
    if not _are(value, 2):
        raise TypeError(f"{name} must be None or (low, high), not {value!r}")
    if not all(map(is_real, value)):
        raise TypeError(f"{name} must be two numbers, not {value!r}; where nothing bounds, use 0 and math.inf")
    low, high = map(float, value)
    if not 0 <= low <= high or low == math.inf or high == 0:
        raise ValueError(f"{name}={value!r} must be (low, high) with 0 <= low <= high and high above 0")
    return low, high


# ---- values by step -----------------------------------------------------------------------------------------


def schedulable(check: Check, values: Callable[[Iterable[float]], StepFunction]) -> Check:
    """Return a check that also accepts a schedule: a function of the step, or an iterable, converted by `values`."""

    def checked(name: str, value: object) -> object:
        if type(value) is float:
            return check(name, value)
        if _is_tensor(value):
            iterable = value.dim() == 1 and value.numel() != 1
        elif callable(value) and not isinstance(value, type):
            return value
        else:
            iterable = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Set))
        if not iterable:
            return check(name, value)
        try:
            return values(value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None

    return checked


def learning_rate(name: str, value: object) -> float | Tensor:
    """Return a number that is not negative, or a real tensor of one element, whose value is read at each step."""
    if not _is_tensor(value):
        return _number_of_step(name, value)
    if value.numel() != 1 or value.is_complex():
        raise ValueError(
            f"{name} as a tensor must hold one real number, not shape {tuple(value.shape)}, {value.dtype}; give the "
            "values of a schedule as a list"
        )
    if value.device.type == "cpu":  # on other devices the host would have to wait for the value
        number(name, value.detach().item())
    return value.detach() if value.requires_grad else value


def weight_decay(name: str, value: object) -> float:
    """Return a number that is not negative; a tensor of one element is read once."""
    return _number_of_step(name, _read(value))


def _number_of_step(name: str, value: object) -> float:
    if not is_real(value):
        raise TypeError(
            f"{name} must be a number, a tensor, an iterable of numbers (one for each step) or a schedule (called with "
            f"the step), not {value!r} ({type(value).__name__})"
        )
    return number(name, value)


# ---- others -----------------------------------------------------------------------------------------------


def closure(value: object) -> None:
    """Raise for a value that is not callable, such as a loss."""
    if not callable(value):
        raise TypeError(
            f"closure must be a function that computes the loss anew, not {brief(value)}: call loss.backward(), and "
            "step() without it"
        )


def brief(value: object) -> str:
    """Describe a value, without the contents of tensors and of containers."""
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, (str, bytes, int, float, complex, type(None))) else f"a {kind}"


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Return the first names of a list, and how many more there are.

    Example:
        >>> shortened(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
