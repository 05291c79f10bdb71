"""Offload of sharded parameters in two real processes, which run tests/support/offload_worker.py."""

from __future__ import annotations

from pathlib import Path

from tests.support import offload_worker
from tests.support.processes import said_by
from tests.support.tables import for_every


@for_every("scenario", offload_worker.SCENARIOS)
def test_two_ranks(scenario: str, folder: Path) -> None:
    assert [said[scenario] for said in said_by(offload_worker, 2, folder)] == ["", ""]
