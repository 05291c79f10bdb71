"""Whether values that were read from a file have the types that they need: a file may hold anything."""

import typing
from dataclasses import fields
from types import UnionType
from typing import Any


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a field, with all that is in it; an integer is a number of any type.

    Example:
        >>> fits([(1, 0.5)], list[tuple[int, float]]), fits({"a": "b"}, dict[str, float])
        (True, False)
    """
    kind, of = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if kind is UnionType:
        return any(fits(value, each) for each in of)
    if kind is dict:
        return isinstance(value, dict) and all(fits(name, of[0]) and fits(each, of[1]) for name, each in value.items())
    if kind is list or (kind is tuple and of[-1] is ...):
        return isinstance(value, kind) and all(fits(each, of[0]) for each in value)
    if kind is tuple:
        return isinstance(value, tuple) and len(value) == len(of) and all(map(fits, value, of))
    if hint in (int, float) and isinstance(value, int):
        return abs(value) < 2**53
    return isinstance(value, hint)


def check_types(record: Any) -> None:
    """Raise a TypeError for a dataclass one of whose fields has a value of another type."""
    hints = typing.get_type_hints(type(record))
    for name in (field.name for field in fields(record)):
        if not fits(value := getattr(record, name), hints[name]):
            raise TypeError(f"{name}={value!r:.200} is not {hints[name]}")
