"""Writes csrc/options.h from the classes of options: `make options`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import bighorn
from bighorn._kernels.cpu.abi import c_fields
from bighorn._kernels.options import KernelOptions

HEADER = Path(bighorn.__file__).parent / "_kernels" / "csrc" / "options.h"
FIRST = """\
/* Written by `make options` from the classes of options, most of them in _kernels/options.py; do not edit it.
 *
 * The options that the tensors of one bucket share. The value of an enum is an index among the option's values. A bound
 * that is not set is 0 or infinity. CAME's second beta can depend on the tensor (`beta2s` of bighorn_came_step). */
#ifndef BIGHORN_OPTIONS_H
#define BIGHORN_OPTIONS_H

typedef double Pair[2];
typedef double Triple[3];
"""


def written() -> str:
    """Return the text of the header."""
    subclasses: list[Any] = KernelOptions.__subclasses__()
    kinds = sorted(subclasses, key=lambda kind: kind.algorithm)
    enums = list(dict.fromkeys(enum for kind in kinds for enum in enums_of(kind)))
    lists = [macro(f"{fields_of(kind)}(FIELD, S)", fields(kind)) for kind in kinds]
    every = macro("FOR_EACH_OPTIONS(STRUCT)", [f"STRUCT({kind.__name__}, {fields_of(kind)})" for kind in kinds])
    return "\n".join([FIRST, *enums, "", "\n\n".join([*lists, every]), "", "#endif", ""])


def enums_of(kind: type) -> Iterator[str]:
    """Yield the enums of options whose values have names."""
    hints = get_type_hints(kind)
    for name in c_fields(kind):
        if get_origin(hint := hints[name]) is Literal:
            yield f"enum {{ {', '.join(f'{name}_{value}'.upper() for value in get_args(hint))} }};"


def fields_of(kind: Any) -> str:
    """Return the name of the list of fields."""
    return f"{kind.algorithm.upper()}_OPTIONS_FIELDS"


def fields(kind: type) -> list[str]:
    """Return the entries of the list of fields."""
    return [f"FIELD(S, {c_type}, {name})" for name, c_type in c_fields(kind).items()]


def macro(name: str, lines: list[str]) -> str:
    """Return the definition of a macro, as clang-format writes it."""
    start = [f"#define {name}", *(f"    {line}" for line in lines)]
    width = max(map(len, start[:-1])) + 1
    return " \\\n".join([*(f"{line:{width - 1}}" for line in start[:-1]), start[-1]])


if __name__ == "__main__":
    HEADER.write_text(written())
