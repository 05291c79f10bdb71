"""The search of ``bighorn compare``, kept by Optuna: what is tried, by which process, and what came of it.

Each cell, an optimizer at a batch size, has a study of trials on validation data and one of final runs on test data.
Their trials wait in the storage until a process takes them, so that any number of processes and commands share the
work, and one that was killed loses only the runs in flight.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import TrialState

from bighorn_workbench import journal
from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.run_queue import Queue, beating
from bighorn_workbench.space import Entry, Space
from bighorn_workbench.tasks import Task, defaults
from bighorn_workbench.trials import Cell, Trial, best_of, configured, held_out, make, trial_of
from bighorn_workbench.values import warmup_steps

TUNING_SEED = 0
"""The seed of all tuning runs; final runs have the seeds after it."""

FULL, KEPT = 4, 75.0
"""The first trials of a cell, which are never stopped, and the percentile of them that the others must not fall behind.

With the median, 3 of 12 cells on digits lost their best trial, two of a high rate and a long warm-up; so none did.
"""

PAUSE = 0.1
"""Seconds between two looks for work while other processes have the rest of it."""


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison.

    Attributes:
        entries: The cells.
        trials: The tuning runs of each, at most.
        seeds: The final runs of each.
        target: The value of the metric to which steps are counted; None for none.
        path: The journal.
        data: The digest of the training data.
        code: The digest of the file of a user's task.
        budget: The seconds after which no tuning runs are added; None for no limit.
        processes: The runs at a time.
        prune: Whether trials are stopped that fall behind the first ones of their cell.
    """

    entries: tuple[Entry, ...]
    trials: int
    seeds: int
    target: float | None
    path: Path
    data: str
    code: str = ""
    budget: float | None = None
    processes: int = 1
    prune: bool = False


class Search:
    """A plan with its storage, in one process."""

    def __init__(self, plan: Plan, task: Task) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan, self.task, self.higher = plan, task, defaults(task).higher_is_better
        self.storage = journal.opened(plan.path)
        self._tuning = [self._queue_of_tuning(entry) for entry in plan.entries]
        self._final: dict[str, Queue] = {}

    @cached_property
    def _held_out(self) -> Task:
        return held_out(self.task)

    def _queue_of_tuning(self, entry: Entry) -> Queue:
        count = FULL if self.plan.prune else self.plan.trials if self.plan.budget is None else self._wave
        name = self._name(entry, "tuning", *["prune"] * self.plan.prune)
        return self._queue(name, entry.candidates(self.plan.trials), entry.space, count)

    def _queue(self, name: str, points: Sequence[dict[str, float]], space: Space, count: int) -> Queue:
        direction = StudyDirection.MAXIMIZE if self.higher else StudyDirection.MINIMIZE
        study = optuna.create_study(storage=self.storage, study_name=name, direction=direction, load_if_exists=True)
        return Queue(study, points, space, count)

    @property
    def _wave(self) -> int:
        """The trials of each cell that a budget adds at a time, so many that no process waits for the others."""
        return -(-self.plan.processes // len(self.plan.entries))

    @property
    def trials(self) -> int:
        """The trials of each cell, as far as known."""
        return max(map(self._count, self._tuning))

    def _count(self, queue: Queue) -> int:
        """Return the trials of a cell, as far as known; those of ``--prune`` wait until its first ones are done."""
        return queue.count if self.plan.budget is not None else len(queue.points)

    def extend(self) -> None:
        """Add trials to each cell if all are done, and the budget has time for them and the final runs."""
        plan, queues = self.plan, self._tuning
        for queue in queues:
            if plan.prune and queue.count < len(queue.points) and queue.is_done:
                queue.count = len(queue.points)
                queue.fill()
        while plan.budget is not None and self.trials < plan.trials and all(queue.is_done for queue in queues):
            done, more = self.trials, min(self.trials + self._wave, plan.trials)
            used = sum(queue.seconds for queue in queues) / plan.processes
            if used * (more + plan.seeds) / done > plan.budget:
                return
            for queue in queues:
                queue.count = min(more, len(queue.points))
                queue.fill()

    def _name(self, entry: Entry, phase: str, *more: object) -> str:
        """Return the name of a study: another one for all that would give other results."""
        config = {name: value for name, value in asdict(entry.base).items() if name not in ("data", "threads")}
        about = json.dumps([config, entry.space, self.plan.data, self.plan.code, *more], sort_keys=True, default=str)
        digest = hashlib.sha256(about.encode()).hexdigest()[:8]
        return f"{entry.name}, batch {entry.base.batch_size}, {phase} [{digest}]"

    def tuning(self, number: int) -> list[Trial]:
        """Return the finished tuning runs of a cell."""
        return self._trials(self.plan.entries[number], self._tuning[number])

    def _trials(self, entry: Entry, queue: Queue) -> list[Trial]:
        return list(self._numbered(entry, queue).values())

    def _numbered(self, entry: Entry, queue: Queue) -> dict[int, Trial]:
        try:
            return {
                index: trial_of(self._config(entry, queue.points[index]), found)
                for index, found in queue.results().items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"--study {self.plan.path}: another version of bighorn has written a run of {queue.study.study_name} "
                f"({type(error).__name__}: {error}). Use that version, or give another name."
            ) from error

    @staticmethod
    def _config(entry: Entry, point: dict[str, float]) -> RunConfig:
        return configured(entry.base, point, int(point.get("seed", TUNING_SEED)))

    def final(self, number: int) -> Queue | None:
        """Return the final runs of a cell whose tuning is done, None before; with a budget, of all cells."""
        entry, queue = self.plan.entries[number], self._tuning[number]
        waited_for = [queue] if self.plan.budget is None else self._tuning
        self.extend()
        if not all(each.is_done for each in waited_for):
            return None
        tuned = self.tuning(number)
        best = queue.points[tuned.index(best_of(tuned, self.higher))]
        name = self._name(entry, "final", best, self.plan.target)
        if name not in self._final:
            points = [best | {"seed": float(TUNING_SEED + 1 + index)} for index in range(self.plan.seeds)]
            self._final[name] = self._queue(name, points, {**entry.space, "seed": (1.0, 1e9)}, len(points))
        return self._final[name]

    def queues(self) -> Iterator[tuple[Entry, Queue, bool]]:
        """Yield what can be worked on: tuning first, then final runs."""
        self.extend()
        for entry, queue in zip(self.plan.entries, self._tuning, strict=True):
            yield entry, queue, False
        for number, entry in enumerate(self.plan.entries):
            if (final := self.final(number)) is not None:
                yield entry, final, True

    @property
    def total(self) -> int:
        """The number of all runs; a budget adds to it as long as there is time."""
        self.extend()
        return sum(map(self._count, self._tuning)) + len(self.plan.entries) * self.plan.seeds

    def finished(self) -> list[tuple[str, Trial]]:
        """Return all finished runs, each with the name of its optimizer."""
        return [(entry.name, trial) for entry, queue, _ in self.queues() for trial in self._trials(entry, queue)]

    def release(self) -> None:
        """Let the runs of processes that are no more wait again."""
        for _, queue, _ in self.queues():
            queue.release()

    def _take(self) -> tuple[Entry, Queue, bool, int, optuna.Trial] | None:
        for entry, queue, final in self.queues():
            if (taken := queue.take()) is not None:
                return entry, queue, final, *taken
        return None

    def work(self, stepped: Callable[[], object] = lambda: None, done: Callable[[], object] = lambda: None) -> None:
        """Make runs until there are none; ``stepped`` is called after each step, and ``done`` after each run."""
        while len(self.finished()) < self.total:
            if (taken := self._take()) is None:  # other processes have the rest
                time.sleep(PAUSE)
                self.release()
                continue
            entry, queue, final, index, trial = taken
            config = self._config(entry, queue.points[index])
            task, split = (self.task, "test") if final else (self._held_out, "validation")
            pruner = self._pruner(entry, queue, index, trial) if self.plan.prune and not final else None
            try:
                with beating(trial):
                    made = make(config, task, split, self.plan.target if final else None, stepped, pruner)
            except BaseException:  # also Ctrl-C: the run waits again for the next one who asks
                with suppress(InputError):  # of a full disk: what has ended the run is the news
                    queue.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
                raise
            with suppress(UpdateFinishedTrialError):  # a process that took this one for dead makes the run again
                trial.set_user_attr("result", made.result())
                if made.pruned:
                    queue.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
                else:
                    queue.study.tell(trial, made.value, skip_if_finished=True)
            done()

    def _pruner(self, entry: Entry, queue: Queue, index: int, trial: optuna.Trial) -> Callable[[int, float], bool]:
        """Return whether a trial is to be stopped at a step, by its number and its value there.

        The pruner knows the cell's first trials alone, since with all that have ended its answer would depend on the
        order in which processes end theirs.
        """
        first = [
            each for number, each in zip(queue.results(), self._trials(entry, queue), strict=True) if number < FULL
        ]
        longest = f"{100 * entry.space['warmup'][1]:g}%" if "warmup" in entry.space else entry.base.warmup
        wait = max((warmup_steps(longest, each.steps) for each in first), default=0)
        pruner = optuna.pruners.PercentilePruner(KEPT, n_startup_trials=1, n_warmup_steps=wait + 1)
        judge = optuna.create_study(direction=queue.study.direction, pruner=pruner)
        for each in first:
            judge.add_trial(optuna.create_trial(value=each.value, intermediate_values=dict(each.curve)))
        judged = judge.ask()

        def falls_behind(step: int, value: float) -> bool:
            with suppress(UpdateFinishedTrialError):
                trial.report(value, step)  # for optuna-dashboard
            judged.report(value, step)
            return index >= FULL and bool(judged.should_prune())

        return falls_behind

    def cells(self) -> list[Cell]:
        """Return the cells that have final runs, with all that is known."""
        found = []
        for number, entry in enumerate(self.plan.entries):
            queue = self.final(number)
            finals = [] if queue is None else self._trials(entry, queue)
            if not finals:
                continue
            tuning = self.tuning(number)
            tuned = tuple(sorted((trial.config.lr or 0.0, trial.value) for trial in tuning if not trial.pruned))
            found.append(
                Cell(
                    entry.name,
                    entry.base.batch_size or 0,
                    tuned,
                    finals[0].config.lr or 0.0,
                    tuple(finals),
                    tuple(tuning),
                    self.task.metric,
                    self.higher,
                    entry.space.get("lr", (1.0, 1.0)),
                )
            )
        return found
