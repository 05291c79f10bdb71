"""Processes that take part in one measurement."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


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
