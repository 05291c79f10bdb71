"""The MNIST table of LAMB's appendix (arXiv:1904.00962v5), made again.

    python workbench/benchmarks/lamb_appendix.py DIR STUDY JSON

LeNet at batch 1,024 with each of the same four rates for every optimizer, by one seed on held-out data; then five seeds
with the best rate, on test data. STUDY keeps every run, and the same command goes on there; JSON is the result, as of
`bighorn compare`. Two processes of the same command share the runs of a STUDY; they take an hour and a half on two
cores.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from bighorn_workbench.builtin_tasks import fingerprint, load
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.optimizers import OPTIMIZERS, Recipe
from bighorn_workbench.search import Plan, Search
from bighorn_workbench.space import Entry
from bighorn_workbench.verdict import chosen, verdicts
from bighorn_workbench.workers import fill

TASK = "workbench/benchmarks/evidence_tasks.py:LeNet"
EPOCHS, SEEDS = 30.0, 5
RATES = (1e-4, 1e-3, 1e-2, 1e-1)
NAMES = {"momentum": "sgd", "adagrad": "adagrad", "adam": "adam", "adamw": "adamw", "lamb": "lamb"}
"""The table's names of optimizers, each with its name on the command line."""

OPTIMIZERS["adagrad"] = Recipe("torch.optim.Adagrad", 0.01, 0.0, {}, {}, torch.optim.Adagrad)


class Grid(Entry):
    """A cell whose trials have the four rates and the optimizer's defaults."""

    def candidates(self, count: int) -> list[dict[str, float]]:
        """Return the rates."""
        return [{"lr": lr} for lr in RATES[:count]]


def search(data: str, study: Path) -> Search:
    """Return the runs of the table."""
    task = load(TASK, data)
    span = {"lr": (min(RATES), max(RATES))}
    base = [RunConfig(TASK, data, optimizer, epochs=EPOCHS, threads=1).resolved(task) for optimizer in NAMES.values()]
    entries = tuple(Grid(name, config, span) for name, config in zip(NAMES, base, strict=True))
    return Search(Plan(entries, len(RATES), SEEDS, SEEDS, None, study, fingerprint(task, 1)), task)


def main(data: str, study: str, result: str) -> None:
    """Make the runs that are not in the study, and write all."""
    about = provenance("python workbench/benchmarks/lamb_appendix.py DIR STUDY JSON")
    found = search(data, Path(study))

    def look() -> None:
        done = [*found.finished().values()]
        name, trial = done[-1]
        print(f"{len(done)} of {found.total}: {name}, lr {trial.config.lr:g}, {trial.value:.2%}", flush=True)

    fill(found, 1, look)
    cells, base = found.cells(), found.plan.entries[0].base
    config = {
        **{name: value for name, value in asdict(base).items() if name in ("task", "epochs", "precision")},
        "optimizers": ", ".join(NAMES),
        "batch_sizes": str(base.batch_size),
        "trials": len(RATES),
        "seeds": SEEDS,
        "space": f"lr of {', '.join(f'{lr:g}' for lr in RATES)}",
        "target": None,
    }
    data_of = {"description": found.task.description, "sha256": found.plan.data}  # type: ignore[attr-defined]
    words = [*verdicts(cells), *chosen(cells)]
    saved = {**about, "config": config, "data": data_of, "cells": [cell.as_json() for cell in cells], "words": words}
    write_json(Path(result), saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
