"""Many runs at once, and what they come down to: the work of ``bighorn compare`` without its words."""

import dataclasses
import math
import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from bighorn.cli.config import RunConfig
from bighorn.cli.optimizers import state_bytes
from bighorn.cli.tasks import TASKS, Dataset
from bighorn.cli.training import DivergedError, Run

Grids = Mapping[str, Sequence[float]]

HELD_OUT = 0.2
"""Share of the training data that learning rates are chosen by."""

EVALUATIONS = 40
"""Evaluations of each final run, which is how finely steps to the target are known."""


@dataclass(frozen=True)
class Trial:
    """What one run came to.

    Attributes:
        config: The run's options.
        accuracy: Final accuracy on the test data, or on the held-out data; 0 if it diverged.
        loss: Final loss there, infinite if it diverged.
        steps: Steps of the whole run.
        steps_to_target: Steps after which the target accuracy was first seen, None if never.
        seconds: Time in training steps.
        state_bytes: Bytes of the optimizer's state.
    """

    config: RunConfig
    accuracy: float
    loss: float
    steps: int
    steps_to_target: int | None
    seconds: float
    state_bytes: int


@dataclass(frozen=True)
class Job:
    """A run to make: on all training data with the test data, or with a part of the training data held out."""

    config: RunConfig
    target: float
    tuning: bool


@dataclass(frozen=True)
class Cell:
    """One optimizer at one batch size: the learning rates tried, the best of them and its final runs."""

    optimizer: str
    batch_size: int
    tuned: tuple[tuple[float, float], ...]
    """Each learning rate with its mean held-out accuracy, rates ascending."""
    lr: float
    trials: tuple[Trial, ...]

    @property
    def accuracy(self) -> tuple[float, float, float]:
        """Lowest, median and highest final test accuracy."""
        values = [trial.accuracy for trial in self.trials]
        return min(values), statistics.median(values), max(values)

    @property
    def steps_to_target(self) -> float:
        """The median; infinite if most runs never got there."""
        return statistics.median(
            math.inf if trial.steps_to_target is None else trial.steps_to_target for trial in self.trials
        )

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(trial.seconds for trial in self.trials)

    @property
    def on_edge(self) -> bool:
        """Whether a better learning rate may lie outside of the grid."""
        return self.lr in (self.tuned[0][0], self.tuned[-1][0])


@lru_cache(maxsize=2)
def _dataset(task: str, data: str | None, tuning: bool) -> Dataset:
    return _dataset(task, data, False).held_out(HELD_OUT) if tuning else TASKS[task].load(data)


def make(job: Job) -> Trial:
    """Make one run in this process."""
    dataset = _dataset(job.config.task, job.config.data, job.tuning)
    run = Run(job.config, dataset, evaluations=1 if job.tuning else EVALUATIONS)
    try:
        while not run.done:
            run.train_step()
            if run.evaluation_due:
                run.evaluate()
        _, loss, accuracy = run.history.tests[-1]
        steps_to_target = run.history.steps_to(job.target)
    except DivergedError:
        loss, accuracy, steps_to_target = math.inf, 0.0, None
    return Trial(
        job.config, accuracy, loss, run.total, steps_to_target, run.history.seconds, state_bytes(run.optimizer)
    )


def make_all(jobs: Sequence[Job], processes: int, done: Callable[[], None]) -> list[Trial]:
    """Make all runs, ``processes`` at a time, calling ``done`` after each; the result is in the order of ``jobs``."""
    trials: dict[int, Trial] = {}
    for index, trial in _unordered(jobs, processes):
        trials[index] = trial
        done()
    return [trials[index] for index in range(len(jobs))]


def _unordered(jobs: Sequence[Job], processes: int) -> Iterator[tuple[int, Trial]]:
    if processes == 1:
        yield from enumerate(map(make, jobs))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_leave_interrupts_to_parent) as pool:
        futures = {pool.submit(make, job): index for index, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # also Ctrl-C: nobody waits for runs whose result nobody sees
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def count(bases: Sequence[RunConfig], grids: Grids, seeds: int) -> int:
    """How many runs :func:`compare` makes."""
    return seeds * sum(len(grids[base.optimizer]) + 1 for base in bases)


def compare(
    bases: Sequence[RunConfig], grids: Grids, seeds: int, target: float, processes: int, done: Callable[[], None]
) -> tuple[list[Cell], list[Trial]]:
    """Tune the learning rate of each of ``bases``, then make its final runs.

    Args:
        bases: One resolved configuration per cell; its learning rate and seed do not matter.
        grids: The learning rates to try, by optimizer.
        seeds: Seeds per cell.
        target: The test accuracy to count steps to.
        processes: Runs at a time.
        done: Called after each run.

    Returns:
        The cells in the order of ``bases``, and the trials of the tuning.
    """

    def jobs(base: RunConfig, rates: Sequence[float], tuning: bool) -> list[Job]:
        configs = [dataclasses.replace(base, lr=lr, seed=seed) for lr in rates for seed in range(seeds)]
        return [Job(config, target, tuning) for config in configs]

    tuning = [jobs(base, grids[base.optimizer], tuning=True) for base in bases]
    tried = make_all([job for cell in tuning for job in cell], processes, done)
    parts = _split(tried, [len(cell) for cell in tuning])
    chosen = [choose(part) for part in parts]
    final = [jobs(base, [lr], tuning=False) for base, (lr, _) in zip(bases, chosen, strict=True)]
    trials = _split(make_all([job for cell in final for job in cell], processes, done), [seeds] * len(bases))
    cells = [
        Cell(base.optimizer, base.batch_size or 0, tuned, lr, tuple(part))
        for base, (lr, tuned), part in zip(bases, chosen, trials, strict=True)
    ]
    return cells, tried


def choose(trials: Sequence[Trial]) -> tuple[float, tuple[tuple[float, float], ...]]:
    """The learning rate of the highest mean accuracy, the lower loss deciding ties, and all rates with their means."""
    runs: dict[float, list[Trial]] = {}
    for trial in trials:
        runs.setdefault(trial.config.lr or 0.0, []).append(trial)
    mean = {lr: statistics.fmean(trial.accuracy for trial in runs[lr]) for lr in sorted(runs)}
    loss = {lr: statistics.fmean(trial.loss for trial in runs[lr]) for lr in runs}
    return max(mean, key=lambda lr: (mean[lr], -loss[lr])), tuple(mean.items())


def _split(trials: Sequence[Trial], lengths: Sequence[int]) -> list[list[Trial]]:
    rest = iter(trials)
    return [list(islice(rest, length)) for length in lengths]


def available_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
