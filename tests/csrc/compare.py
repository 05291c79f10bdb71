"""`python compare.py EXPECTED FOUND` checks that figures of steps.c agree up to rounding."""

from __future__ import annotations

import math
import sys
from pathlib import Path

TOLERANCE = 1e-4
"""A relative tolerance. Instruction sets differ in fused multiply-adds and in the order of sums, by up to 2e-6."""


def figures(text: str) -> dict[str, list[float]]:
    """Return the figures that steps.c printed, by name."""
    lines = [line.split() for line in text.splitlines()]
    return {name: [float(value) for value in values] for name, *values in lines}


def differences(expected: str, found: str) -> list[str]:
    """Return the names whose figures differ, or that only one side has."""
    ours, theirs = figures(expected), figures(found)
    alike = {
        name
        for name in ours.keys() & theirs.keys()
        if all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(ours[name], theirs[name], strict=True))
    }
    return sorted((ours.keys() | theirs.keys()) - alike)


def main() -> int:
    """Print the names that differ; the exit status is 1 if there are any."""
    expected, found = (Path(name).read_text() for name in sys.argv[1:])
    differing = differences(expected, found)
    print(f"{len(figures(expected))} results, of which differ: {', '.join(differing) or 'none'}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
