"""Triton's kernels in Triton's interpreter. These tests take longest.

Triton fixes the choice between interpreter and compiler at import, so the interpreter runs in a separate process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.triton_interpreter import compiled

pytest.importorskip("triton")


@compiled
@pytest.mark.parametrize(
    "which", ["not slow", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_in_the_interpreter(which: str) -> None:
    """Compare the table of cases with the float64 reference, and run the interpreted tests of Triton's files."""
    names = "test_backends", "test_triton", "test_simulated_ranks"
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in names]
    chosen = ["-k", "triton", "-m", which, "--timeout", "1500"]
    command = [sys.executable, "-m", "pytest", *files, *chosen, "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=7100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 100, done.stdout
