"""Sharded parameters on real processes, which run tests/sharded.py."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import sharded

LIMIT = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs leave: reports, and the checkpoints of two ranks, which others load."""
    return tmp_path_factory.mktemp("ranks")


@cache
def said(world: int, folder: Path) -> list[dict[str, str]]:
    """What each scenario said on each of so many ranks: nothing, or a traceback."""
    program = str(Path(sharded.__file__))
    commands = [[sys.executable, program, str(rank), str(world), str(folder)] for rank in range(world)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        pytest.fail("a rank waits for another")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world, errors
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("scenario", sharded.scenarios(2, Path()))
def test_two_ranks(scenario: str, folder: Path) -> None:
    assert [said[scenario] for said in said(2, folder)] == ["", ""]


@pytest.mark.parametrize("scenario", sharded.scenarios(4, Path()))
def test_four_ranks(scenario: str, folder: Path) -> None:
    said(2, folder)  # for its checkpoints
    assert [said[scenario] for said in said(4, folder)] == [""] * 4


@pytest.mark.parametrize("scenario", sharded.scenarios(1, Path()))
def test_one_process(scenario: str, folder: Path) -> None:
    said(2, folder)
    assert [said[scenario] for said in said(1, folder)] == [""]
