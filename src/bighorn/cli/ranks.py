"""The processes of a run: one alone, or those that torchrun started, on one machine or several."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bighorn.cli.errors import InputError

T = TypeVar("T")

KEPT: list[Any] = []
"""The process group, which must outlive the model: torch 2.13's DistributedDataParallel, if it holds the last
reference, waits with Python's lock for gloo's threads, and these may wait for the lock."""

PATIENCE = timedelta(seconds=10)
"""How long the other processes wait for the first one to tell of an error."""

FAREWELL = 46_368
"""The tag of a message that nobody sends."""


class ProcessLostError(InputError):
    """Another process of the run has stopped."""


@dataclass(frozen=True)
class Ranks:
    """Which process this is. All methods do nothing special for a process alone."""

    rank: int = 0
    size: int = 1

    @classmethod
    @contextmanager
    def join(cls) -> Iterator["Ranks"]:
        """Meet the other processes that torchrun started, if it did, and part from them at the end.

        An InputError within is one that all processes have (see :meth:`together`): the first alone tells of it.

        Raises:
            ProcessLostError: In the place of the error with which gloo ends a collective that a process has left.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield cls()
            return
        dist.init_process_group("gloo")
        KEPT.append(dist.group.WORLD)
        ranks = cls(dist.get_rank(), dist.get_world_size())
        try:
            yield ranks
        except InputError:
            if ranks.first or not _first_is_gone():
                raise
            raise SystemExit(1) from None
        except RuntimeError as error:
            if "gloo/" not in str(error):
                raise
            raise ProcessLostError(
                f"process {ranks.rank} of {ranks.size} stops, since another one has stopped; the output of that one "
                "says why."
            ) from error
        finally:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    @property
    def launcher(self) -> list[str]:
        """What starts as many processes, on the first machine: the words before ``bighorn``."""
        if self.size == 1:
            return []
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        machines = [] if here == self.size else ["--nnodes", str(self.size // here), "--node-rank", "0"]
        if machines:
            machines += ["--master-addr", os.environ["MASTER_ADDR"], "--master-port", os.environ["MASTER_PORT"]]
        return ["torchrun", *machines, "--nproc-per-node", str(here), "--no-python"]

    @property
    def machines(self) -> int:
        """How many machines the processes are on, each with as many as this one."""
        return 1 if self.size == 1 else self.size // int(os.environ["LOCAL_WORLD_SIZE"])

    def meet(self) -> None:
        """Wait until every process has come this far."""
        if self.size > 1:
            dist.barrier()

    def together(self, work: Callable[[], T]) -> T:
        """The result of work that every process does by itself; where it fails in one, it fails in all.

        Raises:
            InputError: In all processes, if the work raised an InputError or OSError in some.
        """
        result, failure = None, None
        try:
            result = work()
        except (InputError, OSError) as error:
            if self.size == 1:
                raise
            failure = str(error)
        failures = self.gather(failure)
        for rank, text in enumerate(failures):
            if text is not None:
                raise InputError(text if set(failures) == {text} else f"process {rank} of {self.size}: {text}")
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of work that the first process does, in all of them.

        Raises:
            InputError: In all processes, if the work raised an InputError or OSError.
        """
        result = [self.together(lambda: work() if self.first else None)]
        if self.size > 1:
            dist.broadcast_object_list(result, src=0)
        return result[0]  # type: ignore[return-value]

    def check_same(self, **values: object) -> None:
        """Refuse values that are not the same in all processes, as where two machines were given different options."""
        for name, value in values.items():
            everywhere = self.gather(value)
            differing = [rank for rank, other in enumerate(everywhere) if other != everywhere[0]]
            if differing:
                raise InputError(
                    f"process {differing[0]} of {self.size} has other {name.replace('_', ' ')} than process 0: give "
                    "every machine the same."
                )

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a float tensor over the processes, in its place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a float tensor over the processes, in its place."""
        return self.sum(values).div_(self.size)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.sum(torch.tensor(float(flag)))) if self.size > 1 else flag

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


ALONE = Ranks()


def _first_is_gone() -> bool:
    """Wait until the first process has told of the error: torchrun ends all as soon as one has ended."""
    start = time.monotonic()
    with suppress(RuntimeError):  # of a connection that was closed, or of the time that is over
        nothing = dist.irecv(torch.zeros(1), src=0, tag=FAREWELL)
        assert nothing is not None
        nothing.wait(PATIENCE)
    return time.monotonic() - start < PATIENCE.total_seconds()
