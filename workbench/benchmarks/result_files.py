"""The files of results beside this module."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "workbench" / "benchmarks" / "results"
OLD = re.compile(r"(?<!workbench/)benchmarks/")
"""The folder of scripts and results in commands of files that are older than workbench/."""


def load(name: str) -> dict[str, Any]:
    """Return a file of results, with the folder that its command has today."""
    found: dict[str, Any] = json.loads(OLD.sub("workbench/benchmarks/", (RESULTS / f"{name}.json").read_text()))
    return found
