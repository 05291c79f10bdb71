"""The number of files on the way of a reader: from `step()` to the first arithmetic, and through a load.

torch's fused AdamW takes 2 files and 6 moves between files for a step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

import bighorn
from bighorn import Came, Lamb
from bighorn.offloading.copies import Pairs
from bighorn_workbench.ranks import end_process_group
from tests.support.cases import Kind
from tests.support.offloading import OVERLAPS, Overlap, loss_of, network, offloaded
from tests.support.processes import LIMIT, outcomes

ROOT = Path(bighorn.__file__).parent

Function = tuple[str, str]
"""A file of the package, and a function in it."""


def calls(what: Callable[[], Any]) -> list[Function]:
    """Return the functions of the package in a call, in order, without comprehensions and lambdas."""
    found: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            found.append(frame.f_code)

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    own = [code for code in found if Path(code.co_filename).is_relative_to(ROOT)]
    return [(str(Path(code.co_filename).relative_to(ROOT)), code.co_name) for code in own]


def counts(walk: list[Function], last: Function | None = None) -> tuple[int, int, int]:
    """Return files, moves between files, and moves back to a file, up to the first call of `last`."""
    if last is not None:
        walk = walk[: walk.index(last) + 1]
    files = [file for file, _ in groupby(file for file, _ in walk)]
    return len(set(files)), len(files) - 1, len(files) - len(set(files))


def cached_step(kind: Kind, params: list[Parameter], **options: Any) -> list[Function]:
    """Return the walk of a step with a cached plan."""
    optimizer = kind([(f"p{i}", p) for i, p in enumerate(params)], lr=0.01, weight_decay=0.1, **options)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return calls(optimizer.step)


FIRST_ARITHMETIC: dict[tuple[str, str], Function] = {
    ("lamb", "cpu"): ("kernels/cpu/layerwise.py", "_run"),
    ("came", "cpu"): ("kernels/cpu/came.py", "_run"),
    ("lars", "cpu"): ("kernels/cpu/layerwise.py", "_run"),
    ("lamb", "reference"): ("kernels/reference/lamb.py", "lamb"),
    ("came", "reference"): ("kernels/reference/came.py", "came"),
    ("lars", "reference"): ("kernels/reference/lars.py", "lars"),
    ("lars", "foreach"): ("square_sums.py", "square_sums"),
    ("lamb", "foreach"): ("kernels/reference/lamb.py", "bias_corrections"),
    ("came", "foreach"): ("kernels/foreach/came.py", "_fill"),
}


def test_a_load_is_a_short_walk(kind: Kind) -> None:
    param = Parameter(torch.ones(4, 4))
    optimizer = kind([("p", param)], lr=0.01, weight_decay=0.1)
    param.grad = torch.ones(4, 4)
    optimizer.step()
    state_dict = optimizer.state_dict()
    files, moves, _ = counts(calls(lambda: optimizer.load_state_dict(state_dict)))
    assert (files <= 8, moves <= 20) == (True, True), (files, moves)


class AtOnce:
    """Copies that complete when they begin."""

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def to_host(self, pairs: Pairs) -> Any:
        with torch.no_grad():
            for host, device in pairs:
                host.copy_(device)
        return self

    def to_device(self, pairs: Pairs) -> Any:
        return self.to_host([(device, host) for host, device in pairs])

    def synchronize(self) -> None:
        """Return at once; nothing is pending."""

    wait = synchronize


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_offloaded_step_is_a_short_walk(overlap: Overlap) -> None:
    """The walk is the training loop's thread, with eight gradients in five buckets."""
    net = network()
    optimizer = offloaded(net, Lamb(net.parameters(), lr=0.01), overlap=overlap, copies=AtOnce())

    def step() -> None:
        loss_of(net, 0).backward()
        optimizer.step()

    step()
    files, moves, back = counts(calls(step))
    assert (files <= 5, moves <= 61, back <= 57) == (True, True, True), (files, moves, back)


def test_a_cached_step_is_a_short_walk(kind: Kind, backend: str) -> None:
    last = FIRST_ARITHMETIC[kind.algorithm.name, backend]
    files, moves, back = counts(cached_step(kind, [Parameter(torch.ones(4, 4))], backend=backend), last)
    if backend == "cpu":
        assert (files <= 8, moves <= 10, back <= 2) == (True, True, True), (files, moves, back)
    else:
        assert (files <= 11, moves <= 15) == (True, True), (files, moves)


WHOLE: dict[str, tuple[int, int, int]] = {
    "cpu": (8, 16, 9),
    "clip": (9, 23, 15),
    "lamb foreach": (12, 36, 25),
    "came foreach": (11, 27, 17),
    "construction": (12, 39, 28),
    "first step": (26, 96, 73),
}
"""Files, moves and moves back of whole walks, which may not grow."""


@pytest.mark.parametrize("way", WHOLE)
def test_a_whole_walk_does_not_grow(way: str, kind: Kind) -> None:
    param = Parameter(torch.ones(4, 4))
    name, _, backend = way.rpartition(" ")
    if way in ("construction", "first step"):
        param.grad = torch.ones(4, 4)
        optimizers: list[Any] = []

        def construct() -> None:
            optimizers.append(kind([("p", param)], lr=0.01, weight_decay=0.1))

        for _ in range(2):  # the first walk of a process also fills caches of functions
            walk = calls(construct)
            walk = calls(optimizers[-1].step) if way == "first step" else walk
    elif name and name != kind.algorithm.name:
        pytest.skip(f"of {name}")
    else:
        options = {"max_grad_norm": 1.0} if way == "clip" else {}
        walk = cached_step(kind, [param], backend=backend if name else "cpu", **options)
    found = counts(walk)
    assert all(many <= most for many, most in zip(found, WHOLE[way], strict=True)), found


def test_a_cached_step_of_shards_is_a_short_walk() -> None:
    [ended] = outcomes(Path(__file__), [["step_of_shards"]])
    for files, moves in counts_in(ended.output):
        assert (files <= 11, moves <= 15) == (True, True), (files, moves)


def test_a_cached_step_on_a_gpu_is_a_short_walk() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.package.test_walk", "step_in_triton"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # Triton reads it when it is imported
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True, env=environment)
    for files, moves in counts_in(done.stdout):
        assert (files <= 11, moves <= 15) == (True, True), (files, moves)


def counts_in(output: str) -> list[tuple[int, int]]:
    """Return the files and moves of LAMB and of CAME from the output of a function of this module."""
    lines = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(lines) == 2, output
    return [(files, moves) for files, moves, _ in lines]


def step_in_triton(algorithm: str) -> None:
    """Print the counts of a step in Triton's interpreter, up to the first launch."""
    kind: Kind = {"lamb": Lamb, "came": Came}[algorithm]
    walk = cached_step(kind, [Parameter(torch.ones(4, 4))], backend="triton")
    print(*counts(walk, ("kernels/triton/launch_group.py", "launch")))


def step_of_shards(algorithm: str) -> None:
    """Print the counts of a step of one of two simulated ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    param = Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    kind: Kind = {"lamb": Lamb, "came": Came}[algorithm]
    walk = cached_step(kind, [param], backend="cpu")
    print(*counts(walk, FIRST_ARITHMETIC[algorithm, "cpu"]))
    end_process_group()


if __name__ == "__main__":
    for each in ("lamb", "came"):
        globals()[sys.argv[1]](each)
