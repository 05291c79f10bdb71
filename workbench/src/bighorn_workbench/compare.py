"""``bighorn compare``: optimizers at several batch sizes, each tuned with the same number of trials."""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import click
from rich.console import Console

from bighorn_workbench import files
from bighorn_workbench.builtin_tasks import TASKS, TaskName, fingerprint, identity, load
from bighorn_workbench.builtin_tasks.trial import check_task, held_out
from bighorn_workbench.builtin_tasks.user import UserTask
from bighorn_workbench.checks import finite
from bighorn_workbench.config import DATA_HELP, PRECISIONS, TASK_HELP, RunConfig, check_device
from bighorn_workbench.constructor import constructor
from bighorn_workbench.costs import Cost, evaluation_seconds, evaluations, step_seconds
from bighorn_workbench.display import busy, counting, duration, table_of, terminal
from bighorn_workbench.environment import provenance
from bighorn_workbench.errors import InputError, after
from bighorn_workbench.logs import failed, log_option, opened
from bighorn_workbench.metrics import metric_text
from bighorn_workbench.optimizers import ABOUT, CONTESTANTS, OPTIMIZERS
from bighorn_workbench.options import COUNT, FILE, Command, Options, command_line, config_options, given, option
from bighorn_workbench.ranks import world_size
from bighorn_workbench.run import Run
from bighorn_workbench.search import REPEAT_SEED, TUNING_SEED, Plan, Search
from bighorn_workbench.space import Entry, read_spaces, spans
from bighorn_workbench.storage import Place, StudyPlace, check_place
from bighorn_workbench.tasks import Task, defaults
from bighorn_workbench.trials import LEAST, TRIALS, Cell, paired, repeats
from bighorn_workbench.values import check_name, counted, names, numbers, seconds_in
from bighorn_workbench.verdict import BASELINE, MOST_SEEDS, chosen, columns, ranked, row, unfinished, verdicts, warnings
from bighorn_workbench.workers import fill, places

MOST_TRIALS = 100
"""The trials of a cell with a budget of time, at most."""

SEEDS = 5
"""The final runs of a cell, at least."""

WIDEST = 120
"""Columns of text of the table on any terminal, since wrapped lines are better than truncated names."""


@dataclass(frozen=True)
class CompareConfig(Options):
    """The options of a comparison; None stands for the task's default."""

    task: str = option("digits", TASK_HELP, kind=TaskName())
    data: str | None = option(None, DATA_HELP, shown="what comes with the task")
    optimizers: str | None = option(None, "Optimizers, by their names below.", shown="lamb,adamw")
    batch_sizes: str | None = option(
        None,
        "Batch sizes.",
        shown="by task "
        + "; ".join(f"{name} {','.join(map(str, defaults(task).batch_sizes))}" for name, task in TASKS.items()),
    )
    trials: int | None = option(
        None,
        "Trials of each optimizer at each batch size, the first with its defaults.",
        shown=f"{TRIALS}, or at most {MOST_TRIALS} with --budget",
        check=COUNT,
    )
    budget: str | None = option(
        None,
        "Time for the whole command, like 2h: as many trials and final runs as fit, the same numbers for each "
        f"optimizer at each batch size; no run is cut short. Refused at once if {LEAST} trials do not fit.",
        shown="none",
        check=seconds_in,
    )
    space: tuple[str, ...] = option(
        (),
        "A range to search, as OPTIMIZER.OPTION=LOWEST,HIGHEST like lamb.lr=0.001,0.1, or a single fixed number; "
        "may be repeated. Also one_minus_beta1, one_minus_beta2, one_minus_beta3, one_minus_momentum and eps.",
        shown="; ".join(f"{name} {spans(recipe.space)}" for name, recipe in OPTIMIZERS.items()),
    )
    baseline: str | None = option(
        None, "The optimizer that the others are compared with.", shown=f"{BASELINE}, or the first one without it"
    )
    epochs: float | None = option(None, "Passes over the training data, the same for every run.", shown="the task's")
    seeds: int | None = option(
        None,
        "Final runs of each optimizer at each batch size: seeds 1, 2, ...; trials use seed 0, repeats 1000001, ...",
        shown=f"{SEEDS}, or up to {MOST_SEEDS} with --budget",
        check=COUNT,
    )
    target: float | None = option(
        None, "Count the steps until the metric on test data reaches this value.", shown="the task's", check=finite
    )
    precision: str = option("fp32", "Type of weights and gradients.", choices=tuple(PRECISIONS))
    processes: int | None = option(
        None, "Runs at a time, each on one thread.", shown="one per processor, or per GPU", check=COUNT
    )
    device: str = option("cpu", "Device of torch for the runs.")

    def entries(self, task: Task) -> list[Entry]:
        """The cells to fill, with resolved options."""
        about = defaults(task)
        sizes = about.batch_sizes or (about.batch_size,)
        if self.batch_sizes is not None:
            sizes = tuple(sorted(numbers("--batch-sizes", self.batch_sizes, int)))
        optimizers = names("--optimizers", "lamb,adamw" if self.optimizers is None else self.optimizers, CONTESTANTS)
        if self.baseline is not None:
            check_name("--baseline", self.baseline, optimizers)
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
    names={"--optimizers": ABOUT},
    epilog="Example: bighorn compare --optimizers lamb,adamw --batch-sizes 64,512 --study digits.study --report c.html",
)
@config_options(CompareConfig)
@click.option(
    "--study",
    type=StudyPlace(),
    help="Save every finished run in this file, or in the database at postgresql://... or mysql://..., which several "
    "machines can share. The same command continues it.",
)
@click.option("--report", type=FILE, help="Write an HTML report.")
@click.option("--json", "json_file", type=FILE, help="Write every run as JSON.")
@log_option
@click.pass_context
def compare(
    ctx: click.Context, /, study: Place | None, report: Path | None, json_file: Path | None, log: str | None, **_: Any
) -> None:
    """Compare optimizers, each tuned with the same number of trials.

    The first trials of an optimizer at a batch size scan its learning rate; later trials vary all options, quasi-random
    around the best rate. Validation data select the best trial. Of more than 12 trials the best third is repeated with
    up to five other seeds, and the means select. The selected options are then trained with new seeds, and evaluated on
    test data for the first time. Ctrl-C reports the results so far; with --study, the same command continues.
    """
    config = CompareConfig(**given(ctx, CompareConfig))
    check_device(config.device)
    if world_size() > 1:
        raise InputError(
            "compare starts its own processes, one for each GPU: start it once, without torchrun, which is for train."
        )
    if study is not None:
        check_place(study)
    file = study if isinstance(study, Path) else None
    files.check_outputs({"--report": report, "--json": json_file}, {"--data": config.data, "--study": file})
    about, started = provenance(command_line(ctx)), ctx.obj or time.time()
    console = terminal()
    with tempfile.TemporaryDirectory() as folder:
        place = study or Path(folder) / "study"
        processes = config.processes or places(config.device)
        search = prepare(config, load(config.task, config.data), place, processes, started)
        try:
            with kept(search, study, console.print):
                try:
                    _run(search, config, processes, console, log)
                except BaseException as error:  # also Ctrl-C: finished runs are reported
                    search.end()
                    if search.done or isinstance(error, KeyboardInterrupt):
                        with after(error):
                            _finish(search, config, about, report, json_file)
                    raise
                _finish(search, config, about, report, json_file)
        except KeyboardInterrupt:
            ctx.exit(130)
        finally:
            search.database.close()


@contextmanager
def kept(search: Search, study: Place | None, say: Callable[[str], object]) -> Iterator[None]:
    """Keep the finished runs if the block fails, in a new file if no study was given, and say where they are."""
    try:
        yield
    except BaseException as error:
        search.end()
        is_ctrl_c, done = isinstance(error, KeyboardInterrupt), search.done
        if done or is_ctrl_c:
            with after(error):
                place = study or _copy(search)
                say(
                    f"{'Interrupted' if is_ctrl_c else 'Stopped'} after {done} of {search.total} runs. Repeat the "
                    f"command with --study {place} to continue."
                )
        raise


def _copy(search: Search) -> Path:
    """Copy the study of a command without ``--study`` to this folder, or to the temporary one if that fails."""
    try:
        return _copied(search, Path())
    except InputError:
        return _copied(search, Path(tempfile.gettempdir()))


def _copied(search: Search, folder: Path) -> Path:
    place = files.unused(folder / "bighorn-compare.study")
    files.write(place, lambda file: file.write(search.database.content()))
    return place


def prepare(
    config: CompareConfig, task: Task, study: Place, processes: int = 1, started: float | None = None
) -> Search:
    """Return the search of a comparison, after everything that can be wrong has been tried.

    Args:
        config: The options.
        task: The task.
        study: The file or the server of the study.
        processes: The runs at a time. Default: 1
        started: The time from which a budget counts. Default: now
    """
    started = started or time.time()
    entries = config.entries(task)
    tuned = held_out(task)
    if isinstance(task, UserTask):
        for base in {entry.base.batch_size: entry.base for entry in entries}.values():
            check_task(task, tuned, base, by_seed=True)
    looking = evaluation_seconds(Run(entries[0].base, tuned, split="validation"))
    costs = []
    for entry in entries:
        Run(entry.base, tuned)
        run = Run(entry.base, task)
        costs.append(Cost(step_seconds(run) * run.total, looking))
    target = defaults(task).target if config.target is None else config.target
    budget = None if config.budget is None else seconds_in("--budget", config.budget)
    plan = Plan(
        entries=tuple(entries),
        trials=config.trials or (TRIALS if budget is None else MOST_TRIALS),
        seeds=config.seeds or SEEDS,
        most_seeds=config.seeds or (SEEDS if budget is None else MOST_SEEDS),
        target=target,
        study=study,
        data=fingerprint(task),
        identity=identity(task, tuned),
        deadline=None if budget is None else started + budget,
        processes=processes,
        costs=tuple(costs),
        evaluations=evaluations(costs),
    )
    search = Search(plan, task)
    if budget is not None:
        _check_budget(search, config, budget)
    return search


def _starting(processes: int) -> float:
    """Return the seconds until runs begin: each process imports and loads as much as this one."""
    return time.process_time() if processes > 1 else 0.0


def _runs(trials: int, seeds: int) -> str:
    """Return the runs of a cell in words."""
    again = math.prod(repeats(trials))
    repeated = f", {counted(again, 'repeat')}" if again else ""
    return f"{counted(trials, 'trial')}{repeated} and {counted(seeds, 'final run')}"


def _check_budget(search: Search, config: CompareConfig, budget: float) -> None:
    """Raise an error, with a budget that suffices, for one that has no time for a verdict."""
    plan = search.plan
    least = max(search.trials, min(LEAST, plan.trials))
    needed, left = search.needed(least, plan.seeds), search.left - _starting(plan.processes)
    if needed <= left:
        return
    base, whole = plan.entries[0].base, budget - left + needed
    shorter = ""
    if base.epochs is not None and left > 0:
        shorter = f", --epochs {float(f'{base.epochs * left / needed:.2g}'):g}"
    raise InputError(
        f"--budget {config.budget} has no time for {_runs(least, plan.seeds)} of each optimizer at each batch size: "
        f"they take {duration(whole)}. Give --budget {math.ceil(whole / 60)}min{shorter}, fewer --optimizers, "
        "--batch-sizes or --seeds, or a proxy of the task with fewer layers or less data."
    )


def _run(search: Search, config: CompareConfig, processes: int, console: Console, log: str | None) -> None:
    """Make the runs, with a bar on a terminal and a line for each run elsewhere."""
    plan, metric = search.plan, search.task.metric
    base, starting = plan.entries[0].base, _starting(processes)
    done, total = search.done, search.total
    many = counted(total, "run") if plan.deadline is None else f"as many runs as fit in {config.budget}"
    console.print(f"{config.task}: {defaults(search.task).description}; {base.length}, {many}, {processes} at a time")
    for name, space in {entry.name: entry.space for entry in plan.entries}.items():
        console.print(f"{name}: {spans(space)}")
    if done:
        console.print(f"{counted(done, 'run')} {'is' if done == 1 else 'are'} already in {plan.study}.")
    if unfit := search.unfit():
        console.print(
            f"{plan.study} has runs of {'; '.join(unfit)}, but none that fits: the model, the data, the code of the "
            "task or options differ."
        )
    needed = search.needed(search.trials, search.seeds)
    if plan.deadline is None and needed:
        console.print(f"This takes {duration(starting + needed)}{busy()}.")
    if plan.deadline is not None:
        console.print(f"About {_runs(*search.fitting(search.left - starting))} of each fit{busy()}.")
    with counting(console) as bar:
        task_id = bar.add_task("runs", total=None if search.is_open else total, completed=done)
        shown = set(search.finished())

        def look() -> None:
            nonlocal log
            for key, (name, trial) in search.finished().items():
                if key in shown:
                    continue
                shown.add(key)
                seed = trial.config.seed
                kind = "trial" if seed == TUNING_SEED else "repeat" if seed > REPEAT_SEED else f"seed {seed}"
                if log is not None:
                    title = f"{name}, batch {trial.config.batch_size}, {kind}, run {len(shown)}"
                    try:
                        with opened(log, title, trial.config, {metric: trial.value}) as write:
                            for step, value in trial.curve:
                                write({f"{kind.split()[0]}/{metric}": value}, step)
                    except Exception as error:  # the packages may raise any
                        console.print(failed(log, error), style="yellow")
                        log = None
                total = search.total
                bar.update(task_id, completed=len(shown), total=None if search.is_open else total)
                if not console.is_terminal:
                    count, left = f"{len(shown)} of {total}", search.needed(search.trials, search.seeds)
                    if search.is_open:
                        count, left = f"{len(shown)} runs", max(search.left, 0.0)
                    console.print(
                        f"{count}: {name}, batch {trial.config.batch_size}, lr {trial.config.lr:.3g}, "
                        f"{kind}: {metric} {metric_text(metric, trial.value)}"
                        + (f"; {duration(left)} left" if left else "")
                    )

        fill(search, processes, look)
        look()


def _finish(
    search: Search, config: CompareConfig, about: Mapping[str, Any], report: Path | None, json_file: Path | None
) -> None:
    """Print the answers and the table, and write the report and the JSON, which has also seeds that some cells lack."""
    cells, plan, console = search.cells(), search.plan, terminal()
    common = paired(cells)
    head = columns(search.task.metric, plan.target)
    rows = [row(cell, plan.target is not None) for cell in common]
    answers = verdicts(cells, config.baseline) if cells else []
    notes = [*chosen(cells), *warnings(cells), *unfinished(search)]
    if plan.deadline is not None and cells:
        notes.append(
            f"--budget {config.budget} had time for {_runs(search.trials, search.seeds)} of each optimizer at each "
            "batch size."
        )
    paste = _paste(search, common)
    if report is not None and not cells:
        notes.append(f"No report {report}: there are no final runs yet.")
    for line in answers:
        console.print(line)
    if cells:
        # Without the last column: the report has the time, and names need the width.
        shown = table_of(head[:-1], [each[:-1] for each in rows], groups=True)
        terminal(width=max(console.width, WIDEST)).print(shown)
    for line in notes:
        console.print(line)
    for title, lines in paste.items():
        console.print(f"\n{title}:\n{indent(lines, '  ')}")
    base = plan.entries[0].base
    settings = asdict(config) | {
        "optimizers": ", ".join(dict.fromkeys(entry.name for entry in plan.entries)),
        "batch_sizes": ", ".join(dict.fromkeys(str(entry.base.batch_size) for entry in plan.entries)),
        "space": "; ".join(dict.fromkeys(f"{entry.name} {spans(entry.space)}" for entry in plan.entries)),
        "trials": search.trials,
        "seeds": search.seeds,
        "epochs": base.epochs,
        "steps": base.steps,
        "target": plan.target,
    }
    data = defaults(search.task).description

    def page() -> str:
        from bighorn_workbench.reports.compare import compare_report

        return compare_report(common, data, head, rows, answers, notes, paste, about["command"], settings)

    content = {
        **about,
        "config": settings,
        "data": {"description": data, "sha256": plan.data},
        "cells": [cell.as_json() for cell in cells],
        "words": [*answers, *notes],
        "constructors": paste,
    }
    files.finish(console.print, report if cells else None, page, json_file, lambda: content)


def _paste(search: Search, cells: Sequence[Cell]) -> dict[str, str]:
    """Return the lines that construct the best optimizer of each batch size, by their titles."""
    excluded = hasattr(search.task, "excluded")
    found = {}
    for size in dict.fromkeys(cell.batch_size for cell in cells):
        best = ranked([cell for cell in cells if cell.batch_size == size])[0]
        title = f"{best.optimizer} at batch {size:,}, as it ran"
        found[title] = constructor(best.trials[0].config, best.trials[0].steps, excluded)
    return found
