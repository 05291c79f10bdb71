"""Checks with the rules, types of error and names of the documentation of other systems."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter

from bighorn.arguments import flag as flag
from bighorn.arguments import hint, is_real, number

GROUP_KEYS = ("params", "lr", "weight_decay", "grad_centralization", "order_params")


class ElementError(TypeError, ValueError):
    """An element of `params` of a wrong type, which is a TypeError and a ValueError."""


def floating(name: str, value: object, low: float, high: float = math.inf, *, inside: bool = False) -> float:
    """Return a finite number from `low` to `high`, without both bounds if `inside`."""
    return number(name, a_float(name, value), low, high, above=inside, below=inside)


def a_float(name: str, value: object) -> float:
    """Return a float of any value. Integers are refused, as in the other systems."""
    if not isinstance(value, float):
        raise TypeError(f"{name} must be a float, not {value!r} ({type(value).__name__})")
    return value


def weight_decay(name: str, value: object, high: float = math.inf) -> float | Callable[[int], Any]:
    """Return a number that is not negative, or a schedule."""
    if callable(value) and not isinstance(value, type):
        return value
    if not is_real(value):
        raise TypeError(f"{name} must be a number or a schedule, not {value!r} ({type(value).__name__})")
    return number(name, value, 0, high)


def parameters(params: Any) -> list[Any]:
    """Return parameters, (name, parameter) pairs or groups in a list; each group is checked when it is added."""
    if isinstance(params, (str, Mapping, set, Parameter)) or not isinstance(params, Iterable):
        raise TypeError(f"params must be a list of parameters or of groups, not {type(params).__name__}")
    listed = list(params)
    if all(isinstance(item, dict) for item in listed):
        return listed
    for i, item in enumerate(listed):
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            item = item[1]
        if not isinstance(item, Parameter):
            raise ElementError(
                f"params[{i}] must be a torch.nn.Parameter or a (name, Parameter) pair, or all of params groups, "
                f"not {type(item).__name__}"
            )
    return listed


def mindspore_group(group: dict[str, Any], most_decay: float = math.inf) -> dict[str, Any]:
    """Convert a group with MindSpore's keys to one of ours."""
    for key in group:
        if key not in GROUP_KEYS:
            raise ValueError(f"unknown key {key!r}{hint(key, GROUP_KEYS)}. Known: {', '.join(GROUP_KEYS)}")
    ours = dict(group)
    if "params" in group:
        ours["params"] = parameters(group["params"])
    if "weight_decay" in group:
        ours["weight_decay"] = weight_decay("weight_decay", group["weight_decay"], most_decay)
    if "grad_centralization" in group:  # in MindSpore it applies to convolutions only
        ours["grad_centralization"] = "conv" if flag("grad_centralization", group["grad_centralization"]) else False
    return ours


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Replace our names of arguments in errors. Errors about a group are unchanged: both use the same keys.

    Quoted text is a value, and is not replaced.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if str(error).startswith("group "):
            raise
        pattern = rf"(?<![\w'])({'|'.join(map(re.escape, names))})(?![\w\['])"
        raise type(error)(re.sub(pattern, lambda found: names[found[0]], str(error))) from None
