"""``bighorn lr-find``: a learning rate to start from.

Runs at fixed rates, each a whole run with its own warm-up and decay: many short ones, then the best of them longer, as
in successive halving (Jamieson and Talwalkar, arXiv:1502.07943v1). A range test, one run whose rate grows at every step
(Smith, arXiv:1506.01186v6), suggested rates a decade apart for the same task with other seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from bighorn_workbench import files
from bighorn_workbench.builtin_tasks import fingerprint, load
from bighorn_workbench.builtin_tasks.trial import resolved
from bighorn_workbench.config import RunConfig
from bighorn_workbench.costs import evaluation_seconds, step_seconds
from bighorn_workbench.display import busy, counting, duration, table_of, terminal
from bighorn_workbench.environment import provenance
from bighorn_workbench.errors import InputError
from bighorn_workbench.metrics import metric_text
from bighorn_workbench.optimizers import OPTIMIZERS, without_compiler
from bighorn_workbench.options import (
    FILE,
    MOST,
    POSITIVE,
    Command,
    Options,
    command_line,
    config_options,
    given,
    option,
)
from bighorn_workbench.run import Run
from bighorn_workbench.space import scanned, spans
from bighorn_workbench.tasks import Task, defaults
from bighorn_workbench.trials import Trial, make, ordered
from bighorn_workbench.values import warmup_steps

SHARED = tuple(each.name for each in fields(RunConfig) if each.name not in {"lr", "lr_scaling", "loss_scale"})
"""The options that a search has in common with a run: all except for the rate and the loss scale."""

RUNGS = ((12, 8), (4, 2), (2, 1))
"""The number of rates and the divisor of their runs' length; the best of each rung go on to the next."""

RUNS, WHOLE_RUNS = sum(count for count, _ in RUNGS), sum(count / part for count, part in RUNGS)
"""The runs of a search, and in how many whole runs there are as many steps."""


def _ends(which: int) -> str:
    return ", ".join(f"{name} {recipe.space['lr'][which]:g}" for name, recipe in OPTIMIZERS.items())


@dataclass(frozen=True)
class SearchConfig(Options):
    """The options of a search, in addition to the run's."""

    lr_min: float | None = option(None, "The lowest rate.", shown=_ends(0), check=POSITIVE)
    lr_max: float | None = option(None, "The highest rate.", shown=_ends(1), check=POSITIVE)

    def span(self, optimizer: str) -> tuple[float, float]:
        """Return the range of rates.

        Raises:
            InputError: It is empty, or wider than numbers are.
        """
        low, high = OPTIMIZERS[optimizer].space["lr"]
        low, high = self.lr_min or low, self.lr_max or high
        if not 1 < high / low <= MOST:
            raise InputError(f"--lr-max {high:g} must be above --lr-min {low:g}, and at most {MOST:g} times as large.")
        return low, high


@dataclass(frozen=True)
class Found:
    """The results of a search.

    Attributes:
        rungs: The runs of each length, rates ascending; the last ones have the length of the requested run.
        metric: The name of the metric, on validation data.
        higher_is_better: Whether a larger value is better.
    """

    rungs: list[list[Trial]]
    metric: str
    higher_is_better: bool

    @property
    def lr(self) -> float:
        """The rate of the best run of full length."""
        return float(ordered(self.rungs[-1], self.higher_is_better)[0].config.lr or 0.0)

    @property
    def edge(self) -> str:
        """How to extend the range if the rate is at an end of it; "" otherwise."""
        rates = [run.config.lr for run in self.rungs[0]]
        return {rates[0]: "lower --lr-min", rates[-1]: "higher --lr-max"}.get(self.lr, "")

    @property
    def words(self) -> list[str]:
        """The suggestion in sentences."""
        best = ordered(self.rungs[-1], self.higher_is_better)[0]
        rates = [run.config.lr or 0.0 for run in self.rungs[0]]
        factor = (rates[-1] / rates[0]) ** (1 / (len(rates) - 1))
        lines = [
            f"Suggestion: lr {self.lr:.3g}, with {self.metric} {metric_text(self.metric, best.value)} on validation "
            f"data; rates were tried by factors of {factor:.2g}, with one seed."
        ]
        if self.edge:
            lines.append(f"That is the end of what was tried: give a {self.edge}.")
        return lines


def find(
    config: RunConfig, tuned: Task, span: tuple[float, float], done: Callable[[Trial], object] = lambda _: None
) -> Found:
    """Search; ``done`` is called with each run.

    Args:
        config: The resolved options of the run that is asked for.
        tuned: The task, with validation data.
        span: The lowest and the highest rate.
        done: A function of each run. Default: none

    Raises:
        InputError: Every run of a length has diverged.
    """
    total, higher = Run(config, tuned).total, defaults(tuned).higher_is_better
    warmup = f"{100 * warmup_steps(config.warmup, total) / total:.6g}%"
    rates: Sequence[float] = scanned(*span, RUNGS[0][0])
    rungs: list[list[Trial]] = []
    for count, part in RUNGS:
        if rungs:
            rates = sorted(run.config.lr or 0.0 for run in ordered(rungs[-1], higher)[:count] if not run.diverged)
        rungs.append([])
        for lr in rates:
            steps = max(1, round(total / part))
            run = make(replace(config, lr=lr, steps=steps, epochs=None, warmup=warmup), tuned, "validation")
            rungs[-1].append(run)
            done(run)
        if all(run.diverged for run in rungs[-1]):
            raise InputError(f"every run of {steps} steps diverged, also at lr {min(rates):g}. Take a lower --lr-min.")
    return Found(rungs, tuned.metric, higher)


@click.command("lr-find", cls=Command, epilog="Example: bighorn lr-find --optimizer came --task text --report lr.html")
@config_options(SearchConfig)
@config_options(RunConfig, only=SHARED)
@click.option("--report", type=FILE, help="Write an HTML report with the curves.")
@click.option("--json", "json_file", type=FILE, help="Write every run and what it depends on as JSON.")
@click.pass_context
@without_compiler()
def lr_find(ctx: click.Context, /, report: Path | None, json_file: Path | None, **_: Any) -> None:
    """Find a learning rate to start from, by runs at fixed rates.

    Twelve rates train for an eighth of the run, the best four for half of it, and the best two in full, as long as
    five and a half runs together. The best on validation data is the suggestion; bighorn compare tunes other options,
    too, and reports how much seeds differ.
    """
    search = SearchConfig(**given(ctx, SearchConfig))
    config = RunConfig(**given(ctx, RunConfig))
    config.check()
    span = search.span(config.optimizer)
    files.check_outputs({"--report": report, "--json": json_file}, {"--data": config.data})
    task = load(config.task, config.data)
    config, tuned = resolved(task, config)
    run = Run(config, tuned, split="validation")
    about = provenance(command_line(ctx), config.device)
    console = terminal()
    console.print(f"{config.task}: {defaults(task).description}; {config.optimizer}, batch {config.batch_size}")
    console.print(
        f"{RUNS} runs, {spans({'lr': span})}; most are short: together the steps of {WHOLE_RUNS:g} runs of {run.total}"
    )
    seconds = WHOLE_RUNS * run.total * step_seconds(run) + RUNS * evaluation_seconds(run)
    console.print(f"This takes {duration(seconds)}{busy()}.")
    with counting(console) as bar:
        bar_task, made = bar.add_task("runs", total=RUNS), []

        def done(trial: Trial) -> None:
            made.append(trial)
            bar.advance(bar_task)
            if not console.is_terminal:
                value = metric_text(task.metric, trial.value)
                console.print(f"{len(made)} of {RUNS}: lr {trial.config.lr:.3g}, {trial.steps} steps: {value}")

        found = find(config, tuned, span, done)
    for line in found.words:
        console.print(line)
    head, rows = _table(found)
    console.print(table_of(head, rows))
    settings = {"lr_min": span[0], "lr_max": span[1]} | {name: getattr(config, name) for name in SHARED}

    def page() -> str:
        from bighorn_workbench.reports import Section, plots, render

        title = f"Start {config.optimizer} at lr {found.lr:.3g}"
        lead = f"{config.optimizer} on {defaults(task).description}, batch {config.batch_size}. {' '.join(found.words)}"
        tiles = {"suggested learning rate": f"{found.lr:.3g}", "runs": f"{RUNS}", "steps in full": f"{run.total}"}
        lines = [
            (f"{rung[0].steps} steps", [each.config.lr or 0.0 for each in rung], [each.value for each in rung])
            for rung in found.rungs
        ]
        label = f"validation {task.metric}"
        figure = partial(plots.lines_in_panels, [("", lines)], "learning rate", label, "runs of", task.metric)
        text = "The best rates of each length train for longer, with a warm-up and a decay of their own."
        sections = [Section("By learning rate", text, figure), Section("Runs", head=head, rows=rows)]
        return render(title, lead, tiles, sections, [about["command"]], settings, config.device)

    content = {
        **about,
        "config": settings,
        "data": {"description": defaults(task).description, "sha256": fingerprint(task, config.batch_size or 1)},
        "suggestion": found.lr,
        "metric": task.metric,
        "rungs": [[each.as_json(task.metric) | {"steps": each.steps} for each in rung] for rung in found.rungs],
        "words": found.words,
    }
    files.finish(console.print, report, page, json_file, lambda: content)


def _table(found: Found) -> tuple[list[str], list[list[str]]]:
    """Return the values by rate and length as text."""
    head = ["lr", *(f"{rung[0].steps} steps" for rung in found.rungs)]
    values = [{run.config.lr: metric_text(found.metric, run.value) for run in rung} for rung in found.rungs]
    return head, [[f"{lr:.3g}", *(each.get(lr, "") for each in values)] for lr in values[0]]
