"""Processes that end in the middle of a save: test_kills.py runs `python save_kill_worker.py PLACE SEED KILLS`."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from bighorn_workbench import checkpoint
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.config import RunConfig
from bighorn_workbench.ranks import Ranks
from bighorn_workbench.run import Run


def fresh() -> Run:
    task = TASKS["digits"](None)
    return Run(RunConfig(threads=1, steps=2**17, schedule="constant").resolved(task), task, Ranks())


def save_next(run: Run, place: Path) -> None:
    """Save a run after one more step, with weights that identify the step."""
    run.train_step()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(run.step / 2**17)
    checkpoint.save(run, place)


def killed(run: Run, place: Path, delay: float) -> int:
    """Return the exit status of a process that saves repeatedly and is killed after `delay` seconds of processor time.

    On a busy machine, wall-clock time would end it before its first save.
    """
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process at any point, also in a write
            signal.setitimer(signal.ITIMER_PROF, delay)
            while True:
                save_next(run, place)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def checked(run: Run, place: Path) -> Run:
    """Resume the newest checkpoint, which is complete; remove the temporary file of the killed process."""
    loaded = checkpoint.load(place)
    restored = fresh()
    checkpoint.restore(restored, loaded)
    assert restored.step >= run.step, f"step {restored.step} of a run that was saved in step {run.step}"
    values = {2**17 * value for parameter in restored.model.parameters() for value in parameter.flatten().tolist()}
    assert values == {float(restored.step)}, f"the weights of step {restored.step} are those of {values}"
    for path in place.parent.glob(".bighorn-*.partial"):
        path.unlink()
    save_next(restored, place)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    return restored


def main() -> None:
    place, generator, kills = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    torch.set_num_threads(1)
    run = fresh()
    save_next(run, place)
    began = time.process_time()
    save_next(run, place)
    seconds = time.process_time() - began
    kill = left = 0
    while kill < kills or (left == 0 and kill < 10 * kills):
        delay = generator.uniform(0, 3 * seconds)
        status = killed(run, place, max(delay, 1e-4))
        assert status == signal.SIGPROF, f"kill {kill} after {delay} s: the process ended with status {status}"
        left += sum("partial" in path.name for path in place.parent.iterdir())
        run = checked(run, place)
        kill += 1
    print(f"{left} of {kill} kills were within a save")


if __name__ == "__main__":
    main()
