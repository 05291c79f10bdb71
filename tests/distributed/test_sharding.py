"""Sharded parameters in real processes, which run tests/support/sharding_worker.py."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from bighorn import kernels
from tests.support import sharding_worker, training_digests
from tests.support.optimizer_runs import BY_ID, advance, assert_bitwise
from tests.support.processes import said_by
from tests.support.tables import for_every

said = partial(said_by, sharding_worker)
"""Return the traceback of each scenario on each rank, or an empty string."""


@for_every("scenario", sharding_worker.scenarios(2, Path()))
def test_two_ranks(scenario: str, folder: Path) -> None:
    assert [said[scenario] for said in said(2, folder)] == ["", ""]


@for_every("scenario", sharding_worker.scenarios(4, Path()))
def test_four_ranks(scenario: str, folder: Path) -> None:
    said(2, folder)  # writes the checkpoints
    assert [said[scenario] for said in said(4, folder)] == [""] * 4


@pytest.mark.slow
def test_every_run_on_every_layout(tmp_path: Path) -> None:
    for world in (2, 4):  # two ranks write the checkpoints
        names = sharding_worker.scenarios(world, Path(), all_of_them=True)
        assert said(world, tmp_path, "all") == [dict.fromkeys(names, "")] * world


@for_every("scenario", sharding_worker.scenarios(1, Path()))
def test_one_process(scenario: str, folder: Path) -> None:
    said(2, folder)
    assert [said[scenario] for said in said(1, folder)] == [""]


# ---- one process: a step in reduction rounds, whose sums are already complete -------------------------------------


def in_rounds(kernel: Any, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
    for _ in kernel.sharded_step(grad_scale, apply_mask):
        pass


ROUNDS = [
    *itertools.product(
        ("cpu", "triton"),
        (
            *("both-bounds", "clip-skip", "stacked", "mixed-paper-v5", "bfloat16-states-int8-everything"),
            *("lars-everything", "lars-stacked-joint-clipped", "lars-mixed-paper"),
        ),
    ),
    *(("cpu", f"came-{case}") for case in ("published", "everything", "bfloat16-states-int8-everything")),
    ("cpu", "came-bfloat16-states-int4-all-published"),
    *(("cpu", case) for case in ("l2", "bfloat16-states-int8-adamw")),
]


@pytest.mark.parametrize(("backend", "case"), ROUNDS, indirect=["backend"])
def test_rounds_are_a_step(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is equal to the bit on compiled backends, where both run the same arithmetic."""
    whole, shards = BY_ID[case].parameters(), BY_ID[case].parameters()
    advance(BY_ID[case], whole, BY_ID[case].optimizer(whole, backend=backend), range(3))
    monkeypatch.setattr(kernels.kernel(backend, BY_ID[case].kind.algorithm.name), "step", in_rounds)
    advance(BY_ID[case], shards, BY_ID[case].optimizer(shards, backend=backend), range(3))
    assert_bitwise(shards, whole)


@pytest.mark.parametrize("threads", [1, 3])
def test_rounds_are_a_step_for_large_tensors(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads share these tensors, and a step keeps only a part of their u."""
    if not kernels.status()["cpu"].available:
        pytest.skip(kernels.status()["cpu"].detail)
    monkeypatch.setenv("BIGHORN_NUM_THREADS", str(threads))  # restored after the test, since digests sets it
    whole = training_digests.digests(threads)
    monkeypatch.setattr(kernels.kernel("cpu", "lamb"), "step", in_rounds)
    assert training_digests.digests(threads) == whole
