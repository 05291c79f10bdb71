"""The number of files on the way of a reader: from `step()` to the first arithmetic, and through a load.

torch's fused AdamW takes 2 files and 6 moves between files for a step. The ledger counts the calls of steps of shards,
in Triton and with offload: a longer walk there has more of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn import Parameter

import bighorn
from tests.support.cases import Kind

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


def cached_step(kind: Kind, param: Parameter, backend: str) -> list[Function]:
    """Return the walk of a step with a cached plan."""
    optimizer = kind([("p", param)], lr=0.01, weight_decay=0.1, backend=backend)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return calls(optimizer.step)


FIRST_ARITHMETIC: dict[tuple[str, str], Function] = {
    ("lamb", "cpu"): ("_kernels/cpu/layerwise.py", "_run"),
    ("came", "cpu"): ("_kernels/cpu/came.py", "_run"),
    ("lars", "cpu"): ("_kernels/cpu/layerwise.py", "_run"),
    ("lamb", "reference"): ("_kernels/reference/lamb.py", "lamb"),
    ("came", "reference"): ("_kernels/reference/came.py", "came"),
    ("lars", "reference"): ("_kernels/reference/lars.py", "lars"),
    ("lars", "foreach"): ("_square_sums.py", "square_sums"),
    ("lamb", "foreach"): ("_kernels/reference/lamb.py", "bias_corrections"),
    ("came", "foreach"): ("_kernels/foreach/came.py", "_fill"),
}


def test_a_load_is_a_short_walk(kind: Kind) -> None:
    param = Parameter(torch.ones(4, 4))
    optimizer = kind([("p", param)], lr=0.01, weight_decay=0.1)
    param.grad = torch.ones(4, 4)
    optimizer.step()
    state_dict = optimizer.state_dict()
    files, moves, _ = counts(calls(lambda: optimizer.load_state_dict(state_dict)))
    assert (files <= 12, moves <= 33) == (True, True), (files, moves)


def test_a_cached_step_is_a_short_walk(kind: Kind, backend: str) -> None:
    last = FIRST_ARITHMETIC[kind.algorithm.name, backend]
    files, moves, back = counts(cached_step(kind, Parameter(torch.ones(4, 4)), backend), last)
    if backend == "cpu":
        assert (files <= 9, moves <= 11, back <= 3) == (True, True, True), (files, moves, back)
    else:
        assert (files <= 11, moves <= 16) == (True, True), (files, moves)


WHOLE = {"step": (9, 15, 7, 42), "construction": (15, 46, 33, 128), "first step": (29, 102, 77, 176)}
"""Files, moves, moves back and calls of whole walks, which may not grow."""


def test_a_whole_walk_does_not_grow(kind: Kind) -> None:
    param = Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4)
    optimizers: list[Any] = []

    def construct() -> None:
        optimizers.append(kind([("p", param)], lr=0.01, weight_decay=0.1))

    for _ in range(2):  # the first walk of a process also fills caches of functions
        walks = {"construction": calls(construct), "first step": calls(lambda: optimizers[-1].step())}
    found = {
        way: (*counts(walk), len(walk)) for way, walk in (walks | {"step": cached_step(kind, param, "cpu")}).items()
    }
    assert {way: each for way, each in found.items() if not all(map(int.__le__, each, WHOLE[way]))} == {}


def scheduled_step(kind: Kind, groups: int) -> list[Function]:
    """Return the walk of a step of groups of one parameter, all with the default's schedule and a rate of their own."""
    params = [Parameter(torch.ones(2, 2)) for _ in range(groups)]
    optimizer = kind(
        [{"params": [p], "lr_scale": 0.9**i} for i, p in enumerate(params)], lr=lambda step: 0.1 / (step + 1)
    )
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return calls(optimizer.step)


def test_many_groups_with_a_schedule_cost_few_calls_each(kind: Kind) -> None:
    each = (len(scheduled_step(kind, 20)) - len(scheduled_step(kind, 10))) / 10
    assert each <= 24
