"""How often `bighorn compare` names a better optimizer: where none is, and where one is by a known difference.

    python workbench/benchmarks/null_verdicts.py JSON [STUDIES]   # 200 studies of each, less than a minute

In place of runs, each trial and each seed has a value of noise of standard deviation 1, in the metric's own units. The
command's own code chooses the points, selects among them and writes the sentences. In half of the studies SGD has
:data:`PLANTED` more than AdamW.
"""

from __future__ import annotations

import math
import random
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
from scipy.stats import binom

from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.compare import CompareConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.space import Entry
from bighorn_workbench.trials import Cell, Trial, best_of, configured
from bighorn_workbench.verdict import LEVEL, verdicts
from result_files import ROOT

STUDIES, TRIALS, SEEDS = 200, 8, 5
PLANTED = 1.0
"""The planted difference, in standard deviations between seeds."""

BASELINE, BETTER = "adamw", "sgd"
CLEAR = re.compile(rf"At batch \d+ {BETTER} \([^)]*\) is (ahead of|behind) {BASELINE} ")
PAGE = ROOT / "docs" / "command-line.md"
FIGURES = re.compile(r"(<!-- null verdicts -->\n).*?(<!-- end of null verdicts -->)", re.DOTALL)


def trial(entry: Entry, point: dict[str, float], seed: int, noise: random.Random, planted: float) -> Trial:
    """Return a trial or a final run whose metric is noise."""
    config = configured(entry.base, point, seed)
    return Trial(config, noise.gauss(0.0, 1.0) + planted, math.nan, 1, None, 0.0, 0, ())


def cell(entry: Entry, noise: random.Random, planted: float) -> Cell:
    """Return a cell that was searched as the command does."""
    points = entry.scan()
    tuning = [trial(entry, point, 0, noise, planted) for point in points]
    points += entry.around(best_of(tuning, higher=True).config.lr or 1.0, TRIALS - len(points))
    tuning += [trial(entry, point, 0, noise, planted) for point in points[len(tuning) :]]
    best = best_of(tuning, higher=True)
    final = [trial(entry, points[tuning.index(best)], 1 + seed, noise, planted) for seed in range(SEEDS)]
    tuned = tuple((each.config.lr or 0.0, each.value) for each in tuning)
    return Cell(
        entry.name,
        entry.base.batch_size or 0,
        tuned,
        best.config.lr or 0.0,
        tuple(final),
        tuple(tuning),
        metric="score",
        space=entry.space,
    )


def answer(study: int, planted: float, entries: list[Entry]) -> str:
    """Return what a study says of SGD: "ahead of", "behind", "unclear" or "not tuned"."""
    noise = random.Random(f"{study} {planted}")
    cells = [cell(entry, noise, planted * (entry.name == BETTER)) for entry in entries]
    if not all(each.is_tuned for each in cells):
        return "not tuned"
    clear = CLEAR.match(verdicts(cells)[0])
    return clear[1] if clear else "unclear"


def written(page: str, found: dict[str, Any]) -> str:
    """Return the page with both figures."""
    null, planted = found["null"], found["planted"]
    judged = [sum(each.values()) - each["not tuned"] for each in (null, planted)]
    low, high = (int(count) for count in binom.interval(0.95, judged[0], 1 - LEVEL))
    text = (
        f"Where the metric is noise, {null['ahead of'] + null['behind']} of {judged[0]} comparisons named a better "
        f"optimizer. At a rate of {1 - LEVEL:.0%} it would be {low} to {high}, 19 times out of 20. Where one "
        "optimizer is better by the standard deviation between seeds, "
        f"{planted['ahead of']} of {judged[1]} comparisons named it and {planted['behind']} named the other one, with "
        f"{SEEDS} seeds each."
    )
    return FIGURES.sub(lambda match: match[1] + "\n".join(textwrap.wrap(text, 138)) + "\n" + match[2], page)


def main(file: Path, studies: int = STUDIES) -> None:
    """Make all studies, and write the file and the page."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    entries = CompareConfig(optimizers=f"{BASELINE},{BETTER}", batch_sizes="256").entries(Digits())
    found: dict[str, Any] = provenance(f"python workbench/benchmarks/null_verdicts.py JSON {studies}")
    for kind, planted in (("null", 0.0), ("planted", PLANTED)):
        counts = Counter(answer(study, planted, entries) for study in range(studies))
        found[kind] = {word: counts[word] for word in ("ahead of", "behind", "unclear", "not tuned")}
        print(kind, found[kind], flush=True)
    write_json(file, {**found, "trials": TRIALS, "seeds": SEEDS, "difference": PLANTED})
    PAGE.write_text(written(PAGE.read_text(), found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
