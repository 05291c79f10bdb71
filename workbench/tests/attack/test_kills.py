"""After processes are killed during a save, the newest checkpoint loads."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.attack_settings import SEED
from tests.support.processes import assert_ended_well, outcomes
from workbench.tests.attack import save_kill_worker

KILLS = 20


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "saved" / "run.pt"
    place.parent.mkdir()
    ended = outcomes(Path(save_kill_worker.__file__), [[place, SEED, KILLS]])
    assert_ended_well(ended)
    print(ended[0].output)
    assert not re.search("^0 of", ended[0].output, re.MULTILINE)
