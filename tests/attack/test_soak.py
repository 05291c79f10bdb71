"""Memory does not grow with the number of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from attack import soak
from together import assert_ended_well, outcomes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")]


@pytest.mark.parametrize("steps", [100_000])
def test_plain_steps_leave_nothing_behind(steps: int) -> None:
    assert_ended_well(outcomes(Path(soak.__file__), [[steps]]))


@pytest.mark.parametrize("steps", [10_000])
def test_sharded_steps_leave_nothing_behind(steps: int, tmp_path: Path) -> None:
    assert_ended_well(outcomes(Path(soak.__file__), [[steps, rank, 2, tmp_path / "store"] for rank in range(2)]))
