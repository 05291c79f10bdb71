"""The stepping thread, which has a number of threads of its own, and which Ctrl-C does not interrupt."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from bighorn._kernels import cores

T = TypeVar("T")
NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


class Worker:
    """One thread that runs functions in order, with a number of threads of its own for arithmetic.

    A signal such as Ctrl-C never interrupts a function, since Python runs signal handlers in the main thread only.

    Args:
        device: The device whose NUMA node the thread runs on, if there are several nodes.
    """

    def __init__(self, device: torch.device) -> None:
        self.threads, self.reason = team()
        self.cpus = near(device)
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(1, "bighorn-offload", _settle, (self.threads, self.cpus))
        before = torch.get_num_threads()
        self.run(int)
        # `_settle` sets the number of one thread, but torch gives the last one that was set to all later threads too.
        torch.set_num_threads(before)

    def run(self, function: Callable[[], T]) -> T:
        """Call a function after those that were given before; Ctrl-C is raised when the call has ended."""
        future = self._pool.submit(function)
        try:
            return future.result()
        except BaseException:
            wait([future])
            raise

    def check_process(self) -> None:
        """Raise in a process that was forked, which has no stepping thread.

        Raises:
            RuntimeError: This is not the process that made the thread.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the optimizer was offloaded in process {self._process}, and this fork has no thread that steps: make "
                "model and optimizer in the process that trains"
            )


def _settle(threads: int, cpus: set[int]) -> None:
    torch.get_num_threads()  # makes torch set the common number now, and not later
    torch.set_num_threads(threads)
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def team() -> tuple[int, str]:
    """Return the number of threads for arithmetic on the host, and the reason for it.

    Raises:
        ValueError: An environment variable is not a number.
    """
    if asked := os.environ.get("BIGHORN_NUM_THREADS"):
        return _number("BIGHORN_NUM_THREADS", asked), "BIGHORN_NUM_THREADS"
    available, processes = cores(), _number("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes == 1:
        return available, f"all {available} cores"
    return max(1, available // processes), f"a share of {available} cores for each of {processes} processes"


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
