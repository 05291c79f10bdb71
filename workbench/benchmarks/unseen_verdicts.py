"""Whether verdicts of `bighorn compare` on tasks from published examples are right, beside the best known options.

    python workbench/benchmarks/unseen_verdicts.py JSON BUDGET...   # each about the budget for each of twelve tasks

Each task begins with an empty study, for each budget. A verdict is right if the difference of `tuned_reference.py` has
the same sign, and wrong if it has the other one.
"""

from __future__ import annotations

import json
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
from result_files import DOCS, RESULTS, load
from unseen_tasks import UNSEEN

PAGE = RESULTS / "own-tasks.md"
VERDICTS = re.compile(r"(<!-- verdicts -->\n).*?(<!-- end of verdicts -->)", re.DOTALL)
COMPARISONS = DOCS / "comparisons.md"
ROW = re.compile(r"(\| \[answers of `compare` [^|]*\| )[^|]*( \|)")
"""The line of these verdicts there."""

BASELINE, OTHERS = "adamw", ("lamb", "came")
REFERENCE = load("tuned-reference")["tasks"]
SIGNS = {each.__name__: 1 if each.higher_is_better else -1 for each in UNSEEN}
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


def judged(task: str, words: list[str]) -> dict[str, dict[str, Any]]:
    """Return for each optimizer the verdict of the command, and how much better it is by the longer search."""
    said = {found[1]: 1 if found[2] == "ahead of" else -1 for line in words if (found := CLEAR.match(line))}
    values = {name: found["test"] for name, found in REFERENCE[task].items()}
    verdicts = {}
    for name in OTHERS:
        pairs = zip(values[name], values[BASELINE], strict=True)
        ahead, half = interval([SIGNS[task] * (one - other) for one, other in pairs])
        untuned = any(f" {name} cannot be compared with" in line for line in words)
        verdict = "not tuned" if untuned else UNCLEAR
        if name in said:
            verdict = "right" if said[name] * ahead > 0 else "wrong"
        verdicts[name] = {"verdict": verdict, "ahead": ahead, "interval": half}
    return verdicts


def summary(of: dict[str, Any]) -> str:
    """Return how many verdicts of a budget are of each kind."""
    counts = of["counts"]
    wrong = [each for task in of["tasks"].values() for each in task["verdicts"].values() if each["verdict"] == "wrong"]
    within = sum(abs(each["ahead"]) <= each["interval"] for each in wrong)
    unsure = f" ({within} of them where their interval contains 0)" if wrong else ""
    return (
        f"Of {sum(counts.values())} comparisons {counts['right']} agreed with the best known options, {len(wrong)} "
        f"disagreed{unsure}, {counts[UNCLEAR]} had {UNCLEAR}, and {counts['not tuned']} had an optimizer that was not "
        "tuned."
    )


def counted(page: str, found: dict[str, Any]) -> str:
    """Return the page of comparisons with the right ones among the clear verdicts."""
    counts = {budget: of["counts"] for budget, of in found["budgets"].items()}
    clear = [f"{each['right']} of {each['right'] + each['wrong']} after {budget}" for budget, each in counts.items()]
    text = f"right verdicts: {', '.join(clear)}"
    return ROW.sub(lambda match: match[1] + text + match[2], page)


def written(page: str, found: dict[str, Any], rates: dict[str, Any]) -> str:
    """Return the page with the figures of the files."""
    budgets, lines = found["budgets"], []
    for budget, of in budgets.items():
        minutes = [task["seconds"] / 60 for task in of["tasks"].values()]
        lines += [f"`--budget {budget}` took {min(minutes):.1f} to {max(minutes):.1f} minutes. {summary(of)}", ""]
    head = ["task", *(f"trials, seeds, {budget}" for budget in budgets)]
    for other in OTHERS:
        head += [*(f"{other}, {budget}" for budget in budgets), f"{other} by the best known"]
    lines += [_row(head), "|---" * len(head) + "|"]
    for name in next(iter(budgets.values()))["tasks"]:
        asked_for = [of["tasks"][name] for of in budgets.values()]
        cells = [name, *(f"{task['trials']}, {task['seeds']}" for task in asked_for)]
        for other in OTHERS:
            verdicts = [task["verdicts"][other] for task in asked_for]
            cells += [each["verdict"] for each in verdicts]
            cells.append(f"{verdicts[0]['ahead']:+.2g} ± {verdicts[0]['interval']:.2g}")
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


def main(file: Path, budgets: list[str]) -> None:
    """Ask about each task that the file does not have for a budget, and write what came of it."""
    kept = json.loads(file.read_text())["budgets"] if file.exists() else {}
    found: dict[str, Any] = {**provenance(f"python {' '.join(sys.argv)}"), "budgets": kept}
    for budget in budgets:
        tasks = kept.setdefault(budget, {"tasks": {}})["tasks"]
        for name in REFERENCE:
            if name not in tasks:
                tasks[name] = {**asked(name, budget), "commit": found["commit"]}
            tasks[name]["verdicts"] = judged(name, tasks[name]["words"])
            said = {other: each["verdict"] for other, each in tasks[name]["verdicts"].items()}
            print(f"{budget}, {name}: {tasks[name]['trials']} trials of each, {said}", flush=True)
            write_json(file, found)
        verdicts = [each["verdict"] for task in tasks.values() for each in task["verdicts"].values()]
        kept[budget]["counts"] = {kind: verdicts.count(kind) for kind in ("right", "wrong", UNCLEAR, "not tuned")}
        write_json(file, found)
        print(budget, kept[budget]["counts"], flush=True)
    PAGE.write_text(written(PAGE.read_text(), found, load("rate-search")))
    COMPARISONS.write_text(counted(COMPARISONS.read_text(), found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
