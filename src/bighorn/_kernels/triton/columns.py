"""The columns of the tables that kernels of every algorithm read: their numbers, and their values by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl


def numbered(count: int, first: Any = 0) -> tuple[Any, ...]:
    """Return the numbers of columns of a table, from `first` on, as constants for kernels."""
    return tuple(tl.constexpr(first + i) for i in range(count))


SLOT = tl.constexpr(48)


class SlotColumns:
    """Columns of the table of slots, int64, a slot for each tensor: their numbers, for kernels, and slots by names."""

    def __init__(self, *names: str, after: tuple[str, ...] = ()) -> None:
        self.names = (*after, *names)
        self.__dict__.update(zip(names, numbered(len(names), len(after)), strict=True))

    def pack(self, **values: int) -> list[int]:
        """Return a slot, which needs a value for each column, those before these columns included."""
        if values.keys() != set(self.names):
            raise KeyError(f"columns without a value, or values without a column: {values.keys() ^ set(self.names)}")
        return [values[name] for name in self.names] + [0] * (SLOT.value - len(self.names))


ADDRESSES = {"EXP_AVG_SCALE": "exp_avg_scale", "EXP_AVG_SQ": "exp_avg_sq"}
"""The columns of addresses of state tensors, or 0; an algorithm adds others."""

slot: Any = SlotColumns(
    "SIZE",  # in elements
    "FIRST",  # its first chunk
    "STOP",  # the chunk after its last
    "PARAM",  # addresses
    "EXP_AVG",
    "STEP",
    "NORMS",
    "COUNTS",  # 1 if this slot advances `step`, which the slices of a parameter share
    "HYPER",  # its row in the table of hyper-parameters
    "AUX",  # the address of the aux state
    "INNER",  # elements per index of dim 0, which blocks of codes do not cross
    "KEY",  # the key of its random bits
    "POSITION",  # the position of its first element in the whole parameter
    "RUN",  # elements that are consecutive in the whole parameter, too
    "RUNS",  # the number of such runs at distances of RUN_STEP
    "RUN_STEP",
    "RUNS_STEP",  # the distance from RUNS such runs to the next
    *ADDRESSES,
)
"""The columns that every algorithm has; its own come after these."""

# The table of hyper-parameters: float64, a row for each bucket (Triton reserves the name `options`).
LR, SIGN, DECAY, ALGORITHM_OPTION = numbered(4)  # SIGN is -1 to maximize
OPTION = tl.constexpr(16)


class OptionColumns:
    """An algorithm's columns in the table of hyper-parameters: their names, for kernels, and their values."""

    def __init__(self, **values: Callable[[Any], float]) -> None:
        self._values, self._rest = tuple(values.values()), [0.0] * (OPTION.value - ALGORITHM_OPTION.value - len(values))
        self.__dict__.update(zip(values, numbered(len(values), ALGORITHM_OPTION), strict=True))

    def row(self, options: Any) -> list[float]:
        """Return the values for a bucket's options, in the order of the columns, up to the end of the row."""
        return [value(options) for value in self._values] + self._rest
