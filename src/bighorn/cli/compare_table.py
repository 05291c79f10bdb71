"""The table of ``bighorn compare``, and its figures as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from bighorn.cli.metrics import metric_text
from bighorn.cli.trials import Cell, Trial


def as_json(cell: Cell) -> dict[str, Any]:
    """A cell as JSON: its configuration, its results and every run."""
    low, mean, high = cell.value
    config = asdict(cell.trials[0].config)
    return {
        "name": cell.optimizer,
        "config": {name: value for name, value in config.items() if name not in {"data", "seed"}},
        "tuned": [{"lr": lr, cell.metric: _finite(value)} for lr, value in cell.tuned],
        "on_edge": cell.on_edge,
        cell.metric: {"lowest": _finite(low), "mean": _finite(mean), "highest": _finite(high)},
        "loss": dict(zip(("lowest", "mean", "highest"), map(_finite, cell.loss), strict=True)),
        "steps": cell.trials[0].steps,
        "steps_to_target": _finite(cell.steps_to_target),
        "seconds": cell.seconds,
        "state_bytes": cell.trials[0].state_bytes,
        "curve": {"steps": [step for step, _ in cell.curve], cell.metric: [_finite(value) for _, value in cell.curve]},
        "final": [_run_as_json(cell, trial) for trial in cell.trials],
        "tuning": [_run_as_json(cell, trial) for trial in cell.tuning],
    }


def _run_as_json(cell: Cell, trial: Trial) -> dict[str, Any]:
    config = trial.config
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "warmup": config.warmup,
        "optimizer_option": config.optimizer_option,
        "seed": config.seed,
        cell.metric: _finite(trial.value),
        "loss": _finite(trial.loss),
        "steps_to_target": trial.steps_to_target,
        "seconds": round(trial.seconds, 3),
        **({"pruned": True} if trial.pruned else {}),
    }


def _finite(value: float) -> float | None:
    """Replace infinity and NaN by None, since JSON has neither."""
    return value if math.isfinite(value) else None


def table_of(rows: Sequence[Sequence[str]], head: Sequence[str]) -> Table:
    """Build the terminal's table without the last column: the report has the time, and names need the width."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in head[:-1]:
        table.add_column(name, justify="left" if name == head[0] else "right", no_wrap=True)
    previous = rows[0][0]
    for each in rows:
        if each[0] != previous:
            table.add_section()
        previous = each[0]
        table.add_row(*each[:-1])
    return table


def columns(metric: str, target: float | None) -> list[str]:
    """The heads of the table."""
    reached = "steps" if target is None else f"steps to {metric_text(metric, target, 0)}"
    return ["optimizer", "batch", "best lr", f"{metric} (min-max)", reached, "loss", "state", "time"]


def row(cell: Cell, target: bool = True) -> tuple[str, ...]:
    """A cell as text, by :func:`columns`; means over the seeds, but the median of steps and times."""
    low, mean, high = (metric_text(cell.metric, value) for value in cell.value)
    reached = f"{cell.steps_to_target:.0f} of " if math.isfinite(cell.steps_to_target) else "never of "
    return (
        cell.optimizer,
        str(cell.batch_size),
        f"{cell.lr:g}" + ("*" if cell.on_edge else ""),
        f"{mean} ({low.rstrip('%')}-{high.rstrip('%')})",
        f"{reached if target else ''}{cell.trials[0].steps}",
        "-" if math.isnan(cell.loss[1]) else f"{cell.loss[1]:.4f}",
        f"{cell.trials[0].state_bytes / 1e6:.2f} MB",
        f"{cell.seconds:.1f} s",
    )
