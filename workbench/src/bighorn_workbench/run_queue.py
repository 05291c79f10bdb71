"""The runs of one phase of a comparison, which wait in Optuna's storage until a process takes them."""

import os
import platform
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from bighorn_workbench.errors import InputError
from bighorn_workbench.records import fits
from bighorn_workbench.space import Space

BEAT, GRACE = 10.0, 60.0
"""Seconds between heartbeats of a run, and without one until its process counts as dead.

Optuna has such heartbeats for databases alone. SQLite's locks do not hold on every file system that machines share.
"""

PROCESSES = Path("/proc")
"""On Linux, a folder with one entry for each process of the machine."""

MOST_KEPT = 1000
"""Runs of a study that are used although fewer are requested; a file may hold any number."""

DONE = (TrialState.COMPLETE,)


class Queue:
    """The runs of one phase of a cell: a study of Optuna, whose trials wait until a process takes them."""

    def __init__(self, study: optuna.Study, points: list[dict[str, float]], space: Space) -> None:
        self.study, self.points, self._space, self.count = study, points, space, 0

    def fill(self) -> None:
        """Queue every run that is neither queued nor running nor done."""
        known = {_number(trial) for trial in self.study.trials if trial.state != TrialState.FAIL}
        for index, point in enumerate(self.points[: self.count]):
            if index not in known:
                self.study.enqueue_trial(point, user_attrs={"run": index})

    def extend(self, count: int) -> None:
        """Queue more runs, up to a number in all, one for each point at most."""
        if min(count, len(self.points)) > self.count:
            self.count = min(count, len(self.points))
            self.fill()

    @property
    def taken(self) -> int:
        """The runs that a process has taken or finished."""
        trials = self.study.get_trials(deepcopy=False, states=(*DONE, TrialState.RUNNING))
        return len({number for trial in trials if (number := _number(trial)) is not None and number < self.count})

    def take(self) -> tuple[int, optuna.Trial] | None:
        """Return the number of a waiting run and its trial, which is now this process's; None if none waits."""
        while self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            trial = self.study.ask()
            index = _number(trial)
            if index is not None and index < self.count and not self._is_taken(index, trial.number):
                _beat(trial)
                for name, (low, high) in self._space.items():
                    trial.suggest_float(name, low, high, log=low > 0)
                return index, trial
            self.study.tell(trial, state=TrialState.FAIL)  # another process was faster
        return None

    def _is_taken(self, index: int, number: int) -> bool:
        """Whether a run is done, or another trial than this one is making it."""
        others = self.study.get_trials(deepcopy=False, states=(*DONE, TrialState.RUNNING))
        return any(_number(trial) == index and trial.number != number for trial in others)

    def _done(self) -> dict[int, FrozenTrial]:
        """Return the finished trials, by the number of the run; each counts once."""
        done = self.study.get_trials(deepcopy=False, states=DONE)
        found = {index: trial for trial in reversed(done) if (index := _number(trial)) is not None}
        return {index: found[index] for index in sorted(found) if 0 <= index < self.count}

    def results(self) -> dict[int, dict[str, Any]]:
        """Return the known results, by the number of the run."""
        return {index: trial.user_attrs.get("result", {}) for index, trial in self._done().items()}

    @property
    def is_done(self) -> bool:
        """Whether all runs are done."""
        return len(self.results()) == self.count

    def seconds(self) -> float | None:
        """Return the mean time of a run, with what comes between two of them; None before any is known."""
        known = [trial.user_attrs.get("took") for trial in self._done().values()]
        found = [seconds for seconds in known if isinstance(seconds, float)]
        return statistics.fmean(found) if found else None

    def release(self) -> None:
        """Requeue the runs of dead processes."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if is_dead(trial):
                self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        self.fill()


def finished(study: optuna.Study) -> int:
    """Return the smallest number of first runs of a study that includes all finished ones."""
    done = study.get_trials(deepcopy=False, states=DONE)
    known = [index for trial in done if (index := _number(trial)) is not None and index < MOST_KEPT]
    return max(known, default=-1) + 1


def _number(trial: FrozenTrial | optuna.Trial) -> int | None:
    """Return the number of a trial's run; None for one that another program has added to the study."""
    found = trial.user_attrs.get("run")
    return found if isinstance(found, int) else None


def _beat(trial: optuna.Trial) -> None:
    """Record a heartbeat of a run, with its process."""
    trial.set_user_attr("beat", [platform.node(), os.getpid(), time.time()])


@contextmanager
def beating(trial: optuna.Trial) -> Iterator[None]:
    """Record a heartbeat every :data:`BEAT` seconds."""
    over = threading.Event()

    def beat() -> None:
        with suppress(UpdateFinishedTrialError):
            while not over.wait(BEAT):
                with suppress(InputError):  # a disk that is full may have space at the next one
                    _beat(trial)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def is_dead(trial: FrozenTrial) -> bool:
    """Whether the process of a running trial has gone from this machine, or has had no heartbeat for too long."""
    begun = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    beat = trial.user_attrs.get("beat", ["", 0, begun])
    if not (isinstance(beat, list) and len(beat) == 3 and fits(beat[1], int) and fits(beat[2], float)):
        return True
    machine, pid, last = beat
    if machine == platform.node() and PROCESSES.exists() and not _runs(pid):
        return True
    return bool(time.time() - last > GRACE)


def _runs(pid: int) -> bool:
    """Whether a process of this machine exists and has not ended; a zombie has."""
    try:
        state = (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
