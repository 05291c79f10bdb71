"""Offload of sharded parameters in two real processes, which run tests/support/offload_worker.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import offload_worker
from tests.support.processes import assert_ended_well, outcomes
from tests.support.tables import for_every


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("offload")
    assert_ended_well(outcomes(Path(offload_worker.__file__), [[rank, 2, folder] for rank in range(2)]))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@for_every("scenario", offload_worker.SCENARIOS)
def test_two_ranks(scenario: str, said: list[dict[str, str]]) -> None:
    assert [each[scenario] for each in said] == ["", ""]
