"""LAMB inside of DeepSpeed's ZeRO, in real processes, which run tests/support/deepspeed_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.processes import assert_ended_well, outcomes

if find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed: pip install deepspeed", allow_module_level=True)

WORKER = Path(__file__).parents[1] / "support" / "deepspeed_worker.py"
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}

BOTH = [f"zero-{stage}{half}" for stage in (1, 2) for half in ("", "-came", "-fp16", "-bf16")]
RESUMES = ["resumes", *(f"resumes-{which}" for which in ("zero-2", "fp16", "came", "came-fp16"))]
BOTH += ["bf16-summed-in-float32", "fp16-without-zero", "overflow", "collectives"]


@cache
def said(world: int, folder: Path) -> list[dict[str, str]]:
    """Return the traceback of each scenario on each of `world` ranks, or an empty string."""
    if world == 4:
        said(2, folder)
        convert(folder / "saved")
    assert_ended_well(outcomes(WORKER, [[rank, world, folder] for rank in range(world)], ENVIRONMENT))
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


def convert(saved: Path) -> None:
    """Make a universal checkpoint with DeepSpeed's script."""
    folders = ["--input_folder", str(saved / "third"), "--output_folder", str(saved / "universal")]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    script = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    subprocess.run([*script, *folders, *workers], check=True, capture_output=True, timeout=200, env=ENVIRONMENT)


@pytest.mark.parametrize("scenario", [*BOTH, *RESUMES, "eva-clip", "refusals"])
def test_two_ranks(scenario: str, folder: Path) -> None:
    assert [said[scenario] for said in said(2, folder)] == [""] * 2


@pytest.mark.parametrize("scenario", [*BOTH, "universal"])
def test_four_ranks(scenario: str, folder: Path) -> None:
    assert [said[scenario] for said in said(4, folder)] == [""] * 4
