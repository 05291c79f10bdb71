"""What fails on the stand-in today, and the place in src/bighorn that has to be mended.

Who mends a place sees its tests pass, which is a failure as long as they are in the table, and deletes the row.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class KnownError(AssertionError):
    """A failure that the table expects; every other failure of the same test is one."""


class Row(NamedTuple):
    """Tests that fail, the place of the cause, what is wrong there, and what the failure says."""

    tests: str
    place: str
    wrong: str
    says: str


BROKEN = [
    # ---- calls of torch ----
    Row(
        r"of_the_order_of_adamws\[came",
        "kernels/foreach/came.py",
        "tensors of each shape are computed by themselves",
        r"AssertionError: \d+ calls",
    ),
]


def row_of(test: str) -> Row | None:
    """Return the row of a test, or None if it passes."""
    return next((row for row in BROKEN if re.search(row.tests, test)), None)
