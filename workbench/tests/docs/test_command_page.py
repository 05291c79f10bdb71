"""The page of the commands has their help and the docstrings of the workbench."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "docs" / "_ext"))

import generated


def test_the_page_of_commands_has_their_help() -> None:
    text = (generated.DOCS / "command-line.md").read_text()
    assert text == generated.written(text), "run make docs"
    assert "## bighorn compare\n\n```text\nUsage: bighorn compare" in text
