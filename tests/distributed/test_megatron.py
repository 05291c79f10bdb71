"""Megatron-LM's distributed optimizer, by a stand-in, in real processes, which run tests/support/megatron_worker.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bighorn import megatron_groups
from tests.support import megatron_worker
from tests.support.processes import said_by
from tests.support.tables import for_every

said = partial(said_by, megatron_worker)
"""Return the traceback of each scenario on each rank, or an empty string."""


@for_every("scenario", megatron_worker.scenarios())
@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, scenario: str, folder: Path) -> None:
    assert [said[scenario] for said in said(world, folder)] == [""] * world


def test_another_optimizer_has_no_ranges() -> None:
    chained = torch.optim.SGD([torch.zeros(2)])
    with pytest.raises(TypeError, match=r"(?s)gbuf_ranges, not SGD.*--use-distributed-optimizer.*chained_optimizers"):
        megatron_groups(chained)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda of: of.optimizer.param_groups[0]["params"].append(torch.zeros(1)),
            "2 tensors in group 0.*1 p.*once",
        ),
        (lambda of: of.gbuf_ranges.clear(), r"gbuf_ranges lacks a parameter of shape \(3, 2\) of group 0"),
        (lambda of: of.model_chunks.clear(), r"model_chunks lacks a parameter of shape \(3, 2\) of group 0"),
    ],
    ids=["replaced", "no-range", "no-chunk"],
)
def test_maps_that_lack_something_are_refused(change: Callable[[Any], object], message: str) -> None:
    model, flat = torch.nn.Linear(2, 3, bias=False), torch.zeros(6)
    held = {"param": SimpleNamespace(start=0, end=6, size=6)}
    distributed = SimpleNamespace(
        gbuf_ranges=[{"float32": [{"param_map": {model.weight: held}}]}],
        model_chunks=[model],
        model_fp32_groups=[[model.weight]],
        model_float16_groups=[[]],
        optimizer=torch.optim.Adam([flat]),
        buffers=[],
        data_parallel_group=None,
    )
    change(distributed)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        megatron_groups(distributed)
