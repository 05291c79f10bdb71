"""Processes that work together, each under a time limit, so that none is left behind that waits for another."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

import pytest


def outcomes(commands: Sequence[Sequence[str]], limit: float) -> tuple[list[int], list[str]]:
    """Runs the commands beside each other: exit codes, and what was written to stderr, of each.

    Past the limit, in seconds, the test fails and tells where each process stood: one that waits for another is told
    from a machine too busy to get there.
    """
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # a process that is aborted says what it was doing
    processes = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True, env=environment) for each in commands]
    try:
        errors = [process.communicate(timeout=limit)[1] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.send_signal(signal.SIGABRT)
        ends = "\n\n".join(process.communicate(timeout=10)[1] for process in processes)
        pytest.fail(f"not done after {limit:g} seconds:\n{ends}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], errors
