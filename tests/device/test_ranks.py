"""Two ranks on the stand-in end where one process on the CPU does: FSDP2 with unequal shards, and DDP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.device.stand_in import why_absent
from tests.device.two_ranks import SCENARIOS
from tests.support.processes import assert_ended_well, outcomes

pytestmark = [pytest.mark.process, pytest.mark.skipif(why_absent() is not None, reason=str(why_absent()))]


@pytest.fixture(scope="module")
def reports() -> Iterator[list[dict[str, str]]]:
    """What both ranks said of each scenario, in one run of the program."""
    with TemporaryDirectory() as folder:
        ends = outcomes(Path(__file__).with_name("two_ranks.py"), [[folder], [folder]])
        assert_ended_well(ends)
        yield [json.loads((Path(folder) / f"report-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_are_one_process(reports: list[dict[str, str]], scenario: str) -> None:
    for rank, report in enumerate(reports):
        assert not report[scenario], f"rank {rank}: {report[scenario]}"
