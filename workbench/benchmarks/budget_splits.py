"""How to divide a budget into trials and seeds, by studies that are drawn from an exhaustive grid of rates.

    python workbench/benchmarks/budget_splits.py JSON [STUDIES]   # 60 studies of each task, six minutes

In place of runs, each has the value of its rate and seed on the grid of `rate_grid.py`, between two rates on the line
between their values. More seeds than the grid has are drawn from the normal distribution with the means of its seeds
and the covariances of all rates and optimizers; trials and repeats, too. The command's own code chooses the rates and
decides which differences are clear. One is right if it has the sign of the difference between the best means on the
grid, and wrong otherwise.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import optuna

from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.compare import MOST_TRIALS, SEEDS, CompareConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.metrics import is_share
from bighorn_workbench.search import Plan
from bighorn_workbench.trials import LEAST, MOST_REPEATS, Cell, Trial, best_of, configured, ordered, repeats
from bighorn_workbench.verdict import MOST_SEEDS, Pair
from rate_grid import SEEDS as DRAWN
from rate_grid import SPANS
from rate_search import loss_of
from result_files import RESULTS, load

STUDIES = 60
BUDGETS = (13, 18, 25, 56, 105, 160)
"""Runs of each optimizer."""

FINALS = (SEEDS, 8, 13, MOST_SEEDS, 40)


def most_trials(runs: int) -> int:
    """Return the most trials whose repeats fit into some runs, too."""
    return max(count for count in range(runs + 1) if count + math.prod(repeats(count)) <= runs)


SPLITS = {
    (runs, seeds, repeated): most_trials(runs - seeds) if repeated else min(runs - seeds, MOST_TRIALS)
    for runs in BUDGETS
    for seeds in FINALS
    for repeated in (False, True)
    if runs - seeds >= LEAST
}
"""The trials of each budget by its final runs, without and with repeats."""

BASELINE = "adamw"
KINDS = ("right", "wrong", "unclear", "not tuned")
COMPARISONS = len(SPANS) - 1
ENTRIES = {
    entry.name: replace(entry, space={"lr": SPANS[entry.name]})
    for entry in CompareConfig(optimizers=",".join(SPANS), batch_sizes="256").entries(Digits())
}
TASKS = load("rate-grid")["tasks"]
PAGE = RESULTS / "own-tasks.md"
TABLE = re.compile(r"(<!-- splits -->\n).*?(<!-- end of splits -->)", re.DOTALL)


def chosen() -> Iterator[tuple[int, int]]:
    """Yield the runs and the seeds of growing budgets of `compare`."""
    plan, split = Plan((), MOST_TRIALS, SEEDS, MOST_SEEDS, None, Path(), ""), (LEAST, SEEDS)
    while True:
        trials, seeds = split
        yield trials + math.prod(repeats(trials)) + seeds, seeds
        if (more := plan.after(*split)) is None:
            return
        split = more


@cache
def later(name: str, best: float) -> list[float]:
    """Return the rates of all trials after the scan."""
    return [point["lr"] for point in ENTRIES[name].around(best, MOST_TRIALS)]


@cache
def between(task: str, name: str, lr: float) -> list[float]:
    """Return the values of the grid's seeds at a rate."""
    grid = TASKS[task]["grid"][name]
    rates = [math.log(float(rate)) for rate in grid]
    rows = [[math.inf if value is None else value for value in values] for values in grid.values()]
    above = min(max(bisect(rates, math.log(lr)), 1), len(rates) - 1)
    part = (math.log(lr) - rates[above - 1]) / (rates[above] - rates[above - 1])
    pairs = zip(rows[above - 1], rows[above], strict=True)
    return [low if part == 0 else high if part == 1 else low + part * (high - low) for low, high in pairs]


@cache
def ahead(task: str, name: str) -> float:
    """Return how much better the best mean of an optimizer is than the baseline's."""
    base, own = (loss_of(TASKS[task]["grid"][each], TASKS[task]["metric"]) for each in (BASELINE, name))
    return base - own


class Study:
    """A study of a task whose runs are drawn from the grid."""

    def __init__(self, task: str, number: int) -> None:
        noise = random.Random(f"{task} {number}")
        self.task, self.metric = task, TASKS[task]["metric"]
        self.higher = is_share(self.metric)
        runs = 1 + max(FINALS) + MOST_REPEATS
        self.weights = [[noise.gauss(0.0, 1.0) for _ in range(DRAWN)] for _ in range(runs)]
        self.tuning = {name: self._tuned(name) for name in SPANS}

    def _tuned(self, name: str) -> list[Trial]:
        trials = [self.run(name, point["lr"], 0) for point in ENTRIES[name].scan()]
        best = best_of(trials, self.higher).config.lr or 1.0
        return [*trials, *(self.run(name, lr, 0) for lr in later(name, best))]

    def run(self, name: str, lr: float, seed: int) -> Trial:
        """Return a run at a rate; all trials have seed 0, and repeats the seeds after the final runs' seeds."""
        values = between(self.task, name, lr)
        mean = statistics.fmean(values)
        parts = zip(self.weights[seed], values, strict=True)
        value, loss = mean + sum(weight * (each - mean) for weight, each in parts) / math.sqrt(DRAWN - 1), math.nan
        if not math.isfinite(value):
            value, loss = -math.inf if self.higher else math.inf, math.inf
        return Trial(configured(ENTRIES[name].base, {"lr": lr}, seed), value, loss, 1, None, 0.0, 0, ())

    def cell(self, name: str, trials: int, seeds: int, repeated: bool) -> Cell:
        """Return a cell with the first of its trials and seeds."""
        tuning = tuple(self.tuning[name][:trials])
        count, several = repeats(trials) if repeated else (0, 0)
        again = tuple(
            self.run(name, each.config.lr or 1.0, 1 + max(FINALS) + seed)
            for each in ordered(tuning, self.higher)[:count]
            for seed in range(several)
        )
        lr = best_of(tuning, self.higher, again).config.lr or 1.0
        final = tuple(self.run(name, lr, seed) for seed in range(1, 1 + seeds))
        tuned = tuple((each.config.lr or 0.0, each.value) for each in tuning)
        return Cell(name, 256, tuned, lr, final, tuning, self.metric, self.higher, ENTRIES[name].space, again)

    def verdicts(self, trials: int, seeds: int, repeated: bool) -> Iterator[str]:
        """Yield "right", "wrong", "unclear" or "not tuned" for each comparison."""
        cells = {name: self.cell(name, trials, seeds, repeated) for name in SPANS}
        base = cells.pop(BASELINE)
        for name, cell in cells.items():
            pair = Pair(cell, base, COMPARISONS)
            clear = "right" if pair.points[0] * ahead(self.task, name) > 0 else "wrong"
            yield clear if pair.is_clear else "unclear" if pair.is_tuned else "not tuned"


def written(page: str, found: Mapping[str, Any]) -> str:
    """Return the page with the table."""
    counts, bold = {tuple(each["split"]): each for each in found["splits"]}, set(chosen())
    taken = {runs: max(pair for pair in bold if pair[0] <= runs)[1] for runs in BUDGETS}
    lines = ["| runs | repeats | " + " | ".join(f"{seeds} seeds" for seeds in FINALS) + " |"]
    lines.append("|---" * (2 + len(FINALS)) + "|")
    for runs, repeated in product(BUDGETS, (False, True)):
        cells = [str(runs), "yes" if repeated else "no"]
        for seeds in FINALS:
            count, mark = counts.get((runs, seeds, repeated)), "**" * (repeated and seeds == taken[runs])
            cells.append(f"{mark}{share(count, 'right')}, {share(count, 'wrong')}{mark}" if count else "")
        lines.append(f"| {' | '.join(cells)} |")
    return TABLE.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], page)


def share(count: Mapping[str, Any], kind: str) -> str:
    """Return the share of a kind of verdict among all comparisons."""
    return f"{count[kind] / sum(count[each] for each in KINDS):.0%}"


def main(file: Path, studies: int = STUDIES) -> None:
    """Draw all studies, and write the file and the page."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = provenance(f"python workbench/benchmarks/budget_splits.py JSON {studies}")
    counts: dict[tuple[int, int, bool], Counter[str]] = {split: Counter() for split in SPLITS}
    for task in TASKS:
        for number in range(studies):
            study = Study(task, number)
            for (runs, seeds, repeated), trials in SPLITS.items():
                counts[runs, seeds, repeated].update(study.verdicts(trials, seeds, repeated))
    splits = [
        {"split": split, "trials": SPLITS[split], **{kind: count[kind] for kind in KINDS}}
        for split, count in counts.items()
    ]
    write_json(file, {**found, "studies": studies, "splits": splits})
    PAGE.write_text(written(PAGE.read_text(), json.loads(file.read_text())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
