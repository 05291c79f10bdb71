"""The runs of one phase of a comparison, which wait in the study until a process claims them."""

import hashlib
import json
import statistics
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from bighorn_workbench import storage
from bighorn_workbench.errors import InputError
from bighorn_workbench.space import Space
from bighorn_workbench.storage import Database

MOST_KEPT = 1000
"""Runs of a study that are used although fewer are requested; a file may hold any number."""

RECORD = "record"
"""The key of a run's record, with which the run is finished."""


class Queue:
    """The runs of one phase of a cell: a study of Optuna, one trial for each run.

    All answers are of the last :meth:`look`.

    Args:
        database: The storage.
        name: The name of the study, which differs if results would.
        higher: Whether a larger value is better.
        points: The options of each run.
        space: What is searched.
    """

    def __init__(
        self, database: Database, name: str, higher: bool, points: list[dict[str, float]], space: Space
    ) -> None:
        self.database, self.name, self.points, self._space = database, name, points, space
        self.wanted: set[int] = set()
        """The runs to make, by their numbers."""
        self._fingerprints: dict[int, str] = {}
        self.study = database.study(name, higher)
        self.look()

    def look(self) -> None:
        """Read the trials, unless all runs are done."""
        if self.wanted and self.is_done:
            return
        with self.database.asked(reads=True):
            self._trials = self.study.get_trials(deepcopy=False)

    def fill(self) -> None:
        """Queue every run that is neither queued nor running nor finished."""
        if self.database.ended:
            return
        self.look()
        existing = {self._number(trial) for trial in self._trials if not _is_lost(trial)}
        missing = sorted(self.wanted - existing)
        for index in missing:
            about = {"run": index, "fingerprint": self._fingerprint(index)}
            point = self.points[index]
            spans: dict[str, BaseDistribution] = {name: self._span(name, value) for name, value in point.items()}
            with self.database.asked():
                self.study.add_trial(
                    create_trial(state=TrialState.WAITING, params=point, distributions=spans, user_attrs=about)
                )
        if missing:
            self.look()

    def _span(self, name: str, value: float) -> FloatDistribution:
        low, high = self._space.get(name, (value, value))
        return FloatDistribution(min(low, value), max(high, value), log=low > 0)

    def _fingerprint(self, index: int) -> str:
        """Return a digest of all that decides a run's result."""
        if index not in self._fingerprints:
            about = json.dumps([self.name, self.points[index]], sort_keys=True)
            self._fingerprints[index] = hashlib.sha256(about.encode()).hexdigest()[:16]
        return self._fingerprints[index]

    def _number(self, trial: FrozenTrial) -> int | None:
        """Return the number of a trial's run; None for a trial of another program, and for another run's."""
        index = trial.user_attrs.get("run")
        if not isinstance(index, int) or not 0 <= index < len(self.points):
            return None
        return index if trial.user_attrs.get("fingerprint") == self._fingerprint(index) else None

    def extend(self, count: int) -> None:
        """Queue the first runs, up to a number in all, one for each point at most."""
        self.want(range(min(count, len(self.points))))

    def want(self, numbers: Iterable[int]) -> None:
        """Let these be the runs, and queue those that are not."""
        if (wanted := set(numbers)) != self.wanted:
            self.wanted = wanted
            self.fill()

    @property
    def kept(self) -> int:
        """The smallest number of first runs that includes all finished ones."""
        finished = [trial.user_attrs.get("run") for trial in self._trials if _is_finished(trial)]
        return max((index + 1 for index in finished if isinstance(index, int) and index < MOST_KEPT), default=0)

    @property
    def taken(self) -> int:
        """The runs that a process has claimed or finished."""
        claimed = {self._number(trial) for trial in self._trials if not _is_lost(trial) and not _waits(trial)}
        return len(claimed & self.wanted)

    def take(self, owner: str) -> tuple[int, int] | None:
        """Claim a run that waits, and return its number and its trial's id; None if none waits.

        Of several trials of a run, which processes may have queued at the same time, the first one alone is made: who
        sees a trial sees those with lower numbers.

        Args:
            owner: The name of the command, which :meth:`release` takes.
        """
        begun: set[int | None] = {None}
        for trial in self._trials:
            index = self._number(trial)
            if index in begun or _is_lost(trial):
                continue
            begun.add(index)
            if index is not None and index in self.wanted and _waits(trial) and self._claim(trial._trial_id, owner):
                return index, trial._trial_id
        return None

    def _claim(self, identifier: int, owner: str) -> bool:
        """Claim a trial; return whether no other process was faster."""
        backend = self.database.storage
        try:
            with self.database.asked():
                backend.record_heartbeat(identifier)  # Optuna never takes a trial without one for dead
                if not backend.set_trial_state_values(identifier, TrialState.RUNNING):
                    return False
                backend.set_trial_user_attr(identifier, "owner", owner)
        except UpdateFinishedTrialError:
            return False
        return True

    def finish(self, identifier: int, result: dict[str, Any], value: float, took: float | None) -> None:
        """Record the result of a claimed run; nothing, if it counts as dead and another process makes it again."""
        with suppress(UpdateFinishedTrialError), self.database.asked():
            self.database.storage.set_trial_user_attr(identifier, RECORD, {"trial": result, "took": took})
            self.database.storage.set_trial_state_values(identifier, TrialState.COMPLETE, [value])

    def drop(self, identifier: int) -> None:
        """Give up a claimed run."""
        with suppress(UpdateFinishedTrialError), self.database.asked():
            self.database.storage.set_trial_state_values(identifier, TrialState.FAIL)

    @contextmanager
    def beating(self, identifier: int) -> Iterator[None]:
        """Record heartbeats of a claimed run."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(storage.BEAT):
                with suppress(InputError), self.database.asked():  # a full disk may have space at the next one
                    self.database.storage.record_heartbeat(identifier)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def release(self, owner: str | None = None) -> None:
        """Queue the runs of dead processes again: those without heartbeats, and the ones of an owner."""
        self.database.fail_stale(self.study)
        self.look()
        for trial in self._trials:
            if owner is not None and trial.state == TrialState.RUNNING and trial.user_attrs.get("owner") == owner:
                self.drop(trial._trial_id)
        self.fill()

    def _finished(self) -> dict[int, dict[str, Any]]:
        """Return the records of finished runs by their number; each counts once."""
        found = [(self._number(trial), trial.user_attrs.get(RECORD)) for trial in self._trials if _is_finished(trial)]
        records = {index: record for index, record in reversed(found) if index is not None and index in self.wanted}
        return {index: records[index] if isinstance(records[index], dict) else {} for index in sorted(records)}

    def missing(self, numbers: Iterable[int]) -> int:
        """Return how many runs have not finished, also of some that were not queued."""
        return len(set(numbers) - {self._number(trial) for trial in self._trials if _is_finished(trial)})

    def results(self) -> dict[int, dict[str, Any]]:
        """Return the known results, by the number of the run."""
        return {index: record.get("trial", {}) for index, record in self._finished().items()}

    @property
    def is_done(self) -> bool:
        """Whether all runs are done."""
        return len(self._finished()) == len(self.wanted)

    def seconds(self) -> float | None:
        """Return the mean time of a run, with what comes between two of them; None before any is known."""
        found = [each["took"] for each in self._finished().values() if isinstance(each.get("took"), float)]
        return statistics.fmean(found) if found else None


def _waits(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.WAITING


def _is_finished(trial: FrozenTrial) -> bool:
    """Whether a run has a record: its process may have been killed, or taken for dead, right after that."""
    return trial.state == TrialState.COMPLETE or RECORD in trial.user_attrs


def _is_lost(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.FAIL and not _is_finished(trial)
