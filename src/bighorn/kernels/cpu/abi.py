"""The structures of csrc/abi.h for ctypes, from the library's own description of them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, get_args

from bighorn.kernels import options

VERSION = 1550241951
"""The checksum of the fields that this package knows.

A library with other fields would read and write at wrong addresses. Whoever changes abi.h changes it.
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
    return zlib.crc32(repr(fields).encode())


@functools.cache
def structures_of(fields: Fields) -> Structures:
    """Return the structures with these fields."""
    found: Structures = {}
    for structure, mine in itertools.groupby(fields, lambda field: field[0]):
        types = [(name, POINTER if kind.endswith("*") else {**TYPES, **found}[kind]) for _, name, kind in mine]
        found[structure] = type(structure, (ctypes.Structure,), {"_fields_": types})
    return found


Conversions = list[tuple[str, Callable[[Any], Any]]]

CONVERSIONS: dict[type, Conversions] = {
    kind: [(name, option.c) for name, option in options.table(kind).items() if option.c]
    for kind in get_args(options.AnyOptions)
}
"""The fields of the structure of each class of options, which has the class's name, and their conversions."""


def c_options(structures: Structures, each: Sequence[Any]) -> ctypes.Array[Any]:
    """Return options as the library reads them."""
    kind = type(each[0])
    structure, conversions = structures[kind.__name__], CONVERSIONS[kind]
    rows = [structure(*[convert(getattr(options, name)) for name, convert in conversions]) for options in each]
    array: ctypes.Array[Any] = (structure * len(rows))(*rows)
    return array
