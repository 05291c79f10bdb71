"""``bighorn compare``: optimizers at several batch sizes, each with a tuned learning rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from bighorn.arguments import number
from bighorn.cli import files, sweep
from bighorn.cli.config import DATA_HELP, PRECISIONS, TASK_HELP, RunConfig
from bighorn.cli.display import counting, duration, terminal
from bighorn.cli.environment import provenance
from bighorn.cli.errors import InputError
from bighorn.cli.metrics import metric_text
from bighorn.cli.optimizers import CONTESTANTS, OPTIMIZERS
from bighorn.cli.options import COUNT, FILE, Command, Options, command_line, config_options, option
from bighorn.cli.run import Run
from bighorn.cli.tasks import TASKS, TaskName, fingerprint, load
from bighorn.cli.tasks.trial import Trial
from bighorn.cli.tasks.user import UserTask
from bighorn.cli.values import check_name, device_of, names, numbers
from bighorn.cli.verdict import expected_seconds, verdicts
from bighorn.tasks import defaults

WIDEST = 120
"""Columns of text of the table on any terminal, since wrapped lines are better than truncated names."""


@dataclass(frozen=True)
class CompareConfig(Options):
    """The options of a comparison; None stands for the task's default."""

    task: str = option("digits", TASK_HELP, kind=TaskName())
    data: str | None = option(None, DATA_HELP, shown="what comes with the task")
    optimizers: str | None = option(None, f"Optimizers, of {', '.join(CONTESTANTS)}.", shown="lamb,adamw")
    batch_sizes: str | None = option(
        None,
        "Batch sizes.",
        shown="by task "
        + "; ".join(f"{name} {','.join(map(str, defaults(task).batch_sizes))}" for name, task in TASKS.items()),
    )
    lrs: tuple[str, ...] = option(
        (),
        "Learning rates to try, as OPTIMIZER=LR,LR,...; may be repeated. Two or more are continued while one "
        f"at the end is the best, by {sweep.BEYOND} at most.",
        shown="; ".join(f"{name}={','.join(f'{lr:g}' for lr in recipe.grid)}" for name, recipe in OPTIMIZERS.items()),
    )
    epochs: float | None = option(None, "Passes over the training data, the same for every run.", shown="the task's")
    seeds: int = option(3, "Seeds of each cell: 0, 1, ...", check=COUNT)
    tuning_seeds: int | None = option(
        None, "Seeds that learning rates are chosen by, if fewer.", shown="as --seeds", check=COUNT
    )
    target: float | None = option(
        None,
        "Value of the task's metric on test data to count the steps to.",
        shown=", ".join(f"{name} {defaults(task).target:g}" for name, task in TASKS.items()),
        check=number,
    )
    precision: str = option("fp32", "Type of weights and gradients.", choices=tuple(PRECISIONS))
    processes: int | None = option(
        None, "Runs at a time, each on one thread.", shown="one per processor, and one on a GPU", check=COUNT
    )
    device: str = option("cpu", "Device of torch for the runs.")

    def cells(self, task: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The optimizers and the batch sizes."""
        about = defaults(task)
        sizes = about.batch_sizes or (about.batch_size,)
        if self.batch_sizes is not None:
            sizes = numbers("--batch-sizes", self.batch_sizes, int)
        return names("--optimizers", "lamb,adamw" if self.optimizers is None else self.optimizers, CONTESTANTS), sizes


@click.command(
    cls=Command, epilog="Example: bighorn compare --optimizers lamb,adamw --batch-sizes 64,512 --report compare.html"
)
@config_options(CompareConfig)
@click.option("--report", type=FILE, help="Write an HTML report.")
@click.option("--json", "json_file", type=FILE, help="Write every run as JSON.")
@click.pass_context
def compare(ctx: click.Context, /, report: Path | None, json_file: Path | None, **options: Any) -> None:
    """Compare optimizers over batch sizes at a fixed number of epochs.

    Each optimizer at each batch size gets its own learning rate: every rate of a stated grid is tried, on every seed or
    on some of them, with a fifth of the training data held out, and the one with the highest mean accuracy on
    that fifth is taken; a grid whose end is the best is continued. Then each seed trains on all training data, and the
    test data are looked at for the first time.
    """
    config = CompareConfig(**options)
    device_of(config.device)
    task = load(config.task, config.data)
    optimizers, batch_sizes = config.cells(task)
    grids = learning_rates(config.lrs, optimizers)
    about_task = defaults(task)
    target = about_task.target if config.target is None else config.target
    processes = config.processes or (sweep.available_processors() if config.device == "cpu" else 1)
    tuning_seeds = config.tuning_seeds or config.seeds
    files.check_outputs({"--report": report, "--json": json_file}, {"--data": config.data})

    console = terminal()
    shared = {name: getattr(config, name) for name in ("task", "data", "epochs", "precision", "device")}
    bases = [
        (name, RunConfig(**(shared | CONTESTANTS[name]), batch_size=size, threads=1).resolved(task))
        for name in optimizers
        for size in batch_sizes
    ]
    epochs = bases[0][1].epochs
    held_out = sweep.held_out(task)
    if isinstance(task, UserTask):
        for _, base in bases[: len(batch_sizes)]:
            Trial(task, base).run(("test", "validation") if held_out is task else ("test",))
    fresh = [(name, Run(base, held_out)) for name, base in bases]  # an error of the last cell comes before any run
    settings = asdict(config) | {
        "optimizers": ", ".join(optimizers),
        "batch_sizes": ", ".join(map(str, batch_sizes)),
        "lrs": "; ".join(f"{name} {_rates(grids[name])}" for name in grids),
        "epochs": epochs,
        "tuning_seeds": tuning_seeds,
        "target": target,
        "processes": processes,
    }
    about = provenance(command_line(ctx))
    runs = sweep.count(bases, grids, config.seeds, tuning_seeds)
    length = f"{bases[0][1].steps} steps" if epochs is None else f"{epochs:g} epochs"
    console.print(f"{config.task}: {defaults(task).description}; {length}, {runs} runs, {processes} at a time")
    for name in grids:
        console.print(f"{name}: learning rates {_rates(grids[name])}")
    seconds = expected_seconds(fresh, grids, config.seeds, tuning_seeds) / processes
    console.print(f"This takes {duration(seconds)}, and more where a grid is continued.")
    del fresh
    with counting(console) as bar:
        task_id = bar.add_task("runs", total=runs)
        cells = sweep.run_cells(
            bases,
            grids,
            config.seeds,
            tuning_seeds,
            target,
            processes,
            task,
            made=lambda: bar.advance(task_id),
            added=lambda more: bar.update(task_id, total=(bar.tasks[0].total or 0) + more),
        )

    head = columns(task.metric, target)
    answers, notes = verdicts(cells), [*continued(cells, grids), *warnings(cells)]
    for line in answers:
        console.print(line)
    terminal(width=max(console.width, WIDEST)).print(_table(cells, head))
    for note in notes:
        console.print(note)
    notes = answers + notes

    def page() -> str:
        from bighorn.cli.reports.compare import compare_report

        rows = [row(cell) for cell in cells]
        return compare_report(cells, defaults(task).description, head, rows, notes, about["command"], settings)

    content = {
        **about,
        "config": settings,
        "data": {"description": defaults(task).description, "sha256": fingerprint(task, batch_sizes[0])},
        "cells": [as_json(cell) for cell in cells],
        "words": notes,
    }
    files.finish(console.print, report, page, json_file, lambda: content)


def learning_rates(texts: Sequence[str], optimizers: Sequence[str]) -> Mapping[str, tuple[float, ...]]:
    """Read ``OPTIMIZER=LR,LR,...`` for some of ``optimizers``; the others use their recipe's rates."""
    grids = {name: OPTIMIZERS[CONTESTANTS[name]["optimizer"]].grid for name in optimizers}
    for text in texts:
        name, equals, rates = text.partition("=")
        if not equals:
            raise InputError(f"--lrs {text!r} is not of the form OPTIMIZER=LR,LR,... like lamb=0.01,0.02.")
        check_name("--lrs", name, optimizers)
        grids[name] = numbers("--lrs", rates, float)
    return grids


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in rates)


def as_json(cell: sweep.Cell) -> dict[str, Any]:
    """A cell as JSON: its configuration, its results and every run."""
    low, middle, high = cell.value
    config = asdict(cell.trials[0].config)
    return {
        "name": cell.optimizer,
        "config": {name: value for name, value in config.items() if name not in {"data", "seed"}},
        "tuned": [{"lr": lr, cell.metric: value} for lr, value in cell.tuned],
        "on_edge": cell.on_edge,
        cell.metric: {"lowest": low, "median": middle, "highest": high},
        "loss": dict(zip(("lowest", "median", "highest"), map(_finite, cell.loss), strict=True)),
        "steps": cell.trials[0].steps,
        "steps_to_target": _finite(cell.steps_to_target),
        "seconds": cell.seconds,
        "state_bytes": cell.trials[0].state_bytes,
        "curve": {"steps": [step for step, _ in cell.curve], cell.metric: [value for _, value in cell.curve]},
        "final": [_run_as_json(cell, trial) for trial in cell.trials],
        "tuning": [_run_as_json(cell, trial) for trial in cell.tuning],
    }


def _run_as_json(cell: sweep.Cell, trial: sweep.Trial) -> dict[str, Any]:
    return {
        "lr": trial.config.lr,
        "seed": trial.config.seed,
        cell.metric: _finite(trial.value),
        "loss": _finite(trial.loss),
        "steps_to_target": trial.steps_to_target,
        "seconds": round(trial.seconds, 3),
    }


def _finite(value: float) -> float | None:
    """Replace infinity by None, since JSON has no infinity."""
    return value if math.isfinite(value) else None


def _table(cells: Sequence[sweep.Cell], head: Sequence[str]) -> Table:
    """Build the terminal's table without the last column: the report has the time, and names need the width."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in head[:-1]:
        table.add_column(name, justify="left" if name == head[0] else "right", no_wrap=True)
    previous = cells[0].optimizer
    for cell in cells:
        if cell.optimizer != previous:
            table.add_section()
        previous = cell.optimizer
        table.add_row(*row(cell)[:-1])
    return table


def columns(metric: str, target: float | None) -> list[str]:
    """The heads of the table."""
    reached = "steps" if target is None else f"steps to {metric_text(metric, target, 0)}"
    return ["optimizer", "batch", "best lr", f"{metric} (min-max)", reached, "loss", "state", "time"]


def row(cell: sweep.Cell) -> tuple[str, ...]:
    """A cell as text, by :func:`columns`; medians over the seeds."""
    low, middle, high = (metric_text(cell.metric, value) for value in cell.value)
    reached = f"{cell.steps_to_target:.0f}" if math.isfinite(cell.steps_to_target) else "never"
    return (
        cell.optimizer,
        str(cell.batch_size),
        f"{cell.lr:g}" + ("*" if cell.on_edge else ""),
        f"{middle} ({low.rstrip('%')}-{high.rstrip('%')})",
        f"{reached} of {cell.trials[0].steps}",
        "-" if math.isnan(cell.loss[1]) else f"{cell.loss[1]:.4f}",
        f"{cell.trials[0].state_bytes / 1e6:.2f} MB",
        f"{cell.seconds:.1f} s",
    )


def continued(cells: Sequence[sweep.Cell], grids: Mapping[str, Sequence[float]]) -> list[str]:
    """Sentences on the cells that tried learning rates beyond their grid because its end was the best."""
    lines = []
    for cell in cells:
        beyond = [lr for lr, _ in cell.tuned if lr not in grids[cell.optimizer]]
        if beyond:
            where = f"{cell.optimizer} at batch {cell.batch_size}"
            lines.append(f"{where}: the end of the grid was the best, so it went on to {_rates(beyond)}.")
    return lines


def warnings(cells: Sequence[sweep.Cell]) -> list[str]:
    """Warnings for cells whose best learning rate is the first or last that was tried: a better one may be outside."""
    return [
        f"Warning: the best learning rate of {cell.optimizer} at batch {cell.batch_size}, {cell.lr:g}, is on the "
        f"edge of its grid: give a wider one with --lrs {cell.optimizer}=..."
        for cell in cells
        if cell.on_edge
    ]
