"""Every row of docs/works-with.md has a note with tests that exist, and a reason if it does not work."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "works-with.md"
TEXT = PAGE.read_text()
_, _, *LINES = [line for line in TEXT.partition("## ")[0].splitlines() if line.startswith("|")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]
NOTES = dict(re.findall(r"^(\[\^\d+\]): (.*)$", TEXT, re.MULTILINE))


def missing(cell: str) -> list[str]:
    """The files and tests of a cell that do not exist; a test without a file is in the file before it."""
    absent, file = [], Path()
    for named, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::)?(test_\w+)?`", cell):
        file = ROOT / named if named else file
        tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
        tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        absent += [f"{named}::{test}"] if not file.is_file() or (test and test not in tests) else []
    return absent


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_its_tests_exist(row: list[str]) -> None:
    _, cell, reason = row
    works, mark, rest = cell.partition("[")
    tests = NOTES[mark + rest]
    assert "`tests/" in tests
    assert works == "yes" or (works == "no" and reason)
    assert missing(tests) == []


def test_a_test_that_does_not_exist_is_found() -> None:
    assert missing("`tests/docs/test_works_with.py::test_its_tests_exist`, `test_no`") == ["::test_no"]
    assert missing("`tests/docs/test_nothing.py`") == ["tests/docs/test_nothing.py::"]
