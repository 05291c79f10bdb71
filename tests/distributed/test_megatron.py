"""Megatron-LM's distributed optimizer, by a stand-in, in real processes, which run tests/support/megatron_worker.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from bighorn import megatron_groups
from tests.support import megatron_worker
from tests.support.processes import assert_ended_well, outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs' reports."""
    return tmp_path_factory.mktemp("megatron")


@cache
def said(world: int, folder: Path) -> list[dict[str, str]]:
    """Return the traceback of each scenario on each of `world` ranks, or an empty string."""
    assert_ended_well(outcomes(Path(megatron_worker.__file__), [[rank, world, folder] for rank in range(world)]))
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("scenario", megatron_worker.scenarios())
@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, scenario: str, folder: Path) -> None:
    assert [said[scenario] for said in said(world, folder)] == [""] * world


def test_another_optimizer_has_no_ranges() -> None:
    chained = torch.optim.SGD([torch.zeros(2)])
    with pytest.raises(TypeError, match=r"(?s)gbuf_ranges, not SGD.*--use-distributed-optimizer.*chained_optimizers"):
        megatron_groups(chained)
