"""Tests on several ranks, in processes that are reused from test to test."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config

from tests.support.processes import FORKS, LIMIT

GRACE = 5
"""Seconds that ranks have to finish after one has failed: they may wait for it in a collective."""

BODIES: dict[tuple[str, str], Callable[..., object]] = {}
"""The functions that `ranks` decorates, by module and name."""

SetUp: TypeAlias = tuple[Any, ...]
"""A function that each process calls before its first test, and its leading arguments."""

POOLS: dict[tuple[int, SetUp], Pool] = {}


class Call(NamedTuple):
    """A call of a test's body on a rank, with the warning filters of the test."""

    module: str
    name: str
    values: dict[str, Any]
    filters: list[Any]


class Failure(NamedTuple):
    """A traceback, or the reason of a skip."""

    text: str
    skips: bool = False


def join_gloo(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)


GLOO: SetUp = (join_gloo,)


def ranks(
    world: int | Callable[..., int], *worlds: int, set_up: Callable[..., SetUp] = lambda **_: GLOO
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Return a decorator for a function that runs on each of `world` ranks, a number or a function of its arguments.

    With several numbers, pytest runs a test once with each. The arguments are pickled, so they are names, numbers and
    paths rather than models. `set_up` is a function of the arguments, too. The test fails with the traceback of each
    rank that fails, and skips if a rank skips.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        BODIES[body.__module__, body.__qualname__] = body
        signature = inspect.signature(body)

        @functools.wraps(body)
        def on_all_ranks(*args: Any, **kwargs: Any) -> None:
            given = kwargs.pop("world") if worlds else world
            values = dict(signature.bind(*args, **kwargs).arguments)
            count = given(**values) if callable(given) else given
            call_on_ranks(body, values, count, set_up(**values))

        if not worlds:
            return on_all_ranks
        count = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
        every = [*signature.parameters.values(), count]
        on_all_ranks.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
        for_each: Callable[..., None] = pytest.mark.parametrize("world", [world, *worlds])(on_all_ranks)
        return for_each

    return decorate


def call_on_ranks(body: Callable[..., object], values: dict[str, Any], world: int, set_up: SetUp) -> None:
    """Call a function of a module on each rank, and fail or skip if a rank does."""
    call = Call(body.__module__, body.__qualname__, values, list(warnings.filters))
    with pool(world, set_up) as processes:
        failures = processes.run(call)
        told = "\n".join(f"rank {rank}: {failure.text}" for rank, failure in sorted(failures.items()))
        if not all(failure.skips for failure in failures.values()):
            pytest.fail(told, pytrace=False)
    if told:
        pytest.skip(told)


@contextmanager
def pool(world: int, set_up: SetUp) -> Iterator[Pool]:
    """Lend the processes of `world` ranks, and end them after an error; two pools of several ranks are kept."""
    processes = POOLS.pop((world, set_up), None) or Pool(world, set_up)
    try:
        yield processes
    except BaseException:
        processes.end()
        raise
    POOLS[world, set_up] = processes
    several = [key for key in POOLS if key[0] > 1]
    if len(several) > 2:
        POOLS.pop(several[0]).end()


class Pool:
    """Processes that were set up together. They end with their parent process."""

    def __init__(self, world: int, set_up: SetUp) -> None:
        self.folder = tempfile.TemporaryDirectory()
        atexit.register(self.end)
        pipes = [FORKS.Pipe() for _ in range(world)]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            FORKS.Process(target=serve, args=(rank, world, set_up, Path(self.folder.name), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, call: Call) -> dict[int, Failure]:
        """Run a call on all ranks, and return their failures; a rank that waits too long prints its stack."""
        failures: dict[int, Failure] = {}
        for connection in self.connections:
            connection.send(call)
        waiting = set(range(len(self.connections)))
        ends_at = time.monotonic() + LIMIT
        while waiting and wait([self.connections[rank] for rank in waiting], max(0, ends_at - time.monotonic())):
            for rank in [rank for rank in waiting if self.connections[rank].poll()]:
                waiting.remove(rank)
                failure = self.answer(rank)
                if failure is not None:
                    failures[rank] = failure
                    ends_at = min(ends_at, time.monotonic() + GRACE)
        for rank in waiting:
            os.kill(self.processes[rank].pid or 0, signal.SIGABRT)
        for rank in waiting:
            self.processes[rank].join(GRACE)
            failures[rank] = Failure(f"waits\n{self.written(rank)}")
        return failures

    def answer(self, rank: int) -> Failure | None:
        try:
            failure: Failure | None = self.connections[rank].recv()
        except EOFError:
            self.processes[rank].join(GRACE)
            return Failure(f"ended with {self.processes[rank].exitcode}\n{self.written(rank)}")
        return failure

    def written(self, rank: int) -> str:
        return (Path(self.folder.name) / f"errors-{rank}").read_text()

    def end(self) -> None:
        atexit.unregister(self.end)
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def serve(rank: int, world: int, set_up: SetUp, folder: Path, connection: Connection[Failure | None, Call]) -> None:
    """Run calls until the connection ends."""
    gc.freeze()
    errors = os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(errors, descriptor)
    faulthandler.enable()  # an aborted process prints its stack
    install_importhook(get_config())  # an assertion shows its values
    function, *arguments = set_up
    function(*arguments, rank=rank, world=world, store=f"file://{folder / 'store'}")
    while True:
        try:
            call = connection.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # destroying the process group would wait for other ranks
        connection.send(result(call))


def result(call: Call) -> Failure | None:
    """Run a call as pytest runs a test, and return its failure."""
    with warnings.catch_warnings():
        warnings.filters[:] = call.filters  # type: ignore[index]
        torch.default_generator.manual_seed(0)
        torch.set_num_threads(1)
        try:
            module = importlib.import_module(call.module)
            body = BODIES.get((call.module, call.name)) or getattr(module, call.name)
            body(**call.values)
        except pytest.skip.Exception as skip:
            return Failure(str(skip.msg), skips=True)
        except (Exception, pytest.fail.Exception):
            return Failure(traceback.format_exc())
    return None
