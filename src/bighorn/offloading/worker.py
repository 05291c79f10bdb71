"""The stepping thread: it waits for gradients and steps, while the thread of the training loop continues."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from bighorn.kernels import cores

T = TypeVar("T")
NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


class Latch:
    """An event that the stepping thread sets once.

    threading.Event does not serve: a KeyboardInterrupt in its wait() can leave the lock held that set() needs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_set = False

    def set(self) -> None:
        """Release every thread that waits now or later."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self) -> None:
        """Wait until the latch is set."""
        if not self._is_set:
            with self._lock:
                pass


class Job(Generic[T]):
    """A function that the stepping thread calls, and its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._claims: dict[str, str] = {}
        self._ended = Latch()
        self._value: T
        self._error: BaseException | None = None

    def _claim(self, by: str) -> bool:
        """Whether this thread decides about the job: one atomic operation, which gives the same result if repeated."""
        return self._claims.setdefault("by", by) == by

    def run(self) -> None:
        """Call the function, unless the job was cancelled, and keep its value or its error."""
        if not self._claim("stepping thread"):
            return
        assert self._function is not None
        try:
            self._value = self._function()
        except BaseException as error:  # the thread that asks for the result raises it
            self._error = error
        self._function = None  # its references end with it
        self._ended.set()

    def cancel(self) -> bool:
        """Return whether the job has not begun and never will."""
        return self._claim("training loop")

    def wait(self) -> None:
        """Wait for the end, also after Ctrl-C, which is raised when the job has ended."""
        try:
            self._ended.wait()
        except BaseException:
            self._ended.wait()
            raise

    def result(self) -> T:
        """Wait, and return the value or raise the error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Worker:
    """One thread that runs jobs in order, with a number of threads of its own for arithmetic.

    A signal such as Ctrl-C never interrupts a job, since Python runs signal handlers in the main thread only.

    Args:
        device: The device whose NUMA node the thread runs on, if there are several nodes.
    """

    def __init__(self, device: torch.device) -> None:
        self.threads, self.reason = team()
        self.cpus = near(device)
        self._process = os.getpid()
        self.jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self.jobs,), name="bighorn-offload", daemon=True)
        self.thread.start()
        self.close = weakref.finalize(self, _end, self.jobs, self.thread)
        before = torch.get_num_threads()
        self.submit(self._settle).result()
        # The number above holds for one thread, but torch gives the last one that was set to all later threads too.
        torch.set_num_threads(before)

    def submit(self, function: Callable[[], T]) -> Job[T]:
        """Run a function after those that were submitted before."""
        job = Job(function)
        self.jobs.put(job)
        return job

    def check_process(self) -> None:
        """Raise in a process that was forked, which has no stepping thread.

        Raises:
            RuntimeError: This is not the process that made the thread.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the optimizer was offloaded in process {self._process}, and this fork has no thread that steps: make "
                "model and optimizer in the process that trains, and call synchronize() before a fork"
            )

    def _settle(self) -> None:
        torch.get_num_threads()  # makes torch set the common number now, and not later
        torch.set_num_threads(self.threads)
        if self.cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cpus)


def _serve(jobs: queue.SimpleQueue[Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job


def _end(jobs: queue.SimpleQueue[Job[Any] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


def team() -> tuple[int, str]:
    """Return the number of threads for arithmetic on the host, and the reason for it.

    Raises:
        ValueError: An environment variable is not a number.
    """
    if asked := os.environ.get("BIGHORN_NUM_THREADS"):
        return _number("BIGHORN_NUM_THREADS", asked), "BIGHORN_NUM_THREADS"
    here, processes = cores(), _number("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes == 1:
        return here, f"all {here} cores"
    return max(1, here // processes), f"a share of {here} cores for each of {processes} processes"


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 1024:
        raise ValueError(f"{name}={value!r} in the environment must be a number, 1 to 1024")
    return int(value)


def near(device: torch.device, nodes: Path = NODES, pci: Path = PCI) -> set[int]:
    """Return the CPUs of the NUMA node that a GPU is attached to, of those this process may use; empty if unknown."""
    try:
        if device.type != "cuda" or len(list(nodes.glob("node[0-9]*"))) < 2:
            return set()
        properties: Any = torch.cuda.get_device_properties(device)
        where = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((pci / where / "numa_node").read_text())
        ranges = (nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
        cpus = {cpu for each in ranges for cpu in range(int(each.split("-")[0]), int(each.split("-")[-1]) + 1)}
        return cpus & os.sched_getaffinity(0)
    except (OSError, ValueError, AttributeError):  # a container without /sys, or a torch without the PCI numbers
        return set()
