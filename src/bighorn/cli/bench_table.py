"""The table of ``bighorn bench``: measured rows as text, and the notes below them."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from bighorn.cli.peers import PEERS


def notes(rows: Sequence[dict[str, Any]], failed: dict[str, str]) -> Iterator[str]:
    """The sentences below a table."""
    noise = rows[0]["ratio"]
    if noise is not None and noise["p90"] > 1.2 * noise["p10"]:
        yield "The baseline against itself varies this much: close other programs for steadier figures."
    for row in rows:
        if row["ms"] is None:
            yield (
                f"{row['label']}: no device time. The host was not ahead of the device in a whole step: the step waits "
                "for the device, or launches more kernels than the device's queue holds."
            )
    for name, reason in failed.items():
        yield f"Failed: {PEERS[name].label} ({textwrap.shorten(reason, 300)})"


def _spread(row: dict[str, Any], key: str) -> str:
    return "-" if row[key] is None else f"{row[key]['p10']:.2f}-{row[key]['p90']:.2f}"


def _median(row: dict[str, Any], key: str) -> str:
    return "-" if row.get(key) is None else f"{row[key]['median']:.2f}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms": lambda row: _median(row, "ms"),
    "ms p10-p90": lambda row: _spread(row, "ms"),
    "ratio": lambda row: _median(row, "ratio"),
    "p10-p90": lambda row: _spread(row, "ratio"),
    "wall ms": lambda row: _median(row, "wall_ms"),
    "wall ratio": lambda row: _median(row, "wall_ratio"),
    "host": lambda row: f"{row['host_ms']:.2f} ms" if "host_ms" in row else "-",
    "first step": lambda row: f"{1e6 * row['first_step_s'] / row['tensors']:,.0f} us a tensor",
    "temporaries": lambda row: _megabytes(row["temporaries_bytes"]),
    "state": lambda row: _megabytes(row["state_bytes"]),
    "error": lambda row: "-" if row["error"] is None else f"{row['error']:.1e}",
}
"""The columns by name: functions from a measured row to text. The time of a first step is that of a tensor."""


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.1f} MB"


def as_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Table:
    """A table of measured rows with some of :data:`COLUMNS`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("optimizer")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["label"], *(COLUMNS[name](row) for name in columns))
    return table
