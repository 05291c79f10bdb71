"""The runs of ``bighorn compare``, several at a time, and their results. This module does not print."""

import dataclasses
import math
import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, starmap

from bighorn.cli.config import RunConfig
from bighorn.cli.metrics import is_share
from bighorn.cli.optimizers import state_bytes
from bighorn.cli.run import DivergedError, Run
from bighorn.cli.tasks import load
from bighorn.tasks import Task, defaults

Grids = Mapping[str, Sequence[float]]

Named = tuple[str, RunConfig]
"""The name of an optimizer, or of a variant of one, and its configuration."""

Job = tuple[RunConfig, float | None, bool]
"""A configuration, the target, and whether the run is one of those by which a rate is chosen, on held-out data."""

EVALUATIONS = 20
"""Evaluations of each final run: the resolution of the steps to the target."""

BEYOND = 4
"""The number of learning rates that a cell may try beyond its grid while the last one is the best."""


@dataclass(frozen=True)
class Trial:
    """The result of one run.

    Attributes:
        config: The run's options.
        value: The final value of the task's metric on the test data, or on the held-out data; :func:`worst` if it
            diverged.
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


@dataclass(frozen=True)
class Cell:
    """One optimizer or variant at one batch size: the learning rates tried, the best of them and its final runs."""

    optimizer: str
    batch_size: int
    tuned: tuple[tuple[float, float], ...]
    """Each learning rate with its mean held-out value of the metric, rates ascending."""
    lr: float
    trials: tuple[Trial, ...]
    tuning: tuple[Trial, ...] = ()
    """The runs from which the learning rate was chosen."""
    metric: str = "accuracy"
    higher_is_better: bool = True

    @property
    def value(self) -> tuple[float, float, float]:
        """Lowest, median and highest final value of the metric on the test data."""
        return _spread([trial.value for trial in self.trials])

    @property
    def loss(self) -> tuple[float, float, float]:
        """Lowest, median and highest final test loss."""
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
        """The median of the metric after each evaluated step, over the seeds that reached it."""
        reached: dict[int, list[float]] = {}
        for trial in self.trials:
            for step, value in trial.curve:
                reached.setdefault(step, []).append(value)
        return [(step, statistics.median(reached[step])) for step in sorted(reached)]

    @property
    def on_edge(self) -> bool:
        """Whether a better learning rate may be outside the grid."""
        return self.lr in (self.tuned[0][0], self.tuned[-1][0])


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def worst(task: Task) -> float:
    """Return the value of the metric of a run that diverged: 0 for an accuracy, and infinite otherwise."""
    if defaults(task).higher_is_better:
        return 0.0 if is_share(task.metric) else -math.inf
    return math.inf


def held_out(task: Task) -> Task:
    """Return the task on which rates are chosen: it has the split "validation"."""
    return task.held_out() if hasattr(task, "held_out") else task


@lru_cache(maxsize=2)
def _task(name: str, data: str | None, tuning: bool) -> Task:
    return held_out(_task(name, data, False)) if tuning else load(name, data)


def make(config: RunConfig, target: float | None, tuning: bool) -> Trial:
    """Make one run in this process."""
    task = _task(config.task, config.data, tuning)
    split, evaluations = ("validation", 1) if tuning else ("test", EVALUATIONS)
    run = Run(config, task, evaluations=evaluations, split=split)
    sign = 1 if defaults(task).higher_is_better else -1
    try:
        while not run.done:
            run.train_step()
            if run.evaluation_due:
                run.evaluate()
        found = run.history.tests[-1][1]
        value, loss = found[task.metric], found.get("loss", math.nan)
    except DivergedError:
        value, loss = worst(task), math.inf
    curve = tuple((step, found[task.metric]) for step, found in run.history.tests)
    reached = (step for step, each in curve if target is not None and sign * each >= sign * target)
    steps_to_target = next(reached, None) if loss < math.inf or math.isnan(loss) else None
    return Trial(
        config, value, loss, run.total, steps_to_target, run.history.seconds, state_bytes(run.optimizer), curve
    )


@contextmanager
def workers(processes: int) -> Iterator[Callable[[Sequence[Job]], Iterable[tuple[int, Trial]]]]:
    """Yield a function that makes runs, ``processes`` at a time, and yields each with its index when it is finished."""
    if processes == 1:
        yield lambda jobs: enumerate(starmap(make, jobs))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_leave_interrupts_to_parent) as pool:

        def make_all(jobs: Sequence[Job]) -> Iterator[tuple[int, Trial]]:
            futures = {pool.submit(make, *job): index for index, job in enumerate(jobs)}
            for future in as_completed(futures):
                yield futures[future], future.result()

        try:
            yield make_all
        except BaseException:  # also Ctrl-C: the results of running processes are not needed
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def count(bases: Sequence[Named], grids: Grids, seeds: int, tuning_seeds: int) -> int:
    """Return the number of runs of :func:`run_cells` if no grid is continued."""
    return sum(tuning_seeds * len(grids[name]) + seeds for name, _ in bases)


def run_cells(
    bases: Sequence[Named],
    grids: Grids,
    seeds: int,
    tuning_seeds: int,
    target: float | None,
    processes: int,
    task: Task,
    *,
    made: Callable[[], None],
    added: Callable[[int], None],
) -> list[Cell]:
    """Tune the learning rate of each of ``bases``, then make its final runs.

    Args:
        bases: A name and a resolved configuration per cell; its learning rate and seed do not matter.
        grids: The learning rates to try, by name. One of two or more whose end is best is continued.
        seeds: Seeds of each final run.
        tuning_seeds: Seeds of each learning rate tried.
        target: The value of the metric to which steps are counted; None for none.
        processes: The number of runs at a time.
        task: The task, whose metric decides.
        made: Called after each run.
        added: Called with a number of runs to make beyond those of :func:`count`.

    Returns:
        The cells in the order of ``bases``.
    """
    higher = defaults(task).higher_is_better
    with workers(processes) as make_all:

        def trials(rates: Sequence[Sequence[float]], tuning: bool) -> list[tuple[Trial, ...]]:
            """Make the runs of each cell with its rates."""
            jobs = [
                [
                    (dataclasses.replace(base, lr=lr, seed=seed), target, tuning)
                    for lr in mine
                    for seed in range(tuning_seeds if tuning else seeds)
                ]
                for (_, base), mine in zip(bases, rates, strict=True)
            ]
            found: dict[int, Trial] = {}
            for index, trial in make_all([job for cell in jobs for job in cell]):
                found[index] = trial
                made()
            rest = iter([found[index] for index in range(len(found))])
            return [tuple(islice(rest, len(cell))) for cell in jobs]

        tuning: list[tuple[Trial, ...]] = [()] * len(bases)
        rates: list[tuple[float, ...]] = [tuple(grids[name]) for name, _ in bases]
        while any(rates):
            more = trials(rates, tuning=True)
            tuning = [before + new for before, new in zip(tuning, more, strict=True)]
            rates = [
                beyond(*choose(cell, higher), len(grids[name])) for (name, _), cell in zip(bases, tuning, strict=True)
            ]
            added(tuning_seeds * sum(map(len, rates)))
        chosen = [choose(cell, higher) for cell in tuning]
        final = trials([(lr,) for lr, _ in chosen], tuning=False)
    return [
        Cell(name, base.batch_size or 0, tuned, lr, runs, tried, task.metric, higher)
        for (name, base), (lr, tuned), runs, tried in zip(bases, chosen, final, tuning, strict=True)
    ]


def beyond(lr: float, tuned: Sequence[tuple[float, float]], given: int) -> tuple[float, ...]:
    """Return the learning rate to try next if the best one, ``lr``, is the end of a grid that had ``given`` rates.

    The tuple is empty if the best rate is inside the grid, if :data:`BEYOND` rates were tried already, and for a grid
    of one rate, which the user has chosen.

    Example:
        >>> beyond(0.4, [(0.1, 0.7), (0.2, 0.8), (0.4, 0.9)], given=3)
        (0.8,)
        >>> beyond(0.2, [(0.1, 0.7), (0.2, 0.9), (0.4, 0.8)], given=3)
        ()
    """
    rates = [rate for rate, _ in tuned]
    if given == 1 or len(rates) >= given + BEYOND or lr not in (rates[0], rates[-1]):
        return ()
    neighbour = rates[1] if lr == rates[0] else rates[-2]
    return (float(f"{lr * lr / neighbour:.3g}"),)


def choose(trials: Sequence[Trial], higher: bool = True) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Return the rate of the best mean of the metric (ties: the lowest loss), and all rates with their means."""
    runs: dict[float, list[Trial]] = {}
    for trial in trials:
        runs.setdefault(trial.config.lr or 0.0, []).append(trial)
    mean = {lr: statistics.fmean(trial.value for trial in runs[lr]) for lr in sorted(runs)}
    loss = {lr: statistics.fmean(trial.loss for trial in runs[lr]) for lr in runs}
    sign = 1 if higher else -1
    return max(mean, key=lambda lr: (sign * mean[lr], -loss[lr])), tuple(mean.items())


def available_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
