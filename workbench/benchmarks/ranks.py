"""Processes that take part in one measurement."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run(commands: Sequence[Sequence[str]], variables: Mapping[str, str] | None = None, limit: float = 1800) -> None:
    """Run the commands beside each other, each a rank; none outlives the others, and if one fails, the program ends.

    Args:
        commands: One for each rank.
        variables: Of the environment, added to this process's.
        limit: Seconds that each may take.
    """
    started = [subprocess.Popen(command, env={**os.environ, **(variables or {})}) for command in commands]
    try:
        if any(rank.wait(timeout=limit) for rank in started):
            sys.exit(f"{Path(sys.argv[0]).stem}: a rank has failed")
    finally:
        for rank in started:
            rank.kill()
            rank.wait()


def found(script: str, count: int, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> Any:
    """Run a script on some ranks, each with its share of the cores; return what it wrote as FOLDER/found.json.

    Args:
        script: The file, which takes `--world`, `--folder` and `--rank`.
        count: The number of ranks.
        arguments: Its other arguments.
        variables: Of the environment, as of :func:`run`.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    shares = {"OMP_NUM_THREADS": threads, "BIGHORN_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        again = [sys.executable, script, *arguments, "--world", str(count), "--folder", folder, "--rank"]
        run([[*again, str(rank)] for rank in range(count)], {**shares, **(variables or {})})
        return json.loads(Path(folder, "found.json").read_text())
