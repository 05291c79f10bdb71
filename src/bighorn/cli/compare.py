"""``bighorn compare``: can I raise the batch and keep my accuracy?"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bighorn.cli import files, sweep
from bighorn.cli.config import PRECISIONS, RunConfig
from bighorn.cli.environment import environment
from bighorn.cli.errors import InputError
from bighorn.cli.optimizers import OPTIMIZERS
from bighorn.cli.options import command_line, config_options, option
from bighorn.cli.tasks import TASKS
from bighorn.cli.training import Run
from bighorn.cli.values import at_least, check_name, names, numbers

FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class CompareConfig:
    """The options of a comparison; None stands for "the task's"."""

    task: str = option("digits", "What to train on.", choices=tuple(TASKS))
    data: str | None = option(None, "Data for the task, as in bighorn train.", shown="built in, but mnist")
    optimizers: str = option("lamb,adamw", f"Optimizers, of {', '.join(OPTIMIZERS)}.")
    batch_sizes: str | None = option(
        None,
        "Batch sizes.",
        shown="; ".join(f"{name} {','.join(map(str, task.batch_sizes))}" for name, task in TASKS.items()),
    )
    lrs: tuple[str, ...] = option(
        (),
        "Learning rates to try, as OPTIMIZER=LR,LR,...; may be repeated.",
        shown="; ".join(f"{name}={','.join(f'{lr:g}' for lr in recipe.grid)}" for name, recipe in OPTIMIZERS.items()),
    )
    epochs: float | None = option(None, "Passes over the training data, the same for every run.", shown="the task's")
    seeds: int = option(3, "Seeds of each cell: 0, 1, ...")
    target: float | None = option(
        None,
        "Test accuracy to count the steps to.",
        shown=", ".join(f"{name} {task.target:g}" for name, task in TASKS.items()),
    )
    precision: str = option("fp32", "Type of weights and gradients.", choices=tuple(PRECISIONS))
    processes: int | None = option(None, "Runs at a time, each on one thread.", shown="one per processor")

    def __post_init__(self) -> None:
        at_least("--seeds", self.seeds, 1)
        at_least("--processes", self.processes, 1)
        if self.target is not None and not 0 < self.target <= 1:
            raise InputError(f"--target is {self.target}, but an accuracy lies above 0 and is at most 1.")


@click.command
@config_options(CompareConfig)
@click.option("--report", type=FILE, help="Write an HTML report.")
@click.option("--json", "json_file", type=FILE, help="Write every run as JSON.")
@click.pass_context
def compare(ctx: click.Context, /, report: Path | None, json_file: Path | None, **options: Any) -> None:
    """Compare optimizers over batch sizes at a fixed number of epochs.

    Each optimizer at each batch size gets its own learning rate: every rate of a stated grid is tried on every seed
    with a fifth of the training data held out, and the one with the highest mean accuracy on that fifth is taken.
    Then each seed trains on all training data, and the test data are looked at for the first time.
    """
    config = CompareConfig(**options)
    optimizers = names("--optimizers", config.optimizers, OPTIMIZERS)
    grids = learning_rates(config.lrs, optimizers)
    task = TASKS[config.task]
    batch_sizes = task.batch_sizes if config.batch_sizes is None else numbers("--batch-sizes", config.batch_sizes, int)
    target = config.target or task.target
    processes = config.processes or sweep.available_processors()
    for flag, path in (("--report", report), ("--json", json_file)):
        if path is not None:
            files.check_writable(path, flag)

    console = Console(soft_wrap=True, highlight=False)
    bases = [
        RunConfig(
            config.task, config.data, name, size, epochs=config.epochs, precision=config.precision, threads=1
        ).resolved()
        for name in optimizers
        for size in batch_sizes
    ]
    dataset = task.load(config.data)
    for base in bases:  # what would fail in the last cell fails now
        Run(base, dataset.held_out(sweep.HELD_OUT))
    settings = asdict(config) | {
        "batch_sizes": ", ".join(map(str, batch_sizes)),
        "lrs": "; ".join(f"{name} {', '.join(f'{lr:g}' for lr in grids[name])}" for name in optimizers),
        "epochs": bases[0].epochs,
        "target": target,
        "processes": processes,
    }
    runs = sweep.count(bases, grids, config.seeds)
    console.print(
        f"{config.task}: {dataset.description}; {bases[0].epochs:g} epochs, {runs} runs, {processes} at a time"
    )
    for name in optimizers:
        console.print(f"{name}: learning rates {', '.join(f'{lr:g}' for lr in grids[name])}")
    with _bar(console) as bar:
        task_id = bar.add_task("runs", total=runs)
        cells, tried = sweep.compare(bases, grids, config.seeds, target, processes, lambda: bar.advance(task_id))

    head = [name.format(target=f"{target:.0%}") for name in COLUMNS]
    console.print(_table(cells, head))
    notes = [*verdicts(cells), *warnings(cells)]
    for note in notes:
        console.print(note)
    if report is not None:
        from bighorn.cli.report import compare_report

        rows = [row(cell) for cell in cells]
        page = compare_report(cells, dataset.description, head, rows, notes, command_line(ctx), settings)
        files.write_text(report, page)
        console.print(f"Report: {report}")
    if json_file is not None:
        content = {
            "command": command_line(ctx),
            "config": settings,
            "environment": environment(),
            "data": {"description": dataset.description, "sha256": dataset.fingerprint()},
            "tuning": [_as_json(trial) for trial in tried],
            "final": [_as_json(trial) for cell in cells for trial in cell.trials],
        }
        files.write_text(json_file, json.dumps(content, indent=1, allow_nan=False) + "\n")
        console.print(f"JSON: {json_file}")


def learning_rates(texts: Sequence[str], optimizers: Sequence[str]) -> Mapping[str, tuple[float, ...]]:
    """Read ``OPTIMIZER=LR,LR,...`` for some of ``optimizers``; the others get their recipe's own."""
    grids = {name: OPTIMIZERS[name].grid for name in optimizers}
    for text in texts:
        name, equals, rates = text.partition("=")
        if not equals:
            raise InputError(f"--lrs {text!r} is not of the form OPTIMIZER=LR,LR,... like lamb=0.01,0.02.")
        check_name("--lrs", name, optimizers)
        grids[name] = numbers("--lrs", rates, float)
    return grids


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _as_json(trial: sweep.Trial) -> dict[str, Any]:
    return asdict(trial) | {"loss": trial.loss if math.isfinite(trial.loss) else None}


def _table(cells: Sequence[sweep.Cell], head: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in head:
        table.add_column(name, justify="left" if name == head[0] else "right")
    previous = cells[0].optimizer
    for cell in cells:
        if cell.optimizer != previous:
            table.add_section()
        previous = cell.optimizer
        table.add_row(*row(cell))
    return table


COLUMNS = ("optimizer", "batch", "best lr", "accuracy (min-max)", "steps to {target}", "state", "time")


def row(cell: sweep.Cell) -> tuple[str, ...]:
    """A cell of the comparison in words, by :data:`COLUMNS`; medians over the seeds."""
    low, middle, high = cell.accuracy
    reached = f"{cell.steps_to_target:.0f}" if math.isfinite(cell.steps_to_target) else "never"
    return (
        cell.optimizer,
        str(cell.batch_size),
        f"{cell.lr:g}" + ("*" if cell.on_edge else ""),
        f"{middle:.1%} ({low:.1%}-{high:.1%})",
        f"{reached} of {cell.trials[0].steps}",
        f"{cell.trials[0].state_bytes / 1e6:.2f} MB",
        f"{cell.seconds:.1f} s",
    )


def verdicts(cells: Sequence[sweep.Cell]) -> list[str]:
    """What raising the batch did to each optimizer, and how they compare at the largest."""
    lines = []
    by_name = {cell.optimizer: [other for other in cells if other.optimizer == cell.optimizer] for cell in cells}
    for name, mine in by_name.items():
        small, large = mine[0], mine[-1]
        if small is not large:
            lines.append(
                f"{name}: batch {small.batch_size} -> {large.batch_size}, median accuracy {small.accuracy[1]:.1%} -> "
                f"{large.accuracy[1]:.1%} ({100 * (large.accuracy[1] - small.accuracy[1]):+.1f} points)."
            )
    largest = [mine[-1] for mine in by_name.values()]
    if len(largest) > 1:
        first, second = sorted(largest, key=lambda cell: -cell.accuracy[1])[:2]
        apart = first.accuracy[0] > second.accuracy[2]
        lines.append(
            f"At batch {first.batch_size}: {first.optimizer} {first.accuracy[1]:.1%}, {second.optimizer} "
            f"{second.accuracy[1]:.1%}; " + ("no seed overlaps." if apart else "the seeds' ranges overlap.")
        )
    return lines


def warnings(cells: Sequence[sweep.Cell]) -> list[str]:
    """Cells whose best learning rate lies on the edge of the grid, so that a better one may lie beyond."""
    return [
        f"Warning: the best learning rate of {cell.optimizer} at batch {cell.batch_size}, {cell.lr:g}, lies on the "
        f"edge of its grid: give a wider one with --lrs {cell.optimizer}=..."
        for cell in cells
        if cell.on_edge
    ]
