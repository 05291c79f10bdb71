"""The page of the commands has their help and the docstrings of the workbench."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
WRITTEN = "import generated, sys; sys.stdout.write(generated.written((generated.DOCS / 'command-line.md').read_text()))"


def test_the_page_of_commands_has_their_help() -> None:
    """In a process of its own, since other tests import studies, which add optimizers to the commands."""
    text = (DOCS / "command-line.md").read_text()
    written = subprocess.run(
        [sys.executable, "-c", WRITTEN], cwd=DOCS / "_ext", capture_output=True, text=True, check=True
    )
    assert text == written.stdout, "run make docs"
    assert "## bighorn compare\n\n```text\nUsage: bighorn compare" in text
