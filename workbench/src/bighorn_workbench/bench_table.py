"""The table of ``bighorn bench``: measured rows as text, and the notes below them."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bighorn_workbench.peers import PEERS


def mark_clear(rows: Sequence[dict[str, Any]]) -> None:
    """Mark the rows whose ratio differs from 1 by more than the noise.

    The noise is the baseline's against itself, times the baseline's time beside this row over its best time. A ratio is
    noise, too, if some of its rounds are on the other side of 1.
    """
    measured = [row for row in rows if row["ratio"] is not None]
    least = min((row["baseline_ms"]["median"] for row in measured), default=1.0)
    noise = rows[0]["ratio"] or {"p10": 1.0, "p90": 1.0}
    for row in rows:
        row["clear"] = row is rows[0] and row in measured
        if row in measured[1:]:
            reach = max(noise["p90"], 1 / noise["p10"]) * row["baseline_ms"]["median"] / least
            low, middle, high = (row["ratio"][name] for name in ("p10", "median", "p90"))
            row["clear"] = not low <= 1 <= high and not 1 / reach <= middle <= reach


def answers(sets: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each set of shapes on the first optimizer beside the baseline."""
    lines = []
    for found in sets:
        baseline, *others = found["optimizers"]
        for row in others[:1]:
            on = f"{row['label']} on {found['shapes']}"
            lines.append(
                f"{on} takes {_median(row, 'ratio')} x the time of {baseline['label']}."
                if row["clear"]
                else f"{on} cannot be distinguished from {baseline['label']}: the difference is within the noise."
            )
    return lines


def notes(rows: Sequence[dict[str, Any]], failed: dict[str, str]) -> Iterator[str]:
    """The sentences below a table."""
    if any(row["ratio"] is not None and not row["clear"] for row in rows):
        yield (
            f"noise: the ratio cannot be distinguished from 1. The baseline against itself had "
            f"{_spread(rows[0], 'ratio')} in {rows[0]['rounds']} rounds: close other programs, or give more --seconds."
        )
    for row in rows:
        if row["ms"] is None:
            yield (
                f"{row['label']}: no device time. The host was not ahead of the device in a whole step: the step waits "
                "for the device, or launches more kernels than the device's queue holds."
            )
    for name, reason in failed.items():
        yield f"Failed: {PEERS[name].label} ({textwrap.shorten(reason, 300)})"


def _spread(row: dict[str, Any], key: str) -> str:
    return "-" if row[key] is None else f"{_number(row[key]['p10'])}-{_number(row[key]['p90'])}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else f"{value:.1g}"


def _median(row: dict[str, Any], key: str) -> str:
    return "-" if row.get(key) is None else _number(row[key]["median"])


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms": lambda row: _median(row, "ms"),
    "ms p10-p90": lambda row: _spread(row, "ms"),
    "ratio": lambda row: _median(row, "ratio") if row["ratio"] is None or row.get("clear", True) else "noise",
    "p10-p90": lambda row: _spread(row, "ratio"),
    "wall ms": lambda row: _median(row, "wall_ms"),
    "wall ratio": lambda row: _median(row, "wall_ratio"),
    "host": lambda row: f"{row['host_ms']:.2f} ms" if "host_ms" in row else "-",
    "first step": lambda row: f"{1e6 * row['first_step_s'] / row['tensors']:,.0f} us a tensor",
    "temporaries": lambda row: _megabytes(row["temporaries_bytes"]),
    "state": lambda row: _megabytes(row["state_bytes"]),
    "error": lambda row: "-" if row["error"] is None else f"{row['error']:.1e}",
}
"""The columns by name: functions from a measured row to text. The time of a first step is per tensor."""


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.1f} MB"


def as_text(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Measured rows as text, with some of :data:`COLUMNS`."""
    return [(row["label"], *(COLUMNS[name](row) for name in columns)) for row in rows]
