"""Memory does not grow with the number of steps."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from tests.support import soak_worker
from tests.support.processes import assert_ended_well, outcomes

MEASURABLE = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MEASURABLE, reason="memory is measured by glibc 2.33 or later"),
]


@pytest.mark.parametrize("steps", [100_000])
def test_plain_steps_leave_nothing_behind(steps: int) -> None:
    ended = outcomes(Path(soak_worker.__file__), [[steps]])
    assert_ended_well(ended)
    print(ended[0].output)


@pytest.mark.parametrize("steps", [10_000])
def test_sharded_steps_leave_nothing_behind(steps: int, tmp_path: Path) -> None:
    ended = outcomes(Path(soak_worker.__file__), [[steps, rank, 2, tmp_path / "store"] for rank in range(2)])
    assert_ended_well(ended)
    print(ended[0].output, ended[1].output)
