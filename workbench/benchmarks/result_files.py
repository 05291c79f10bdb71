"""The files of results: of comparisons beside this module, and of steps in benchmarks/ at the root."""

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
    path = RESULTS / f"{name}.json"
    if not path.exists():
        path = ROOT / "benchmarks" / "results" / path.name
    found: dict[str, Any] = json.loads(OLD.sub("workbench/benchmarks/", path.read_text()))
    return found
