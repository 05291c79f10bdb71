"""The structures of csrc/abi.h for ctypes, and the comparison of both when the library is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from bighorn.kernels import options

POINTER, DOUBLE = ctypes.c_void_p, ctypes.c_double
INT32, INT64, UINT32, UINT64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64

ROUNDS = 3
"""The largest number of reductions in one CAME step: where both dims of a matrix are sharded."""


def c_fields(kind: type) -> list[tuple[str, Any]]:
    """Return the fields of the C structure for a class of options."""
    return [(name, option.c.type) for name, option in options.table(kind).items() if option.c]


class RunConfig(ctypes.Structure):
    """The team of threads and the instruction set of a call."""

    _fields_ = [
        ("parallel", POINTER),
        ("thread_num", POINTER),
        ("num_threads", POINTER),
        ("threads", INT32),
        ("isa", INT32),
    ]


class Gradient(ctypes.Structure):
    """The memory layout of one row's gradient."""

    _fields_ = [
        ("layout", POINTER),
        ("size", INT64),
        ("type", INT32),
    ]


class Weights(ctypes.Structure):
    """The weights of one row: how they are stored, and their position in the parameter."""

    _fields_ = [
        ("data", POINTER),
        ("memory", POINTER),
        ("aux", POINTER),
        ("layout", POINTER),
        ("offset", INT64),
        ("param_id", UINT32),
        ("type", INT32),
        ("rounding", INT32),
    ]


class LambOptions(ctypes.Structure):
    """The options of one bucket."""

    _fields_ = c_fields(options.LambOptions)


class LambRow(ctypes.Structure):
    """One tensor and its state."""

    _fields_ = [
        ("weights", Weights),
        ("exp_avg", POINTER),
        ("exp_avg_sq", POINTER),
        ("max_exp_avg_sq", POINTER),
        ("exp_avg_scale", POINTER),
        ("exp_avg_sq_scale", POINTER),
        ("inner", INT64),
        ("numel", INT64),
        ("step", POINTER),
        ("metrics", POINTER),
        ("state_type", INT32),
        ("options", INT32),
    ]


class CameOptions(ctypes.Structure):
    """The options of one bucket."""

    _fields_ = c_fields(options.CameOptions)


class CameRow(ctypes.Structure):
    """One tensor and its state."""

    _fields_ = [
        ("weights", Weights),
        ("exp_avg", POINTER),
        ("exp_avg_scale", POINTER),
        ("exp_avg_sq", POINTER),
        ("exp_avg_sq_row", POINTER),
        ("exp_avg_sq_col", POINTER),
        ("exp_avg_res_row", POINTER),
        ("exp_avg_res_col", POINTER),
        ("step", POINTER),
        ("metrics", POINTER),
        ("matrices", INT64),
        ("height", INT64),
        ("width", INT64),
        ("inner", INT64),
        ("state_type", INT32),
        ("options", INT32),
        ("factored", INT32),
    ]


class CameShard(ctypes.Structure):
    """The whole tensor of which a row is a shard."""

    _fields_ = [
        ("matrices", INT64),
        ("height", INT64),
        ("width", INT64),
        ("matrix_at", POINTER),
        ("row_at", POINTER),
        ("col_at", POINTER),
        ("sums", POINTER * ROUNDS),
        ("split_down", INT32),
        ("split_across", INT32),
        ("leads_down", INT32),
        ("leads_across", INT32),
    ]


C_OPTIONS: dict[type, tuple[Any, list[tuple[str, Callable[[Any], Any]]]]] = {
    kind: (structure, [(name, option.c.convert) for name, option in options.table(kind).items() if option.c])
    for kind, structure in ((options.LambOptions, LambOptions), (options.CameOptions, CameOptions))
}
"""The structure of each class of options, and the conversion of each of its fields."""


def c_options(each: Sequence[Any]) -> ctypes.Array[Any]:
    """Return options as the library reads them."""
    structure, fields = C_OPTIONS[type(each[0])]
    rows = [structure(*[convert(getattr(options, name)) for name, convert in fields]) for options in each]
    array: ctypes.Array[Any] = (structure * len(rows))(*rows)
    return array


class _FieldLayout(ctypes.Structure):
    """One field of a structure; an entry with an empty field name describes the whole structure."""

    _fields_ = [("structure", ctypes.c_char_p), ("field", ctypes.c_char_p), ("offset", INT64), ("size", INT64)]


STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    RunConfig,
    Gradient,
    Weights,
    LambOptions,
    LambRow,
    CameOptions,
    CameRow,
    CameShard,
)

Layout = dict[tuple[str, str], tuple[int, int]]
"""Offset and size in bytes by (structure, field); the whole structure has an empty field name."""


def layout_here() -> Layout:
    """Return the layout of the structures above."""
    layout = {}
    for structure in STRUCTURES:
        for name, *_ in structure._fields_:
            field = getattr(structure, name)
            layout[structure.__name__, name] = field.offset, field.size
        layout[structure.__name__, ""] = 0, ctypes.sizeof(structure)
    return layout


def layout_of(library: ctypes.CDLL) -> Layout:
    """Return the layout of the structures that the library was compiled with."""
    library.bighorn_layouts.restype = ctypes.POINTER(_FieldLayout)
    layout, entries, i = {}, library.bighorn_layouts(), 0
    while (entry := entries[i]).structure is not None:
        layout[entry.structure.decode(), entry.field.decode()] = entry.offset, entry.size
        i += 1
    return layout


def difference(library: ctypes.CDLL) -> str | None:
    """Return the first difference between the library's structures and these, in words; None if they are the same.

    A library that reads the fields of a structure at other offsets would read and write at wrong addresses.
    """
    here, there = layout_here(), layout_of(library)
    for structure, field in {**here, **there}:
        ours, theirs = here.get((structure, field)), there.get((structure, field))
        if ours != theirs:
            what = f"its field {structure}.{field}" if field else f"its structure {structure}"
            return f"{what} has {_place(theirs)}, this package's has {_place(ours)}"
    return None


def _place(place: tuple[int, int] | None) -> str:
    return "no place" if place is None else f"offset {place[0]} and {place[1]} bytes"
