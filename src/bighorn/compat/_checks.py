"""What the documents of other systems refuse, with the types of error that they name, in the names that they use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch.nn import Parameter

from bighorn.arguments import flag as flag
from bighorn.arguments import hint, number

GROUP_KEYS = ("params", "lr", "weight_decay", "grad_centralization", "order_params")


class ElementError(TypeError, ValueError):
    """An element of `params` that cannot be one: a wrong type, and in a list that its author took for a good value."""


def floating(name: str, value: object, low: float, high: float = math.inf, *, inside: bool = False) -> float:
    """A finite number from `low` to `high`, without these two where `inside`."""
    return number(name, a_float(name, value), low, high, above=inside, below=inside)


def a_float(name: str, value: object) -> float:
    """A float, whatever its value: they refuse integers here."""
    if not isinstance(value, float):
        raise TypeError(f"{name} must be a float, not {value!r} ({type(value).__name__})")
    return value


def weight_decay(name: str, value: object, high: float = math.inf) -> float | Callable[[int], Any]:
    """A number that is not negative, or a schedule."""
    if callable(value) and not isinstance(value, type):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or a schedule, not {value!r} ({type(value).__name__})")
    return number(name, value, 0, high)


def parameters(params: Any) -> list[Any]:
    """Parameters, (name, parameter) pairs or groups in a list; groups are checked one by one when they are added."""
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
    """A group with MindSpore's keys as one of ours."""
    for key in group:
        if key not in GROUP_KEYS:
            raise ValueError(f"unknown key {key!r}{hint(key, GROUP_KEYS)}. Known: {', '.join(GROUP_KEYS)}")
    ours = dict(group)
    if "params" in group:
        ours["params"] = parameters(group["params"])
    if "weight_decay" in group:
        ours["weight_decay"] = weight_decay("weight_decay", group["weight_decay"], most_decay)
    if "grad_centralization" in group:  # theirs is for convolutions alone
        ours["grad_centralization"] = "conv" if flag("grad_centralization", group["grad_centralization"]) else False
    return ours


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name our arguments as theirs; not those about a group, whose keys are called the same in both.

    What stands in quotes is a value, and stays.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if str(error).startswith("group "):
            raise
        pattern = rf"(?<![\w'])({'|'.join(map(re.escape, names))})(?![\w\['])"
        raise type(error)(re.sub(pattern, lambda found: names[found[0]], str(error))) from None
