"""`make attack` runs the attacks with one seed after another, and those on the C library also under sanitizers.

Each round runs the tests that `make test` runs once with seed 0. The first failure ends the attack and prints its seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from tests.support.sanitized import command, environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ON_THE_WORKBENCH = ROOT / "workbench" / "tests" / "attack"
ON_THE_LIBRARY = ("test_random_cases.py", "test_optimizer_use.py", "test_damaged_state.py")
"""The attacks that also run under sanitizers."""


def plain(seed: int) -> tuple[list[str], Mapping[str, str]]:
    """Return the command of a round without sanitizers and its environment."""
    return [sys.executable, "-m", "pytest", "-m", "not slow", str(HERE), str(ON_THE_WORKBENCH)], {
        "ATTACK_SEED": str(seed)
    }


def sanitized(seed: int) -> tuple[list[str], Mapping[str, str]]:
    """Return the command of a round under sanitizers and its environment."""
    attacks = [str(HERE / name) for name in ON_THE_LIBRARY]
    return command("-k", "not foreach", *attacks), {**environment(), "ATTACK_SEED": str(seed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="no round starts later")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next has the next")
    arguments = parser.parse_args()
    ends_at = time.monotonic() + 60 * arguments.minutes
    for seed in count(arguments.seed):
        for round_of in (plain, sanitized):
            if time.monotonic() >= ends_at:
                print(f"seeds {arguments.seed} to {seed}: nothing found", flush=True)
                return 0
            command, environment = round_of(seed)
            print(f"seed {seed}, {round_of.__name__}", flush=True)
            options = ["-x", "-q", "-p", "no:cacheprovider"]
            ended = subprocess.run([*command, *options], cwd=ROOT, env={**os.environ, **environment}, check=False)
            if ended.returncode:
                print(f"seed {seed} has found something: make attack SEED={seed} repeats it", flush=True)
                return 1
    raise AssertionError("seeds do not end")


if __name__ == "__main__":
    sys.exit(main())
