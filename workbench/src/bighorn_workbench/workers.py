"""The processes of ``bighorn compare``, which share the runs of a search."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import torch

from bighorn_workbench.builtin_tasks import fingerprint, load
from bighorn_workbench.environment import cores
from bighorn_workbench.errors import InputError
from bighorn_workbench.search import Plan, Search

LOOK = 0.3
"""Seconds between two looks for results of other processes."""

MOST_KILLS = 3


def fill(search: Search, processes: int, look: Callable[[], object]) -> None:
    """Make all runs, ``processes`` at a time; ``look`` is called whenever some may be finished.

    Raises:
        InputError: A run has failed, or processes were killed again and again.
    """
    search.release()
    if processes == 1:
        search.work(done=look)
        return
    before, kills = -1, 0
    while search.done < search.total:
        kills = kills + 1 if search.done == before else 0
        if kills == MOST_KILLS:
            raise InputError(
                f"the processes of the runs were killed {kills} times without one result: for memory, then take fewer "
                "--processes, or by code of the task that ends its process, such as os._exit(), then take that out."
            )
        before = search.done
        context = multiprocessing.get_context("spawn")
        # Interrupts are left to this process.
        with ProcessPoolExecutor(processes, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            working = {pool.submit(worker, search.plan, os.getpid(), number) for number in range(processes)}
            try:
                while working:
                    done, working = wait(working, timeout=LOOK, return_when=FIRST_EXCEPTION)
                    look()
                    for future in done:
                        future.result()
            except BrokenProcessPool:
                pass
            except BaseException:  # also Ctrl-C: the running processes are not waited for
                for process in (pool._processes or {}).values():  # Python 3.14 has kill_workers()
                    process.kill()
                raise
        search.release(ours=True)
        look()


def places(device: str) -> int:
    """Return how many runs have a processor or a device of their own; a device with a number is one."""
    place = torch.device(device)
    if place.type == "cpu":
        return cores()
    return 1 if place.index is not None else int(torch.get_device_module(place).device_count())


def worker(plan: Plan, parent: int, number: int) -> None:
    """Work in a process of its own until there is nothing left, or its parent is gone.

    Where there are several devices, the one with this number, counted around, is the current one.
    """

    def stepped() -> None:
        if os.getppid() != parent:
            os._exit(1)  # the run waits again when the command is repeated

    base = plan.entries[0].base
    if (count := places(base.device)) > 1 and base.device != "cpu":
        torch.get_device_module(torch.device(base.device)).set_device(number % count)
    task = load(base.task, base.data)
    if fingerprint(task) != plan.data:
        raise InputError(
            f"--task {base.task} has other training data in each process, so that its runs cannot be compared. Seed "
            "what draws them, as in random_state=0 of a split, or give --processes 1."
        )
    Search(plan, task, leads=False).work(stepped)
