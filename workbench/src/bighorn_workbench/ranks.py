"""The processes of a run: a single one, or several from torchrun, on one or more machines; and Ctrl-C."""

import gc
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions keep the group that there is when they are defined (torch 2.13)
from torch import Tensor

from bighorn_workbench.errors import InputError, causes

T = TypeVar("T")

ECHO = 5.0
"""Seconds after a Ctrl-C in which torchrun passes it on to processes that the terminal has already interrupted."""

PATIENCE = timedelta(seconds=10)
"""The time that the other processes wait for the first one to print an error."""

FAREWELL = 46_368
"""The tag of a message that is never sent."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and collectives that a single process skips."""

    rank: int = 0
    size: int = 1

    @classmethod
    @contextmanager
    def join(cls) -> Iterator["Ranks"]:
        """Join the process group if torchrun started this process, and destroy the group at the end.

        All processes raise the same InputError (see :meth:`together`), and only the first prints it.

        Raises:
            InputError: A collective failed because a process has ended; raised instead of gloo's error.
        """
        if world_size() == 1:
            yield cls()
            return
        try:
            dist.init_process_group("gloo")
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"the processes cannot meet: {' '.join(str(error).split())}. Check RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT in the environment, which torchrun sets, or start one process without them."
            ) from error
        ranks = cls(dist.get_rank(), dist.get_world_size())
        try:
            with _without_frames():
                yield ranks
        except InputError:
            if ranks.first or not _first_is_gone():
                raise
            raise SystemExit(1) from None
        except RuntimeError as error:
            if "gloo/" not in str(error):
                raise
            raise InputError(
                f"process {ranks.rank} of {ranks.size} stops, since another one has stopped; the output of that one "
                "says why."
            ) from error
        finally:
            end_process_group()

    @property
    def first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    @property
    def launcher(self) -> list[str]:
        """The words before ``bighorn`` in a command that starts the same processes, on the first machine."""
        if self.size == 1:
            return []
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        machines = [] if local_size == self.size else ["--nnodes", str(self.size // local_size), "--node-rank", "0"]
        if machines:
            machines += ["--master-addr", os.environ["MASTER_ADDR"], "--master-port", os.environ["MASTER_PORT"]]
        return ["torchrun", *machines, "--nproc-per-node", str(local_size), "--no-python"]

    @property
    def machines(self) -> int:
        """The number of machines, which have the same number of processes each."""
        return 1 if self.size == 1 else self.size // int(os.environ["LOCAL_WORLD_SIZE"])

    def meet(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of work that every process does independently; if it fails in one process, it fails in all.

        Raises:
            InputError: In all processes, if the work raised an InputError or OSError in some.
        """
        if self.size == 1:
            return work()
        result, failure = None, None
        try:
            result = work()
        except (InputError, OSError) as error:
            failure = str(error)
        failures = self.gather(failure)
        for rank, text in enumerate(failures):
            if text is not None:
                raise InputError(text if set(failures) == {text} else f"process {rank} of {self.size}: {text}")
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], T]) -> T:
        """Return, in all processes, the result of work of the first process.

        Raises:
            InputError: In all processes, if the work raised an InputError or OSError.
        """
        result = [self.together(lambda: work() if self.first else None)]
        if self.size > 1:
            dist.broadcast_object_list(result, src=0)
        return result[0]  # type: ignore[return-value]

    def check_same(self, **values: object) -> None:
        """Raise an error for values that differ between processes, such as the options of two machines."""
        for name, value in values.items():
            everywhere = self.gather(value)
            differing = [rank for rank, other in enumerate(everywhere) if other != everywhere[0]]
            if differing:
                raise InputError(
                    f"process {differing[0]} of {self.size} has other {name.replace('_', ' ')} than process 0: give "
                    "every machine the same."
                )

    def mean(self, values: Tensor) -> Tensor:
        """Average a float tensor over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values.div_(self.size)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.mean(torch.tensor(float(flag))))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


ALONE = Ranks()

RELEASE_SECONDS = 0.1
"""Time for gloo's threads to release the tensors of the last collectives."""


def end_process_group() -> None:
    """Destroy the process group, if there is one. Call it after the functions that made models have returned.

    A worker thread of gloo releases the tensors of its last collectives. If one of these releases drops the last
    reference to a Python tensor, the thread needs Python's lock, and a thread that requests the lock while the
    interpreter ends is terminated: the process aborts with "terminate called without an active exception" (torch 2.13;
    8 of 50 processes with DistributedDataParallel and AdamW, although they called ``destroy_process_group``). Models
    hold the group in reference cycles, so the group's threads end before the interpreter does only if these cycles are
    collected first. Without ``gc.collect()`` 3 of 40 such processes aborted, with it none.

    The group itself is released last: DistributedDataParallel would wait for gloo's threads with Python's lock held. In
    torch 2.7 so does the release of the group, which then waits forever for a thread that needs the lock; the threads
    have it while this one sleeps.
    """
    if dist.is_initialized():
        group = dist.group.WORLD
        gc.collect()
        dist.destroy_process_group()
        time.sleep(RELEASE_SECONDS)
        del group


def world_size() -> int:
    """Return the number of processes that torchrun has started, or 1."""
    if "WORLD_SIZE" not in os.environ:
        return 1
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name, "1" if os.environ["WORLD_SIZE"] == "1" else "")
        if not re.fullmatch(r"[1-9]\d{0,8}", text):
            raise InputError(
                f"{name}={text!r} in the environment must be a number of processes, at least 1. Start several with "
                "torchrun, or unset WORLD_SIZE."
            )
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def _without_frames() -> Iterator[None]:
    """Clear the frames of an error and of its causes, whose variables refer to the model."""
    try:
        yield
    except BaseException as error:
        for cause in causes(error):
            traceback.clear_frames(cause.__traceback__)
        raise


def _first_is_gone() -> bool:
    """Wait until the first process has printed the error, since torchrun ends all processes when one has ended."""
    start = time.monotonic()
    with suppress(RuntimeError):  # the connection was closed, or the time has expired
        nothing = dist.irecv(torch.zeros(1), src=0, tag=FAREWELL)
        assert nothing is not None
        nothing.wait(PATIENCE)
    return time.monotonic() - start < PATIENCE.total_seconds()


class Aborted(KeyboardInterrupt):
    """A second Ctrl-C, which may come at any moment; any other KeyboardInterrupt comes from the user's code."""


class Interrupt:
    """Within its ``with`` block, a first Ctrl-C only sets :attr:`requested`; a second one aborts.

    SIGTERM counts as a first one, however often it comes: torchrun sends it after passing a Ctrl-C on.

    An interrupt inside an optimizer's step would leave half of the parameters updated.

    Args:
        echoes: Whether torchrun has started the process.
    """

    def __init__(self, echoes: bool = False) -> None:
        self.requested = False
        self._echo = ECHO if echoes else 0.0
        self._since = 0.0

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        if self.requested and self._echo:
            return  # torchrun can still pass the Ctrl-C on while the run is saved
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signal's signature
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
        elif number == signal.SIGINT and now - self._since >= self._echo:
            raise Aborted
