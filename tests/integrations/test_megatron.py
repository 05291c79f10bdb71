"""LAMB, CAME and LARS inside of megatron-core's distributed optimizer, in real processes on a CPU.

They run tests/support/megatron_worker.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.tables import for_every

if find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: pip install --no-deps megatron-core", allow_module_level=True)

from tests.support import megatron_worker
from tests.support.processes import said_by


@for_every("scenario", megatron_worker.scenarios(Path()))
@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, scenario: str, folder: Path) -> None:
    said = said_by(megatron_worker, world, folder)
    assert [of_a_rank[scenario] for of_a_rank in said] == [""] * world
