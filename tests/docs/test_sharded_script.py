"""The training script of docs/sharding.md in real processes; any number of processes loads its checkpoints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT, blocks
from tests.support.processes import LIMIT, TORCHRUN, VARIABLES

SCRIPT = next(block for block in blocks((ROOT / "docs" / "sharding.md").read_text()) if "__main__" in block)


def losses(processes: int, steps: int, folder: Path) -> dict[str, str]:
    """Return the printed loss of each step."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(processes), "train.py"]
    variables = VARIABLES | {"STEPS": str(steps)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=variables)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith("step"))


@pytest.mark.slow
def test_the_script_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    whole = losses(2, 30, tmp_path / "whole")
    assert list(whole) == ["step 10", "step 20", "step 30"]
    assert losses(2, 20, tmp_path / "parts") == {step: whole[step] for step in ("step 10", "step 20")}
    (tmp_path / "parts" / "checkpoints" / "step-99").mkdir()  # a save that was killed has no .metadata
    assert losses(2, 30, tmp_path / "parts") == {"step 30": whole["step 30"]}
    assert list(losses(1, 40, tmp_path / "parts")) == ["step 40"]
    kept = sorted(path.parent.name for path in (tmp_path / "parts" / "checkpoints").glob("*/.metadata"))
    assert kept == ["step-40"]
