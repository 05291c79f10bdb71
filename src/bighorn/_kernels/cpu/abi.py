"""The structures of csrc/abi.h for ctypes, from the library's own description of them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from bighorn._kernels import options

VERSION = 980461186
"""The checksum of the fields, without option structs, which are generated from the option classes.

A library with other fields would read and write at wrong addresses. Change it with the other structures of abi.h.
"""

POINTER = ctypes.c_void_p
TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "Pair": ctypes.c_double * 2,
    "Triple": ctypes.c_double * 3,
    "RoundSums": POINTER * 3,
}
"""The types of fields by their names in C. Others are structures, or pointers, whose names end with ``*``."""

Fields = tuple[tuple[str, str, str], ...]
"""Structure, name and type of each field."""

Structures = dict[str, Any]
"""The classes of structures by their names in C."""


class _Field(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("structure", "name", "type")]


def fields_of(library: ctypes.CDLL) -> Fields:
    """Return the fields that the library was compiled with."""
    library.bighorn_fields.restype = ctypes.POINTER(_Field)
    entries = library.bighorn_fields()
    described = itertools.takewhile(lambda entry: entry.structure, map(entries.__getitem__, itertools.count()))
    return tuple((entry.structure.decode(), entry.name.decode(), entry.type.decode()) for entry in described)


def checksum(fields: Fields) -> int:
    """Return the number to compare with `VERSION`."""
    return zlib.crc32(repr([field for field in fields if not field[0].endswith("Options")]).encode())


@functools.cache
def structures_of(fields: Fields) -> Structures:
    """Return the structures with these fields."""
    found: Structures = {}
    for structure, members in itertools.groupby(fields, lambda field: field[0]):
        types = [(name, POINTER if kind.endswith("*") else {**TYPES, **found}[kind]) for _, name, kind in members]
        found[structure] = type(structure, (ctypes.Structure,), {"_fields_": types})
    return found


@functools.cache
def conversions_of(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the fields of the structure of a class of options, which has the class's name, and their conversions."""
    return {name: option.c for name, option in options.table(kind).items() if option.c}


C_TYPES: Mapping[Any, str] = {float: "double", options.c_bounds: "Pair", ctypes.c_uint64: "uint64_t"}
C_TUPLES = {2: "Pair", 3: "Triple"}
"""The types of options in C by their conversions, for tuples by their lengths; all other options are int32_t."""


def c_fields(kind: Any) -> dict[str, str]:
    """Return the fields of the structure of a class of options, each with its type in C.

    Example:
        >>> c_fields(options.KernelOptions)
        {'lr': 'double', 'weight_decay': 'double', 'maximize': 'int32_t', 'rounding_seed': 'uint64_t'}
    """
    hints = get_type_hints(kind)
    return {
        name: C_TUPLES[len(get_args(hints[name]))] if convert is tuple else C_TYPES.get(convert, "int32_t")
        for name, convert in conversions_of(kind).items()
    }


def unknown_options(fields: Fields) -> list[str]:
    """Return the classes of options whose structures in the library have other fields than here."""
    kinds: list[Any] = options.KernelOptions.__subclasses__()
    expected = {kind.__name__: list(c_fields(kind).items()) for kind in kinds}
    return [name for name, pairs in expected.items() if pairs != [field[1:] for field in fields if field[0] == name]]


def update_options(array: ctypes.Array[Any], old: Sequence[Any], new: Sequence[Any]) -> None:
    """Write into an array of `c_options` what differs between two lists of options: numbers change at each step."""
    kind: Any = type(new[0])
    conversions = conversions_of(kind)
    values_of = operator.attrgetter(*conversions)
    for slot, before, now in zip(array, old, new, strict=True):
        if now is not before:
            values = values_of(now)
            differs = map(operator.is_not, values, values_of(before))
            for (name, convert), value in itertools.compress(zip(conversions.items(), values, strict=True), differs):
                setattr(slot, name, convert(value))


def c_options(structures: Structures, each: Sequence[Any]) -> ctypes.Array[Any]:
    """Return options as the library reads them."""
    kind: Any = type(each[0])
    structure, conversions = structures[kind.__name__], conversions_of(kind).items()
    slots = [structure(**{name: convert(getattr(options, name)) for name, convert in conversions}) for options in each]
    array: ctypes.Array[Any] = (structure * len(slots))(*slots)
    return array
