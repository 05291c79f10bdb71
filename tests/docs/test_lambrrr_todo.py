"""The notebook of LAMBrrr covers each line of LAMBrrr's list."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "workbench" / "benchmarks" / "results" / "lambrrr.md"


def test_every_line_of_the_list_has_its_section() -> None:
    """The list is the section TODO of LAMBrrr's README at commit a44ee608."""
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert headings[:-1] == [
        "selectively exclude layers from lr adaptation (`exclude_from_layer_adaptation`)",
        "weight norm clipping",
        "grad norm clipping",
        "trust ratio clipping (LAMBC)",
        "compare convergence with Adam and LAMB with 4x batch size",
        "AdamW update",
        "Adagrad update",
    ]
