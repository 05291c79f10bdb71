"""``bighorn lr-find``: a learning rate to start from.

The range test of Smith, "Cyclical Learning Rates for Training Neural Networks", arXiv:1506.01186v6, section 3.3: one
run, whose learning rate grows by the same factor at every step, until the loss shows that it is too large.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from bighorn.schedules import Exponential
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks import load
from bighorn_workbench.builtin_tasks.trial import Trial
from bighorn_workbench.builtin_tasks.user import UserTask
from bighorn_workbench.checks import integer
from bighorn_workbench.config import RunConfig
from bighorn_workbench.display import counting, terminal
from bighorn_workbench.environment import provenance
from bighorn_workbench.errors import InputError
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
from bighorn_workbench.run import DivergedError, Run
from bighorn_workbench.smoothing import smoothed
from bighorn_workbench.tasks import defaults

SHARED = (
    *("task", "data", "optimizer", "batch_size", "weight_decay", "seed", "precision", "max_grad_norm"),
    *("state_dtype", "optimizer_option", "backend", "device", "threads"),
)
"""The options that a range test has in common with a run."""

MEMORY = 0.95
"""The average that ends the run has this weight on previous values, and is corrected for its start at 0."""

TOO_LARGE = 4.0
"""The test ends when this average is so many times its best."""

SETTLING = 10
"""Steps whose slopes do not count, since the loss falls at first for any learning rate."""

HALF = 10
"""Steps on each side in the mean whose slope and minimum give the suggestion: the other average lags by 20 steps, in
which the learning rate grows to four times."""


@dataclass(frozen=True)
class SearchConfig(Options):
    """The options of a range test, in addition to those of the run."""

    lr_min: float = option(1e-5, "The first step's learning rate.", check=POSITIVE)
    lr_max: float = option(10.0, "The last step's, unless the loss ends the search before.", check=POSITIVE)
    steps: int = option(200, "Steps from one to the other.", check=partial(integer, least=2 * SETTLING))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.lr_max / self.lr_min <= MOST:
            raise InputError(
                f"--lr-max {self.lr_max:g} must be above --lr-min {self.lr_min:g}, and at most {MOST:g} times as large."
            )


@dataclass
class Curve:
    """A learning rate, a loss and a smoothed loss for each step."""

    lrs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smooth: list[float] = field(default_factory=list)

    def add(self, lr: float, loss: float) -> None:
        """Add a step."""
        t = len(self.losses)
        average = self.smooth[-1] * (1 - MEMORY**t) if t else 0.0
        self.lrs.append(lr)
        self.losses.append(loss)
        self.smooth.append((MEMORY * average + (1 - MEMORY) * loss) / (1 - MEMORY ** (t + 1)))

    @property
    def over(self) -> bool:
        """Whether the loss shows that the learning rate is too large."""
        return bool(self.smooth) and self.smooth[-1] > TOO_LARGE * min(self.smooth)

    @property
    def mean(self) -> np.ndarray:
        """The running mean of the losses."""
        return smoothed(self.losses, HALF)

    def suggestion(self) -> int | None:
        """Return the step halfway from where the mean falls most steeply over log(lr) to its minimum, or None."""
        mean = self.mean
        best = int(np.argmin(mean))
        if best <= SETTLING:
            return None
        slopes = np.gradient(mean[: best + 1], np.log(self.lrs[: best + 1]))
        return (SETTLING + int(np.argmin(slopes[SETTLING:])) + best) // 2


@click.command("lr-find", cls=Command, epilog="Example: bighorn lr-find --optimizer came --task text --report lr.html")
@config_options(SearchConfig)
@config_options(RunConfig, only=SHARED)
@click.option("--report", type=FILE, help="Write an HTML report with the curve.")
@click.option("--json", "json_file", type=FILE, help="Write the curve and what it depends on as JSON.")
@click.pass_context
def lr_find(ctx: click.Context, /, report: Path | None, json_file: Path | None, **_: Any) -> None:
    """Find a learning rate to start from, in one short run.

    The learning rate grows by the same factor at each step. The run ends early when the smoothed loss is 4 times the
    best. The suggestion is halfway from where the loss falls most steeply to where it is lowest; bighorn compare tunes
    in earnest.
    """
    search = SearchConfig(**given(ctx, SearchConfig))
    config = RunConfig(**{**given(ctx, RunConfig), "steps": search.steps, "warmup": "0"})
    config.check()
    files.check_outputs({"--report": report, "--json": json_file}, {"--data": config.data})
    task = load(config.task, config.data)
    config = config.resolved(task)
    if isinstance(task, UserTask):
        Trial(task, config).run()
    run = Run(config, task)
    about = provenance(command_line(ctx), config.device)
    console = terminal()
    console.print(f"{config.task}: {defaults(task).description}; {config.optimizer}, batch {config.batch_size}")
    curve, ended = range_test(run, search, console)
    chosen, mean = curve.suggestion(), curve.mean
    best = int(np.argmin(mean))
    words = [ended, f"Smoothed loss at its best: {mean[best]:.4f} at lr {curve.lrs[best]:.2g}."]
    if chosen is None:
        words.append("No suggestion: the loss rises from the start. Take a lower --lr-min.")
    else:
        words.append(f"Suggestion: lr {curve.lrs[chosen]:.2g}, between the steepest fall of the loss and its lowest.")
    if len(mean) == search.steps and best > 0.9 * search.steps:
        words.append("The loss has not risen yet: give a higher --lr-max.")
    for line in words:
        console.print(line)

    settings = asdict(search) | {name: getattr(config, name) for name in SHARED}

    def page() -> str:
        from bighorn_workbench.reports import Section, plots, render

        rate = None if chosen is None else f"{curve.lrs[chosen]:.2g}"
        title = f"Start {config.optimizer} at lr {rate}" if rate else f"No learning rate for {config.optimizer}"
        lead = f"{config.optimizer} on {defaults(task).description}, batch {config.batch_size}."
        tiles = {
            "suggested learning rate": rate or "none",
            "best smoothed loss": f"{mean[best]:.4f}",
            "steps": f"{len(curve.lrs)}",
        }
        text = "\n".join(["One run whose learning rate grows by the same factor at each step.", *words])
        figure = partial(plots.search, curve.lrs, curve.losses, mean.tolist(), chosen)
        sections = [Section("Loss by learning rate", text, figure)]
        return render(title, lead, tiles, sections, [about["command"]], settings, config.device)

    content = {
        **about,
        "config": settings,
        "data": {"description": defaults(task).description, "sha256": run.fingerprint},
        "suggestion": None if chosen is None else curve.lrs[chosen],
        "best": {"lr": curve.lrs[best], "smoothed_loss": float(mean[best])},
        "curve": {"lr": curve.lrs, "loss": curve.losses, "smoothed_loss": mean.tolist(), "past_average": curve.smooth},
        "words": words,
    }
    files.finish(console.print, report, page, json_file, lambda: content)


def range_test(run: Run, search: SearchConfig, console: Console) -> tuple[Curve, str]:
    """Train until the loss is too large or all steps are made; return the curve and the reason why it ends."""
    run.schedule = Exponential(search.lr_min, search.lr_max / search.lr_min, search.steps - 1)
    curve = Curve()
    with counting(console) as bar:
        task = bar.add_task("steps", total=search.steps)
        while not run.done:
            lr = run.schedule(run.step)
            try:
                run.train_step()
            except DivergedError as error:
                if not curve.losses:
                    raise InputError(f"{error}, at the lowest learning rate. Take a lower --lr-min.") from error
                return curve, f"Stopped at lr {lr:.2g}: {error}."
            curve.add(lr, run.history.loss[-1])
            if curve.over:
                return curve, f"Stopped at lr {lr:.2g}, step {run.step}: the smoothed loss is {TOO_LARGE:g} x its best."
            bar.advance(task)
    return curve, f"All {search.steps} steps, up to lr {search.lr_max:g}."
