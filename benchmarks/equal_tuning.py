"""The comparisons at equal tuning in docs/study-equal-tuning.md: writes their tables from benchmarks/results.

Each optimizer got the same number of trials at each batch size, of which validation data chose one; then fresh seeds
trained with it, and the test data were looked at. The page says where the tables of NAME.json are.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from bighorn.cli.verdict import interval

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "study-equal-tuning.md", ROOT / "benchmarks" / "results"
TABLES = re.compile(r"(<!-- equal tuning of (\S+) -->\n).*?(<!-- end of the table -->)", re.DOTALL)

HEAD = (
    *("optimizer", "test accuracy (min-max)", "points from adamw"),
    *("good trials", "their rates", "first good", "state"),
)

GOOD = 0.01
"""A trial is good if it is within a point of the best one of its optimizer at this batch size."""


def load(name: str) -> dict[str, Any]:
    """Return the file of a comparison."""
    saved: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return saved


def figures(cell: dict[str, Any], baseline: dict[str, Any], metric: str, comparisons: int) -> list[str]:
    """Return a row of the table: results on test data, and what the trials say about tuning."""
    finals = [run[metric] for run in cell["final"]]
    theirs = {run["seed"]: run[metric] for run in baseline["final"]}
    differences = [run[metric] - theirs[run["seed"]] for run in cell["final"]]
    trials = [run[metric] for run in cell["tuning"]]
    good = [run["lr"] for run in cell["tuning"] if run[metric] >= max(trials) - GOOD]
    first = next(number for number, value in enumerate(trials, start=1) if value >= max(trials) - GOOD)
    return [
        cell["name"],
        f"{statistics.fmean(finals):.1%} ({min(finals):.1%}-{max(finals):.1%})",
        ""
        if cell is baseline
        else "{:+.1f} +- {:.1f}".format(*(100 * part for part in interval(differences, comparisons))),
        f"{sum(value >= max(trials) - GOOD for value in trials)} of {len(trials)}",
        f"{min(good):.2g} to {max(good):.2g}",
        str(first),
        f"{cell['state_bytes'] / 1e3:.0f} kB",
    ]


def table(name: str) -> str:
    """Return the tables of a comparison, one for each batch size; the baseline is AdamW."""
    saved = load(name)
    metric, config = saved["config"].get("metric", "accuracy"), saved["config"]
    cells = sorted(saved["cells"], key=lambda cell: cell["config"]["batch_size"])
    names = {cell["name"] for cell in cells}
    lines = [
        "```bash",
        " \\\n  ".join(textwrap.wrap(saved["command"], 80, break_long_words=False, break_on_hyphens=False)),
        "```",
        "",
        f"{config['task']} ({saved['data']['description']}), {config['epochs']:g} epochs, {config['trials']} trials "
        f"and {config['seeds']} seeds for each, as the command of commit {saved['commit'][:7]} did "
        f"([all runs](../benchmarks/results/{name}.json)).",
    ]
    for batch, group in groupby(cells, key=lambda cell: cell["config"]["batch_size"]):
        rows = list(group)
        baseline = next(cell for cell in rows if cell["name"] == "adamw")
        lines += ["", f"At batch {batch:,} ({rows[0]['steps']:,} steps):", ""]
        lines += ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
        lines += ["| " + " | ".join(figures(cell, baseline, metric, len(names) - 1)) + " |" for cell in rows]
    return "\n".join(lines) + "\n"


def written() -> str:
    """Return the page with its tables written anew."""
    return TABLES.sub(lambda match: match[1] + table(match[2]) + match[3], PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(written())
