"""``bighorn compare``: optimizers at several batch sizes, each tuned with the same number of trials."""

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from bighorn.arguments import number
from bighorn.cli import files
from bighorn.cli.config import DATA_HELP, PRECISIONS, TASK_HELP, RunConfig
from bighorn.cli.display import counting, duration, terminal
from bighorn.cli.environment import provenance
from bighorn.cli.errors import InputError
from bighorn.cli.metrics import metric_text
from bighorn.cli.optimizers import CONTESTANTS, OPTIMIZERS
from bighorn.cli.options import COUNT, FILE, Command, Options, command_line, config_options, option
from bighorn.cli.run import Run
from bighorn.cli.search import Entry, Plan, Search, Space, available_processors, fill
from bighorn.cli.tasks import TASKS, TaskName, fingerprint, load
from bighorn.cli.tasks.trial import Trial as TaskTrial
from bighorn.cli.tasks.user import UserTask
from bighorn.cli.trials import Cell, Trial, best_of, held_out
from bighorn.cli.values import check_name, device_of, names, numbers
from bighorn.cli.verdict import step_seconds, verdicts
from bighorn.tasks import Task, defaults

WIDEST = 120
"""Columns of text of the table on any terminal, since wrapped lines are better than truncated names."""


def _spans(space: Space) -> str:
    return ", ".join(
        f"{name} {low:g}" if low == high else f"{name} {low:g} to {high:g}" for name, (low, high) in space.items()
    )


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
    trials: int = option(12, "Trials of each optimizer at each batch size, the first with its defaults.", check=COUNT)
    space: tuple[str, ...] = option(
        (),
        "What to search, as OPTIMIZER.OPTION=LOWEST,HIGHEST like lamb.lr=0.001,0.1, or a single number, which is kept; "
        "may be repeated.",
        shown="; ".join(f"{name} {_spans(recipe.space)}" for name, recipe in OPTIMIZERS.items()),
    )
    epochs: float | None = option(None, "Passes over the training data, the same for every run.", shown="the task's")
    seeds: int = option(3, "Final runs of each cell: seeds 1, 2, ...; trials have the seed 0.", check=COUNT)
    target: float | None = option(
        None,
        "Value of the task's metric on test data to count the steps to.",
        shown="the task's",
        check=number,
    )
    precision: str = option("fp32", "Type of weights and gradients.", choices=tuple(PRECISIONS))
    processes: int | None = option(
        None, "Runs at a time, each on one thread.", shown="one per processor, and one on a GPU", check=COUNT
    )
    device: str = option("cpu", "Device of torch for the runs.")

    def entries(self, task: Task) -> list[Entry]:
        """The cells to fill, with resolved options."""
        about = defaults(task)
        sizes = about.batch_sizes or (about.batch_size,)
        if self.batch_sizes is not None:
            sizes = numbers("--batch-sizes", self.batch_sizes, int)
        optimizers = names("--optimizers", "lamb,adamw" if self.optimizers is None else self.optimizers, CONTESTANTS)
        spaces = read_spaces(self.space, optimizers)
        shared = {name: getattr(self, name) for name in ("task", "data", "epochs", "precision", "device")}
        return [
            Entry(
                name, RunConfig(**(shared | CONTESTANTS[name]), batch_size=size, threads=1).resolved(task), spaces[name]
            )
            for name in optimizers
            for size in sizes
        ]


@click.command(
    cls=Command,
    epilog="Example: bighorn compare --optimizers lamb,adamw --batch-sizes 64,512 --study digits.study --report c.html",
)
@config_options(CompareConfig)
@click.option(
    "--study",
    type=FILE,
    help="Keep every run here when it ends; the same command goes on there, also several at a time.",
)
@click.option("--report", type=FILE, help="Write an HTML report.")
@click.option("--json", "json_file", type=FILE, help="Write every run as JSON.")
@click.pass_context
def compare(
    ctx: click.Context, /, study: Path | None, report: Path | None, json_file: Path | None, **options: Any
) -> None:
    """Compare optimizers over batch sizes, each tuned by as many trials.

    The trials of an optimizer at a batch size are a quasi-random sequence in its space of options, and train without
    the validation data, on which the best one is chosen. Then fresh seeds train with its options, and the test data
    are looked at for the first time. Ctrl-C reports what there is; with --study the same command goes on.
    """
    config = CompareConfig(**options)
    device_of(config.device)
    if study is not None:
        files.check_regular(study, "--study")
    files.check_outputs({"--report": report, "--json": json_file}, {"--data": config.data, "--study": study})
    if study is not None:
        files.check_writable(study, "--study")
    about = provenance(command_line(ctx))
    console = terminal()
    with tempfile.TemporaryDirectory() as folder:
        place = study or Path(folder) / "study"
        search = prepare(config, load(config.task, config.data), place)
        processes = config.processes or (available_processors() if config.device == "cpu" else 1)
        try:
            _run(search, config, processes, console)
            stopped = False
        except KeyboardInterrupt:
            stopped = True
            search.release()
            if study is None:
                study = files.unused(Path("bighorn-compare.study"))
                shutil.copyfile(place, study)
        _finish(search, config, about, report, json_file, console)
        done = len(search.finished())
    if stopped:
        console.print(
            f"Interrupted after {done} of {search.total} runs. Repeat the command with --study {study} to go on."
        )
        ctx.exit(130)


def prepare(config: CompareConfig, task: Task, path: Path) -> Search:
    """Return the search of a comparison, after everything that can be wrong has been tried."""
    entries = config.entries(task)
    tuned = held_out(task)
    if isinstance(task, UserTask):
        for base in {entry.base.batch_size: entry.base for entry in entries}.values():
            TaskTrial(task, base).run(("test", "validation") if tuned is task else ("test",))
    for entry in entries:
        Run(entry.base, tuned)
    target = defaults(task).target if config.target is None else config.target
    data = fingerprint(task, entries[0].base.batch_size or 1)
    return Search(Plan(tuple(entries), config.trials, config.seeds, target, path, data), task)


def _run(search: Search, config: CompareConfig, processes: int, console: Console) -> None:
    """Make the runs, with a bar on a terminal and a line for each run elsewhere."""
    plan, metric = search.plan, search.task.metric
    base = plan.entries[0].base
    length = f"{base.steps} steps" if base.epochs is None else f"{base.epochs:g} epochs"
    known, total = len(search.finished()), search.total
    console.print(f"{config.task}: {defaults(search.task).description}; {length}, {total} runs, {processes} at a time")
    for name, space in {entry.name: entry.space for entry in plan.entries}.items():
        console.print(f"{name}: {_spans(space)}")
    if known:
        console.print(f"{known} of the runs are in {plan.path}.")
    seconds = sum(
        step_seconds(run) * run.total * (plan.trials + plan.seeds)
        for run in (Run(entry.base, search.task) for entry in plan.entries)
    )
    console.print(f"This takes {duration(seconds * (total - known) / total / processes)}.")
    with counting(console) as bar:
        task_id = bar.add_task("runs", total=total, completed=known)
        shown = {(name, trial.config) for name, trial in search.finished()}

        def look() -> None:
            for name, trial in search.finished():
                if (name, trial.config) in shown:
                    continue
                shown.add((name, trial.config))
                bar.update(task_id, completed=len(shown))
                if not console.is_terminal:
                    kind = "trial" if trial.config.seed == 0 else f"seed {trial.config.seed}"
                    console.print(
                        f"{len(shown)} of {total}: {name}, batch {trial.config.batch_size}, lr {trial.config.lr:.3g}, "
                        f"{kind}: {metric} {metric_text(metric, trial.value)}, {trial.seconds:.1f} s"
                    )

        fill(search, processes, look)
        look()


def _finish(
    search: Search,
    config: CompareConfig,
    about: Mapping[str, Any],
    report: Path | None,
    json_file: Path | None,
    console: Console,
) -> None:
    """Print the answers and the table, and write the report and the JSON."""
    cells, plan = search.cells(), search.plan
    head = columns(search.task.metric, plan.target)
    answers = verdicts(cells) if cells else []
    notes = [*chosen(cells), *warnings(cells), *unfinished(search)]
    for line in answers:
        console.print(line)
    if cells:
        terminal(width=max(console.width, WIDEST)).print(_table(cells, head))
    for line in notes:
        console.print(line)
    base = plan.entries[0].base
    settings = asdict(config) | {
        "optimizers": ", ".join(dict.fromkeys(entry.name for entry in plan.entries)),
        "batch_sizes": ", ".join(dict.fromkeys(str(entry.base.batch_size) for entry in plan.entries)),
        "space": "; ".join(dict.fromkeys(f"{entry.name} {_spans(entry.space)}" for entry in plan.entries)),
        "epochs": base.epochs,
        "steps": base.steps,
        "target": plan.target,
    }
    data = defaults(search.task).description

    def page() -> str:
        from bighorn.cli.reports.compare import compare_report

        return compare_report(
            cells, data, head, [row(cell) for cell in cells], answers, notes, about["command"], settings
        )

    content = {
        **about,
        "config": settings,
        "data": {"description": data, "sha256": plan.data},
        "cells": [as_json(cell) for cell in cells],
        "words": [*answers, *notes],
    }
    files.finish(console.print, report if cells else None, page, json_file, lambda: content)


def read_spaces(texts: Sequence[str], optimizers: Sequence[str]) -> Mapping[str, Space]:
    """Read ``OPTIMIZER.OPTION=LOWEST,HIGHEST`` for some options of ``optimizers``; a variant keeps what it sets itself.

    Example:
        >>> read_spaces(["sgd.lr=0.1,1", "sgd.warmup=0.1"], ["sgd"])["sgd"]
        {'lr': (0.1, 1.0), 'weight_decay': (5e-05, 0.01), 'warmup': (0.1, 0.1)}
    """
    spaces: dict[str, dict[str, tuple[float, float]]] = {}
    for name in optimizers:
        space = OPTIMIZERS[CONTESTANTS[name]["optimizer"]].space
        spaces[name] = {option: span for option, span in space.items() if option not in CONTESTANTS[name]}
    for text in texts:
        name, dot, rest = text.partition(".")
        key, equals, values = rest.partition("=")
        if not dot or not equals:
            raise InputError(
                f"--space {text!r} is not of the form OPTIMIZER.OPTION=LOWEST,HIGHEST like lamb.lr=0.001,0.1."
            )
        check_name("--space", name, optimizers)
        check_name(f"--space {name}", key, spaces[name])
        ends = numbers("--space", values, float)
        if len(ends) > 2:
            raise InputError(
                f"--space {text!r} has {len(ends)} numbers: give the lowest and the highest, or a single one."
            )
        if key != "lr" and ends[-1] > 1:
            raise InputError(f"--space {text!r}: {key} is at most 1.")
        spaces[name][key] = ends[0], ends[-1]
    return spaces


def as_json(cell: Cell) -> dict[str, Any]:
    """A cell as JSON: its configuration, its results and every run."""
    low, middle, high = cell.value
    config = asdict(cell.trials[0].config)
    return {
        "name": cell.optimizer,
        "config": {name: value for name, value in config.items() if name not in {"data", "seed"}},
        "tuned": [{"lr": lr, cell.metric: _finite(value)} for lr, value in cell.tuned],
        "on_edge": cell.on_edge,
        cell.metric: {"lowest": _finite(low), "median": _finite(middle), "highest": _finite(high)},
        "loss": dict(zip(("lowest", "median", "highest"), map(_finite, cell.loss), strict=True)),
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
    }


def _finite(value: float) -> float | None:
    """Replace infinity and NaN by None, since JSON has neither."""
    return value if math.isfinite(value) else None


def _table(cells: Sequence[Cell], head: Sequence[str]) -> Table:
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


def row(cell: Cell) -> tuple[str, ...]:
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


def chosen(cells: Sequence[Cell]) -> list[str]:
    """Sentences on the options that were chosen for each cell, and on how much the rate may be off."""
    lines = []
    for cell in cells:
        config = cell.trials[0].config
        betas = "".join(f", {text}" for text in config.optimizer_option if text.startswith("betas"))
        best = best_of(cell.tuning, cell.higher_is_better)
        lines.append(
            f"{cell.optimizer} at batch {cell.batch_size}: lr {cell.lr:g}, warm-up {config.warmup}, weight decay "
            f"{config.weight_decay:g}{betas}: {metric_text(cell.metric, best.value)} on validation data, the best of "
            f"{len(cell.tuning)} trials."
        )
    return lines


def warnings(cells: Sequence[Cell]) -> list[str]:
    """Warnings for cells whose best learning rate is at an end of what was searched, or of which runs diverged."""
    found = [
        f"Warning: the best learning rate of {cell.optimizer} at batch {cell.batch_size}, {cell.lr:g}, is on the "
        f"edge of its range: give a wider one with --space {cell.optimizer}.lr=..."
        for cell in cells
        if cell.on_edge
    ]
    for cell in cells:
        diverged = sum(trial.loss == math.inf for trial in cell.trials)
        if diverged:
            found.append(
                f"Warning: {diverged} of {len(cell.trials)} final runs of {cell.optimizer} at batch {cell.batch_size} "
                "diverged, and count as the worst value."
            )
    return found


def unfinished(search: Search) -> list[str]:
    """Sentences on cells that lack runs."""
    lines = []
    for index, entry in enumerate(search.plan.entries):
        queue, tuning = search.final(index), search.tuning(index)
        where = f"{entry.name} at batch {entry.base.batch_size}"
        if queue is not None and len(queue.results()) < search.plan.seeds:
            lines.append(f"{where}: {len(queue.results())} of {search.plan.seeds} final runs.")
        elif queue is None and tuning:
            best, metric = best_of(tuning, search.higher), search.task.metric
            lines.append(
                f"{where}: {len(tuning)} of {search.plan.trials} trials, the best with lr {best.config.lr:g}: "
                f"{metric} {metric_text(metric, best.value)} on validation data."
            )
        elif queue is None:
            lines.append(f"{where}: no trials yet.")
    return lines
