"""Processes that work together, each under a time limit, so that none is left behind that waits for another."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest


def outcomes(commands: Sequence[Sequence[str]], limit: float) -> tuple[list[int], list[str]]:
    """Runs the commands beside each other: exit codes, and what was written to stderr, of each."""
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=limit)[1] for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("a rank waits for another")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], errors
