"""Four ranks on the stand-in end where one process on the CPU does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.device.four_ranks import RANKS, scenarios
from tests.device.stand_in import MODES, why_absent
from tests.support.processes import assert_ended_well, outcomes

pytestmark = [pytest.mark.process, pytest.mark.skipif(why_absent() is not None, reason=str(why_absent()))]


@cache
def reports(mode: str) -> list[dict[str, str]]:
    """What each rank said of each scenario, in one run of the program."""
    with TemporaryDirectory() as folder:
        assert_ended_well(outcomes(Path(__file__).with_name("four_ranks.py"), [[folder, mode]] * RANKS))
        return [json.loads((Path(folder) / f"report-{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("device", "scenario"),
    [
        pytest.param(mode, name, marks=[pytest.mark.slow] * (mode == MODES[2]))
        for mode in MODES
        for name in scenarios(mode)
    ],
)
def test_ranks_are_one_process(device: str, scenario: str) -> None:
    for rank, report in enumerate(reports(device)):
        assert not report[scenario], f"rank {rank}: {report[scenario]}"
