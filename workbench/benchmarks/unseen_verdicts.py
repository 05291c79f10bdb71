"""Whether verdicts of `bighorn compare` on tasks from published examples are right, beside an exhaustive grid of rates.

    python workbench/benchmarks/unseen_verdicts.py GRID JSON BUDGET...   # GRID of rate_grid.py

Each task begins with an empty study, for each budget. A verdict is right if it names the better optimizer and the best
rate of the grid has the same sign, wrong if it has the other one.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.verdict import UNCLEAR, interval
from rate_grid import PLACE
from rate_search import loss_of
from result_files import RESULTS, load

PAGE = RESULTS / "own-tasks.md"
VERDICTS = re.compile(r"(<!-- verdicts -->\n).*?(<!-- end of verdicts -->)", re.DOTALL)
BASELINE, OTHERS = "adamw", ("lamb", "came")
CLEAR = re.compile(r"At batch [\d,]+ (\w+) \([^)]*\) is (ahead of|behind) adamw")


def asked(task: str, budget: str) -> dict[str, Any]:
    """Return the command's words about a task, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.json"
        words = ["--task", f"{PLACE}:{task}", "--optimizers", ",".join((BASELINE, *OTHERS)), "--budget", budget]
        started = time.perf_counter()
        command = Path(sys.executable).with_name("bighorn")
        subprocess.run([command, "compare", *words, "--json", file], check=True, capture_output=True)
        seconds = time.perf_counter() - started
        content = json.loads(file.read_text())
    cells = {cell["name"]: {"lr": cell["config"]["lr"], "final": cell["final"]} for cell in content["cells"]}
    counts = {name: content["config"][name] for name in ("trials", "seeds")}
    return {"seconds": seconds, **counts, "words": content["words"], "cells": cells}


def judged(saved: dict[str, Any], words: list[str]) -> dict[str, dict[str, Any]]:
    """Return for each optimizer the verdicts of the command and of the grid."""
    said = {found[1]: 1 if found[2] == "ahead of" else -1 for line in words if (found := CLEAR.match(line))}
    metric, grid = saved["metric"], saved["grid"]
    verdicts = {}
    for name in OTHERS:
        ahead = loss_of(grid[BASELINE], metric) - loss_of(grid[name], metric)
        seeds = [best_seeds(grid[each], metric) for each in (BASELINE, name)]
        _, half = interval([one - other for one, other in zip(*seeds, strict=True)])
        untuned = any(f" {name} cannot be compared with" in line for line in words)
        verdict = "not tuned" if untuned else UNCLEAR
        if name in said:
            verdict = "right" if said[name] * ahead > 0 else "wrong"
        verdicts[name] = {"verdict": verdict, "grid_ahead": ahead, "grid_interval": half}
    return verdicts


def best_seeds(grid: dict[str, list[float | None]], metric: str) -> list[float]:
    """Return the values of the seeds at the best rate of a grid."""
    best = min(grid.values(), key=lambda values: loss_of({"1": values}, metric))
    return [math.inf if value is None else value for value in best]


def written(page: str, found: dict[str, Any], rates: dict[str, Any]) -> str:
    """Return the page with the figures of the files."""
    budgets, lines = found["budgets"], []
    for budget, of in budgets.items():
        counts, minutes = of["counts"], [task["seconds"] / 60 for task in of["tasks"].values()]
        lines += [
            f"`--budget {budget}` took {min(minutes):.1f} to {max(minutes):.1f} minutes. Of {sum(counts.values())} "
            f"comparisons {counts['right']} agreed with the grid, {counts['wrong']} disagreed, {counts[UNCLEAR]} had "
            f"{UNCLEAR}, and {counts['not tuned']} were not tuned.",
            "",
        ]
    head = ["task", *(f"trials, seeds, {budget}" for budget in budgets)]
    for other in OTHERS:
        head += [*(f"{other}, {budget}" for budget in budgets), f"{other} by the grid"]
    lines += [_row(head), "|---" * len(head) + "|"]
    for name in next(iter(budgets.values()))["tasks"]:
        asked_for = [of["tasks"][name] for of in budgets.values()]
        cells = [name, *(f"{task['trials']}, {task['seeds']}" for task in asked_for)]
        for other in OTHERS:
            verdicts = [task["verdicts"][other] for task in asked_for]
            by_grid = f"{verdicts[0]['grid_ahead']:+.2g} ± {verdicts[0]['grid_interval']:.2g}"
            cells += [*(each["verdict"] for each in verdicts), by_grid]
        lines.append(_row(cells))
    lines += [
        "",
        f"On the same tasks, with three optimizers and five seeds, {rates['suggestions good']:.0%} of the rates that "
        "`lr-find` suggests have a test metric within a tenth of the best rate's, and "
        f"{rates['suggestions strictly']:.0%} a test error within a tenth of the least.",
    ]
    return VERDICTS.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], page)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(grid_file: Path, file: Path, budgets: list[str]) -> None:
    """Ask about each task that the file does not have for a budget, and write what came of it."""
    grids = json.loads(grid_file.read_text())["tasks"]
    kept = json.loads(file.read_text())["budgets"] if file.exists() else {}
    found: dict[str, Any] = {**provenance(f"python {' '.join(sys.argv)}"), "budgets": kept}
    for budget in budgets:
        tasks = kept.setdefault(budget, {"tasks": {}})["tasks"]
        for name in [each for each in grids if each not in tasks]:
            answer = asked(name, budget)
            tasks[name] = {**answer, "commit": found["commit"], "verdicts": judged(grids[name], answer["words"])}
            said = {other: each["verdict"] for other, each in tasks[name]["verdicts"].items()}
            print(f"{budget}, {name}: {answer['seconds']:.0f} s, {answer['trials']} trials of each, {said}", flush=True)
            write_json(file, found)
        verdicts = [each["verdict"] for task in tasks.values() for each in task["verdicts"].values()]
        kept[budget]["counts"] = {kind: verdicts.count(kind) for kind in ("right", "wrong", UNCLEAR, "not tuned")}
        write_json(file, found)
        print(budget, kept[budget]["counts"], flush=True)
    PAGE.write_text(written(PAGE.read_text(), found, load("rate-search")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
