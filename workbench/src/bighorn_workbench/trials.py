"""The runs of ``bighorn compare`` and their results. This module does not print."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bighorn_workbench.config import RunConfig
from bighorn_workbench.metrics import json_name
from bighorn_workbench.optimizers import OPTIMIZERS, state_bytes
from bighorn_workbench.records import check_types
from bighorn_workbench.run import DivergedError, Run
from bighorn_workbench.space import Space
from bighorn_workbench.tasks import Task, defaults

EVALUATIONS = 20
"""Evaluations of each final run: the resolution of the steps to the target."""

TRIALS = 12
"""The trials of a cell by default; each one more repeats the best ones once more."""

LEAST = 8
"""A cell with fewer trials gets no verdict, since they leave a rate of three decades to luck."""

REPEATED, MOST_REPEATS = 3, 5
"""One in so many trials, the best ones, is repeated with other seeds, and how many these are at most."""

EDGE = 0.05
"""The share of a range, in the logarithm, next to its ends."""


@dataclass(frozen=True)
class Trial:
    """The result of one run.

    Attributes:
        config: The run's options.
        value: The final value of the task's metric on the test data, or on the validation data; the worst infinity if
            it diverged.
        loss: Final loss there, infinite if it diverged, and NaN for a task whose evaluation has none.
        steps: Steps of the whole run.
        steps_to_target: Steps after which the target was first seen, None if never.
        seconds: Time in training steps.
        state_bytes: Bytes of the optimizer's state.
        curve: Each evaluation's step and value of the metric.
    """

    config: RunConfig
    value: float
    loss: float
    steps: int
    steps_to_target: int | None
    seconds: float
    state_bytes: int
    curve: tuple[tuple[int, float], ...]

    @property
    def diverged(self) -> bool:
        """Whether the run has no result."""
        return not math.isfinite(self.value)

    def as_json(self, metric: str) -> dict[str, Any]:
        """Return the options that differ between the runs of a cell, and the results."""
        names = ("lr", "weight_decay", "warmup", "optimizer_option", "seed")
        return {
            **{name: getattr(self.config, name) for name in names},
            json_name(metric): self.value,
            "loss": self.loss,
            "steps_to_target": self.steps_to_target,
            "seconds": round(self.seconds, 3),
        }

    def result(self) -> dict[str, Any]:
        """Return all but the configuration, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "config"}


def trial_of(config: RunConfig, result: dict[str, Any]) -> Trial:
    """Return a trial from :meth:`Trial.result` after a round trip through JSON.

    Raises:
        KeyError, TypeError, ValueError: It is not such a result.
    """
    made = Trial(config, **{**result, "curve": tuple((step, value) for step, value in result["curve"])})
    check_types(made)
    return made


@dataclass(frozen=True)
class Cell:
    """One optimizer or variant at one batch size: what was tried, the best of it and its final runs."""

    optimizer: str
    batch_size: int
    tuned: tuple[tuple[float, float], ...]
    """Each learning rate with its value of the metric on validation data, rates ascending."""
    lr: float
    trials: tuple[Trial, ...]
    tuning: tuple[Trial, ...] = ()
    """The runs from which the best options were chosen."""
    metric: str = "accuracy"
    higher_is_better: bool = True
    space: Space = field(default_factory=dict)
    """The searched space."""
    repeats: tuple[Trial, ...] = ()
    """The runs of the best trials with other seeds, whose means decide."""

    @property
    def best(self) -> Trial:
        """The trial with the chosen options, and the means of its runs."""
        return best_of(self.tuning, self.higher_is_better, self.repeats)

    @property
    def value(self) -> tuple[float, float, float]:
        """Lowest, mean and highest final value of the metric on the test data."""
        return _spread([trial.value for trial in self.trials])

    @property
    def loss(self) -> tuple[float, float, float]:
        """Lowest, mean and highest final test loss."""
        return _spread([trial.loss for trial in self.trials])

    @property
    def steps_to_target(self) -> float:
        """The median; infinite if most runs never reached the target."""
        return statistics.median(
            math.inf if trial.steps_to_target is None else trial.steps_to_target for trial in self.trials
        )

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(trial.seconds for trial in self.trials)

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The mean of the metric after each evaluated step, over the seeds with a finite value there."""
        reached: dict[int, list[float]] = {}
        for trial in self.trials:
            for step, value in trial.curve:
                if math.isfinite(value):
                    reached.setdefault(step, []).append(value)
        return [(step, statistics.fmean(reached[step])) for step in sorted(reached)]

    @property
    def tried(self) -> int:
        """The number of trials."""
        return max(len(self.tuning), len(self.tuned))

    @property
    def is_tried(self) -> bool:
        """Whether there were enough trials for the searched space, if there is one."""
        return self.tried >= LEAST or all(low == high for low, high in self.space.values())

    @property
    def on_edge(self) -> bool:
        """Whether a better learning rate may be outside the range that was searched."""
        low, high = map(math.log, self.space.get("lr", (1.0, 1.0)))
        at = math.log(self.lr)
        return low < high and not low + EDGE * (high - low) < at < high - EDGE * (high - low)

    @property
    def is_tuned(self) -> bool:
        """Whether the cell gets verdicts."""
        return self.is_tried and not self.on_edge

    def as_json(self) -> dict[str, Any]:
        """Return the cell's options, its results and every run."""
        low, mean, high = self.value
        config, metric = asdict(self.trials[0].config), json_name(self.metric)
        return {
            "name": self.optimizer,
            "config": {name: value for name, value in config.items() if name not in {"data", "seed"}},
            "tuned": [{"lr": lr, metric: value} for lr, value in self.tuned],
            "on_edge": self.on_edge,
            metric: {"lowest": low, "mean": mean, "highest": high},
            "loss": dict(zip(("lowest", "mean", "highest"), self.loss, strict=True)),
            "steps": self.trials[0].steps,
            "steps_to_target": self.steps_to_target,
            "seconds": self.seconds,
            "state_bytes": self.trials[0].state_bytes,
            "curve": {"steps": [step for step, _ in self.curve], metric: [value for _, value in self.curve]},
            "final": [trial.as_json(self.metric) for trial in self.trials],
            "tuning": [trial.as_json(self.metric) for trial in self.tuning],
            "repeats": [trial.as_json(self.metric) for trial in self.repeats],
        }


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), mean_of(values), max(values)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean; NaN for both infinities, the difference of runs that diverged.

    Example:
        >>> mean_of([1.0, 2.0]), mean_of([float("inf"), float("-inf")])
        (1.5, nan)
    """
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values)


def paired(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells with the seeds alone that all cells of their batch size have; all seeds if there is none."""
    found = []
    for cell in cells:
        common = set.intersection(*(_seeds(each) for each in cells if each.batch_size == cell.batch_size))
        trials = tuple(trial for trial in cell.trials if trial.config.seed in common)
        found.append(replace(cell, trials=trials or cell.trials))
    return found


def _seeds(cell: Cell) -> set[int]:
    return {trial.config.seed for trial in cell.trials}


def make(
    config: RunConfig,
    task: Task,
    split: str,
    target: float | None = None,
    stepped: Callable[[], object] = lambda: None,
    evaluations: int | None = None,
) -> Trial:
    """Make one run in this process.

    ``stepped`` is called after each step; ``evaluations`` is their number, if not the split's default.
    """
    planned = 1 if split == "validation" else EVALUATIONS
    run = Run(config, copy(task), evaluations=evaluations or planned, split=split)
    sign = 1 if defaults(task).higher_is_better else -1
    steps_to_target = None
    try:
        while not run.done:
            run.train_step()
            stepped()
            if run.evaluation_due:
                value = run.evaluate()[task.metric]
                if target is not None and steps_to_target is None and sign * value >= sign * target:
                    steps_to_target = run.step
        found = run.history.evaluations[-1][1]
        value, loss = found[task.metric], found.get("loss", math.nan)
    except DivergedError:
        value = math.nan
    if not math.isfinite(value):
        value, loss, steps_to_target = -sign * math.inf, math.inf, None
    curve = tuple((step, found[task.metric]) for step, found in run.history.evaluations)
    return Trial(
        config, value, loss, run.total, steps_to_target, run.history.seconds, state_bytes(run.optimizer), curve
    )


def ordered(trials: Sequence[Trial], higher: bool) -> list[Trial]:
    """Return trials, the best value first; equal ones by loss, then in their order. Diverged ones are last."""
    sign = -1 if higher else 1

    def place(trial: Trial) -> tuple[bool, float, float]:
        return trial.diverged, sign * trial.value, math.inf if math.isnan(trial.loss) else trial.loss

    return sorted(trials, key=place)


def best_of(trials: Sequence[Trial], higher: bool, repeats: Sequence[Trial] = ()) -> Trial:
    """Return the best trial; with repeats, the best of the repeated ones by the means of their runs.

    If runs of all of them diverged, it is one with the fewest.
    """
    if repeats:
        repeated = {_options(each) for each in repeats}
        lost = Counter(_options(each) for each in repeats if each.diverged)
        trials = [each for each in averaged(ordered(trials, higher), repeats) if _options(each) in repeated]
        trials.sort(key=lambda each: lost[_options(each)])
    return ordered(trials, higher)[0]


def averaged(trials: Sequence[Trial], repeats: Sequence[Trial]) -> list[Trial]:
    """Return trials with the means of their values and losses, over the repeats with the same options too."""
    runs: dict[tuple[object, ...], list[Trial]] = {}
    for each in (*trials, *repeats):
        runs.setdefault(_options(each), []).append(each)
    found = []
    for trial in trials:
        alike = runs[_options(trial)]
        value, loss = mean_of([each.value for each in alike]), mean_of([each.loss for each in alike])
        found.append(replace(trial, value=value, loss=loss))
    return found


def _options(trial: Trial) -> tuple[object, ...]:
    """Return the options that differ between trials of a cell."""
    config = trial.config
    return config.lr, config.weight_decay, config.warmup, config.optimizer_option


def repeats(trials: int) -> tuple[int, int]:
    """Return how many of the best trials are repeated, and with how many seeds each.

    A single seed chooses the luckiest of many trials rather than the best.

    Example:
        >>> repeats(12), repeats(15), repeats(60)
        ((0, 0), (5, 3), (20, 5))
    """
    seeds = min(max(trials - TRIALS, 0), MOST_REPEATS)
    return (trials // REPEATED if seeds else 0), seeds


def configured(base: RunConfig, params: dict[str, float], seed: int) -> RunConfig:
    """Return the options of a run from the values of a search, by the names of a space.

    Example:
        >>> config = configured(RunConfig(), {"lr": 0.1, "warmup": 0.05, "one_minus_beta2": 0.01}, seed=1)
        >>> config.lr, config.warmup, config.optimizer_option
        (0.1, '5%', ('betas=(0.9, 0.99)',))
    """
    values: dict[str, Any] = {name: params[name] for name in ("lr", "weight_decay") if name in params}
    if "warmup" in params:
        values["warmup"] = f"{100 * params['warmup']:.3g}%"
    of = {**OPTIMIZERS[base.optimizer].defaults, **params}
    options = []
    if any("beta" in name for name in params):
        options.append(f"betas=({', '.join(f'{1 - of[name]:.6g}' for name in of if 'beta' in name)})")
    if "one_minus_momentum" in params:
        options.append(f"momentum={1 - params['one_minus_momentum']:.6g}")
    options += [f"{name}={params[name]:g}" for name in ("eps", "adamw_rate") if name in params]
    values["optimizer_option"] = (*base.optimizer_option, *options)
    return replace(base, seed=seed, **values)
