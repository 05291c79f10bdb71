"""The search of ``bighorn compare``, kept by Optuna: what is tried, by which process, and with which result.

Each cell, an optimizer at a batch size, has three studies: trials on validation data, repeats of the best ones there,
and final runs on test data. Their trials wait in the study until a process claims them, so that any number of processes
and commands share the work, and one that was killed loses only the runs in flight.
"""

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import optuna
from optuna.trial import TrialState

from bighorn_workbench import storage
from bighorn_workbench.builtin_tasks.trial import held_out
from bighorn_workbench.config import RunConfig
from bighorn_workbench.costs import Cost
from bighorn_workbench.errors import InputError
from bighorn_workbench.run_queue import Queue
from bighorn_workbench.space import SCAN, Entry, Space
from bighorn_workbench.storage import Database, Place
from bighorn_workbench.tasks import Task, defaults
from bighorn_workbench.trials import (
    EVALUATIONS,
    LEAST,
    MOST_REPEATS,
    Cell,
    Trial,
    averaged,
    best_of,
    configured,
    make,
    ordered,
    repeats,
    trial_of,
)

TUNING_SEED, REPEAT_SEED = 0, 1_000_000
"""The seed of all trials, and the last one before the repeats' seeds; final runs have the seeds after the trials'."""

AHEAD = 2
"""Before a deadline, the trials for each process that wait at least, so that none is idle until the next look."""

DECISION = "trials"
"""The key, with a command's name, of its trials and final runs of each cell, and whether there may be more."""

SEEDS_EACH = 2
"""With a budget, the final runs of a cell for each of its trials after the least, up to their most."""

SEEDED: Space = {"seed": (1.0, 1e9)}
"""What runs with other seeds have beside the searched space."""

PAUSE = 0.3
"""Seconds between two looks for work while other processes have the rest of it."""


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison.

    Attributes:
        entries: The cells.
        trials: The tuning runs of each, at most.
        seeds: The final runs of each, at least.
        most_seeds: The final runs of each, at most.
        target: The value of the metric to which steps are counted; None for none.
        study: The file or the server of the study.
        data: The digest of the training data.
        identity: The digest of the task's data, model and code.
        deadline: The time by which all runs are to end, so that no more tuning runs are added; None for no limit.
        processes: The runs at a time.
        costs: The cost of a run of each cell.
        evaluations: The evaluations of each final run.
        owner: A name of the command, which its processes write beside their runs.
    """

    entries: tuple[Entry, ...]
    trials: int
    seeds: int
    most_seeds: int
    target: float | None
    study: Place
    data: str
    identity: str = ""
    deadline: float | None = None
    processes: int = 1
    costs: tuple[Cost, ...] = ()
    evaluations: int = EVALUATIONS
    owner: str = field(default_factory=lambda: secrets.token_hex(8))

    def after(self, trials: int, seeds: int) -> tuple[int, int] | None:
        """Return the numbers of trials and final runs with one run more; None if the plan has no more."""
        wanted = self.most_seeds if trials >= self.trials else self.seeds + SEEDS_EACH * (trials - LEAST)
        if seeds < min(wanted, self.most_seeds):
            return trials, seeds + 1
        return (trials + 1, seeds) if trials < self.trials else None


class Search:
    """A plan with its storage, in one process.

    Runs that the storage has from earlier commands are used, also if they are more than the plan asks for.

    Args:
        plan: The plan.
        task: The task.
        leads: Whether this process decides how many trials fit before the deadline; others follow the one that does.
    """

    def __init__(self, plan: Plan, task: Task, leads: bool = True) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan, self.task, self.higher, self._leads = plan, task, defaults(task).higher_is_better, leads
        self.database, self._decision = Database(plan.study), f"{DECISION} of {plan.owner}"
        self._tuning = [self._queue(self._name(entry, "tuning"), entry.scan(), entry.space) for entry in plan.entries]
        self._repeated = [
            self._queue(self._name(entry, "repeats"), _again(entry.scan()), {**SEEDED, **entry.space})
            for entry in plan.entries
        ]
        kept = max(queue.kept for queue in self._tuning) if leads else 0  # those that follow have this one's plan
        self.plan = plan = replace(plan, trials=max(plan.trials, kept))
        self.trials = plan.trials if plan.deadline is None else max(kept, min(SCAN, plan.trials))
        """The trials of each cell, as far as known; more may be added while the search is open."""
        self.seeds = plan.seeds
        """The final runs of each cell, likewise."""
        self._final: dict[str, Queue] = {}
        self._made: dict[str, dict[int, tuple[dict[str, Any], Trial]]] = {}
        """The results that were read, by the queue and the number of the run."""
        self._best: dict[tuple[int, int], list[int]] = {}
        """The repeats of a cell after so many trials."""
        self.is_open = plan.deadline is not None
        """Whether runs may still be added."""
        self.extend()

    @cached_property
    def _held_out(self) -> Task:
        return held_out(self.task)

    def _queue(self, name: str, points: list[dict[str, float]], space: Space) -> Queue:
        return Queue(self.database, name, self.higher, points, space)

    def extend(self) -> None:
        """Queue all known trials, and add a run to each cell while the time before a deadline allows it."""
        if self.is_open and not self._leads:
            self.trials, self.seeds, self.is_open = self._decided()
        for entry, queue, repeated in zip(self.plan.entries, self._tuning, self._repeated, strict=True):
            queue.look()
            queue.extend(self.trials)
            if (missing := entry.most(self.plan.trials) - len(queue.points)) > 0 and queue.is_done:
                best = best_of(self._trials(entry, queue), self.higher)
                queue.points += (around := entry.around(best.config.lr or 1.0, missing))
                repeated.points += _again(around)
                queue.extend(self.trials)
        while (
            self.is_open and self._leads and not self.database.ended and self._waiting() < AHEAD * self.plan.processes
        ):
            more = self.plan.after(self.trials, self.seeds)
            self.is_open = more is not None and self.needed(*more) <= self.left
            if more is not None and self.is_open:
                self.trials, self.seeds = more
            with self.database.asked():
                self._tuning[0].study.set_user_attr(self._decision, [self.trials, self.seeds, self.is_open])

    def fitting(self, seconds: float) -> tuple[int, int]:
        """Return the trials and the final runs of each cell that fit into some time, by what runs have taken."""
        fit, more = (self.trials, self.seeds), self.plan.after(self.trials, self.seeds)
        while more is not None and self.needed(*more) <= seconds:
            fit, more = more, self.plan.after(*more)
        return fit

    def _decided(self) -> tuple[int, int, bool]:
        """Return the runs of each cell, and whether there may be more, as the leading process has decided."""
        with self.database.asked(reads=True):
            found = self._tuning[0].study.user_attrs.get(self._decision, [self.trials, self.seeds, True])
        if not isinstance(found, list) or [type(each) for each in found] != [int, int, bool]:
            raise InputError(f"--study {self.plan.study}: {self._decision} are {found!r:.50}. Give another name.")
        trials, seeds, is_open = found
        return trials, seeds, is_open

    def _counts(self) -> list[int]:
        """Return the trials of each cell that differ."""
        return [entry.most(self.trials) for entry in self.plan.entries]

    def _waiting(self) -> int:
        """Return how many trials no process has taken."""
        return sum(self._counts()) - sum(queue.taken for queue in self._tuning)

    @property
    def left(self) -> float:
        """The seconds until the deadline."""
        assert self.plan.deadline is not None
        return self.plan.deadline - time.time()

    def needed(self, trials: int, seeds: int) -> float:
        """Return the seconds until so many trials and final runs of each cell are done, by what runs have taken.

        It is the bound of any order of runs: no process is idle before the last repeats and the last final runs, of
        which one may be the longest. It is 0 if there is none to make.
        """
        plan, runs, last, last_final = self.plan, 0.0, 0.0, 0.0
        for number, (entry, queue, cost) in enumerate(zip(plan.entries, self._tuning, plan.costs, strict=True)):
            one = queue.seconds() or cost.steps + cost.evaluation
            final = one + (plan.evaluations - 1) * cost.evaluation
            again, finals = self._repeats_left(number, trials), self._finals_left(number, trials, seeds)
            runs += (queue.missing(range(entry.most(trials))) + again) * one + finals * final
            last, last_final = max(last, one if again else 0.0), max(last_final, final if finals else 0.0)
        return (runs + (plan.processes - 1) * (last + last_final)) / plan.processes

    def _finals_left(self, number: int, trials: int, seeds: int) -> int:
        """Return the final runs that a cell lacks after so many trials, which may have another best one."""
        queue = self._final_of(number) if self._is_chosen(number, trials) else None
        return seeds if queue is None else queue.missing(range(min(seeds, len(queue.points))))

    def _repeats_left(self, number: int, trials: int) -> int:
        """Return the repeats that a cell lacks after so many trials."""
        if self._is_done(number, trials):
            return self._repeated[number].missing(self._repeats(number))
        return math.prod(repeats(self.plan.entries[number].most(trials)))

    def _repeats(self, number: int) -> list[int]:
        """Return the numbers of the repeats of a cell whose trials are done; those that diverged are not repeated."""
        key = number, len(self._tuning[number].wanted)
        if key not in self._best:
            tuned = self.tuning(number)
            count, seeds = repeats(len(tuned))
            best = [tuned.index(each) for each in ordered(tuned, self.higher)[:count] if not each.diverged]
            self._best[key] = [MOST_REPEATS * each + index for each in best for index in range(seeds)]
        return self._best[key]

    def _is_chosen(self, number: int, trials: int) -> bool:
        """Return whether the repeats after so many trials are done, too."""
        return self._is_done(number, trials) and not self._repeats_left(number, trials)

    def _is_done(self, number: int, trials: int) -> bool:
        """Return whether a cell has so many trials, and all are done."""
        queue = self._tuning[number]
        return len(queue.wanted) >= self.plan.entries[number].most(trials) and queue.is_done

    def _name(self, entry: Entry, phase: str, *more: object) -> str:
        """Return the name of a study, which differs if results would."""
        config = {name: value for name, value in asdict(entry.base).items() if name not in ("task", "data", "threads")}
        about = json.dumps(
            [config, entry.space, SCAN, self.plan.data, self.plan.identity, *more], sort_keys=True, default=str
        )
        digest = hashlib.sha256(about.encode()).hexdigest()[:8]
        return f"{entry.name}, batch {entry.base.batch_size}, {phase} [{digest}]"

    def unfit(self) -> list[str]:
        """Return the cells without runs for which the study has runs of another task, or with other options."""
        storage, done = self.database.storage, (TrialState.COMPLETE,)
        with self.database.asked(reads=True):
            kept = [each for each in storage.get_all_studies() if storage.get_n_trials(each._study_id, done)]
        found = {each.study_name.partition(", tuning")[0] for each in kept}
        names = [queue.name.partition(", tuning")[0] for queue in self._tuning if not queue.kept]
        return [name for name in names if name in found]

    def tuning(self, number: int) -> list[Trial]:
        """Return the finished tuning runs of a cell."""
        return self._trials(self.plan.entries[number], self._tuning[number])

    def repeats(self, number: int) -> list[Trial]:
        """Return the finished repeats of a cell's best trials."""
        return self._trials(self.plan.entries[number], self._repeated[number])

    def _trials(self, entry: Entry, queue: Queue) -> list[Trial]:
        return list(self._numbered(entry, queue).values())

    def _numbered(self, entry: Entry, queue: Queue) -> dict[int, Trial]:
        results, made = queue.results(), self._made.setdefault(queue.name, {})
        try:
            for index, found in results.items():
                if index not in made or made[index][0] != found:
                    made[index] = found, trial_of(self._config(entry, queue.points[index]), found)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"--study {self.plan.study}: another version of bighorn has written a run of {queue.name} "
                f"({type(error).__name__}: {error}). Use that version, or give another name."
            ) from error
        return {index: made[index][1] for index in results}

    @staticmethod
    def _config(entry: Entry, point: dict[str, float]) -> RunConfig:
        return configured(entry.base, point, int(point.get("seed", TUNING_SEED)))

    def final(self, number: int) -> Queue | None:
        """Return the final runs of a cell whose options are chosen, None before; with a budget, of all cells.

        There are none if all trials diverged.
        """
        waited_for = range(len(self._tuning)) if self.plan.deadline is not None else [number]
        if self.is_open or not all(self._is_chosen(each, self.trials) for each in waited_for):
            return None
        return self._final_of(number)

    def _final_of(self, number: int) -> Queue | None:
        entry, queue = self.plan.entries[number], self._tuning[number]
        self._repeated[number].want(self._repeats(number))
        tuned = self.tuning(number)
        chosen = best_of(tuned, self.higher, self.repeats(number))
        index = [each.config for each in tuned].index(chosen.config)
        best = queue.points[index]
        name = self._name(entry, "final", best, self.plan.target)
        if name not in self._final and not self.database.ended:
            seeds = 0 if tuned[index].diverged else self.plan.most_seeds
            points = [best | {"seed": float(TUNING_SEED + 1 + index)} for index in range(seeds)]
            self._final[name] = self._queue(name, points, {**SEEDED, **entry.space})
        if name in self._final:
            self._final[name].extend(self.seeds)
        return self._final.get(name)

    def queues(self) -> Iterator[tuple[Entry, Queue, bool]]:
        """Yield the queues with work: trials, then repeats, then final runs, so that each cell gets the same seeds."""
        self.extend()
        for entry, queue in zip(self.plan.entries, self._tuning, strict=True):
            yield entry, queue, False
        for number, (entry, queue) in enumerate(zip(self.plan.entries, self._repeated, strict=True)):
            if not self.is_open and self._is_done(number, self.trials) and (again := self._repeats(number)):
                queue.want(again)
                queue.look()
                yield entry, queue, False
        finals = [(entry, self.final(number)) for number, entry in enumerate(self.plan.entries)]
        ready = [(entry, queue) for entry, queue in finals if queue is not None]
        for _, queue in ready:
            queue.look()
        for entry, queue in sorted(ready, key=lambda each: each[1].taken):
            yield entry, queue, True

    @property
    def total(self) -> int:
        """The number of all runs; with a deadline, as far as known."""
        self.extend()
        total = sum(self._counts())
        for number, count in enumerate(self._counts()):
            queue = self._final_of(number) if self._is_chosen(number, self.trials) else None
            is_done = self._is_done(number, self.trials)
            total += len(self._repeats(number)) if is_done else math.prod(repeats(count))
            total += self.seeds if queue is None else len(queue.wanted)
        return total

    def finished(self) -> dict[tuple[str, int], tuple[str, Trial]]:
        """Return the name of the optimizer and the result of all finished runs, by study and number of the run."""
        return {
            (queue.name, number): (entry.name, trial)
            for entry, queue, _ in self.queues()
            for number, trial in self._numbered(entry, queue).items()
        }

    @property
    def done(self) -> int:
        """The number of finished runs."""
        return sum(len(queue.results()) for _, queue, _ in self.queues())

    def release(self, ours: bool = False) -> None:
        """Queue the runs of dead processes again; with ``ours``, of all processes of this command, which are dead."""
        for _, queue, _ in self.queues():
            queue.release(self.plan.owner if ours else None)

    def _take(self) -> tuple[Entry, Queue, bool, int, int] | None:
        for entry, queue, final in self.queues():
            if (taken := queue.take(self.plan.owner)) is not None:
                return entry, queue, final, *taken
        return None

    def end(self) -> None:
        """Give up this command's runs in flight, and write nothing from now on: an error has ended the command."""
        with suppress(InputError):  # the disk may be full
            self.release(ours=True)
        self.database.ended = True

    def work(self, stepped: Callable[[], object] = lambda: None, done: Callable[[], object] = lambda: None) -> None:
        """Make runs until there are none; ``stepped`` is called after each step, and ``done`` after each run."""
        since = None  # the time of the first run, which loads and allocates, is not reported
        released = time.monotonic()
        while (taken := self._take()) is not None or self.done < self.total:
            if taken is None:  # other processes have the rest
                time.sleep(PAUSE)
                if time.monotonic() - released > storage.BEAT:
                    self.release()
                    released = time.monotonic()
                since = since and time.monotonic()
                continue
            entry, queue, final, index, claimed = taken
            config = self._config(entry, queue.points[index])
            task, split = (self.task, "test") if final else (self._held_out, "validation")
            try:
                with queue.beating(claimed):
                    looks = self.plan.evaluations if final else None
                    made = make(config, task, split, self.plan.target if final else None, stepped, looks)
            except BaseException:  # also Ctrl-C: the run is requeued
                with suppress(InputError):  # of a full disk: the error that has ended the run matters more
                    queue.drop(claimed)
                raise
            queue.finish(claimed, made.result(), made.value, since and time.monotonic() - since)
            since = time.monotonic()
            done()

    def cells(self) -> list[Cell]:
        """Return the cells that have final runs, with all known results."""
        self.extend()
        found, metric = [], self.task.metric
        for number, entry in enumerate(self.plan.entries):
            queue = self.final(number)
            finals = () if queue is None else tuple(self._trials(entry, queue))
            if finals:
                tuning, again = tuple(self.tuning(number)), tuple(self.repeats(number))
                tuned = tuple(sorted((trial.config.lr or 0.0, trial.value) for trial in averaged(tuning, again)))
                size, lr = entry.base.batch_size or 0, finals[0].config.lr or 0.0
                found.append(Cell(entry.name, size, tuned, lr, finals, tuning, metric, self.higher, entry.space, again))
        return found


def _again(points: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the points of all repeats that trials may have."""
    return [point | {"seed": float(REPEAT_SEED + 1 + index)} for point in points for index in range(MOST_REPEATS)]
