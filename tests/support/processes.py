"""Processes that work together, each with a time limit: none waits for another one forever.

Each is forked from a process that has imported torch and bighorn, because imports take seconds.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

LIMIT = 250
"""Seconds that a process may take; on a busy machine, importing torch alone takes one minute."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
VARIABLES = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
"""The environment of torchrun, whose processes import `tests`."""

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = [
    "bighorn",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
]
"""What a new process has imported; tests of the workbench add to it before the first process starts."""
FORKS.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Outcome:
    """The exit code of a process, and its output on stdout and stderr."""

    code: int
    output: str
    errors: str


def outcomes(
    program: str | Path,
    arguments: Sequence[Sequence[object]],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> list[Outcome]:
    """Run a program, a file or its text, in a folder, in one process for each list of arguments.

    Each process has its rank in the environment, as under torchrun. After the limit the test fails and prints the stack
    of each process, which distinguishes a process that waits for another from a slow machine.
    """
    with tempfile.TemporaryDirectory() as name:
        if isinstance(program, str):
            path = Path(name) / "program.py"
            path.write_text(textwrap.dedent(program))
            program = path
        count = str(len(arguments))
        given = {**(environment or os.environ), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        written = [(Path(name) / f"output-{rank}", Path(name) / f"errors-{rank}") for rank in range(len(arguments))]
        processes = [
            FORKS.Process(
                target=become,
                args=([str(program), *map(str, words)], {**given, "RANK": str(rank)}, folder or Path.cwd(), *files),
            )
            for rank, (words, files) in enumerate(zip(arguments, written, strict=True))
        ]
        for process in processes:
            process.start()
        try:
            ends_at = time.monotonic() + LIMIT
            for process in processes:
                process.join(max(0, ends_at - time.monotonic()))
            late = [process for process in processes if process.is_alive()]
            for process in late:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGABRT)
                process.join(10)
        finally:
            for process in processes:
                process.kill()
                process.join()
        texts = [tuple(path.read_text() if path.exists() else "" for path in files) for files in written]
        if late:
            pytest.fail(f"not done after {LIMIT} seconds:\n" + "\n\n".join(errors for _, errors in texts))
        return [Outcome(process.exitcode or 0, *text) for process, text in zip(processes, texts, strict=True)]


@contextmanager
def group_of_one(backend: str = "gloo") -> Iterator[dist.ProcessGroup]:
    """Make this process a process group of one; its end takes half a second."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        end_process_group()


def end_process_group() -> None:
    """Destroy the process group, if there is one, without waiting for gloo's threads with Python's lock held.

    Reference cycles are collected first, since models hold the group in them, and the group is released last, after its
    threads have released the tensors of its last collectives (`bighorn_workbench.ranks` has the details).
    """
    if dist.is_initialized():
        group = dist.group.WORLD
        gc.collect()
        dist.destroy_process_group()
        time.sleep(0.1)
        del group


def assert_ended_well(processes: Sequence[Outcome]) -> None:
    """Fail with the output of all processes if one of them has failed."""
    told = [f"process {number} ended with {end.code}\n{end.output}{end.errors}" for number, end in enumerate(processes)]
    if any(end.code for end in processes):
        pytest.fail("\n".join(told), pytrace=False)


def become(argv: list[str], environment: dict[str, str], folder: Path, output: Path, errors: Path) -> None:
    """Run a program in this new process as `python` would."""
    gc.freeze()  # a collection would visit the objects of all imports, and so copy their pages
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    faulthandler.enable()  # an aborted process prints its stack
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    end_process_group()
