"""Whether the rates that `bighorn lr-find` suggests are good: on each task of the grid, with five seeds.

    python workbench/benchmarks/rate_search.py GRID JSON   # GRID of rate_grid.py; ten minutes of a core

A suggestion is as good as the nearest rate of the grid, in the mean of its test metric, beside the best rate's.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bighorn_workbench.builtin_tasks import load
from bighorn_workbench.builtin_tasks.trial import held_out
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.lr_find import SearchConfig, find
from bighorn_workbench.metrics import is_share
from rate_grid import PLACE

SEEDS, NEAR = range(5), 0.1
"""The seeds, and by how much a good suggestion is worse than the best rate, at most."""

loaded = cache(load)


def suggested(place: str, name: str, seed: int) -> float:
    """Return the suggestion for an optimizer."""
    task = loaded(place)
    config = replace(RunConfig(task=place, optimizer=name, threads=1).resolved(task), seed=seed)
    return find(config, held_out(task), SearchConfig().span(name)).lr


def loss_of(grid: dict[str, list[float | None]], metric: str, lr: float | None = None) -> float:
    """Return the mean of the nearest rate of a grid, or of the best one: an error, or another metric that is lower.

    JSON has null for the infinite metric of a run that diverged.
    """
    means = {
        float(rate): statistics.fmean(math.inf if value is None else value for value in values)
        for rate, values in grid.items()
    }
    losses = {rate: 1 - mean if is_share(metric) else mean for rate, mean in means.items()}
    return min(losses.values()) if lr is None else losses[min(losses, key=lambda rate: abs(math.log(rate / lr)))]


def cell(task: dict[str, Any], name: str, rates: list[float]) -> dict[str, Any]:
    """Return the results of an optimizer's suggestions on a task."""
    metric, grid = task["metric"], task["grid"][name]
    best, found = loss_of(grid, metric), [loss_of(grid, metric, lr) for lr in rates]
    share = is_share(metric)
    good = [1 - each >= (1 - NEAR) * (1 - best) if share else each <= (1 + NEAR) * best for each in found]
    return {
        "suggested": rates,
        "best": best,
        "found": found,
        "good": good,
        "strictly": [each <= (1 + NEAR) * best for each in found],
    }


def main(grid_file: Path, file: Path) -> None:
    """Search for each cell, and write the results."""
    tasks = json.loads(grid_file.read_text())["tasks"]
    about = provenance(f"python {' '.join(sys.argv)}")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        runs = {
            (task, name): [pool.submit(suggested, f"{PLACE}:{task}", name, seed) for seed in SEEDS]
            for task, saved in tasks.items()
            for name in saved["grid"]
        }
        cells = {
            f"{task}, {name}": cell(tasks[task], name, [future.result() for future in futures])
            for (task, name), futures in runs.items()
        }
    write_json(file, {**about, "suggestions": cells, **summary(cells)})
    print(summary(cells))


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the shares of suggestions and of cells that are near the best metric, or the least error."""
    return {
        f"{what} {kind}": statistics.fmean(
            (statistics.fmean(each[kind]) if what == "suggestions" else statistics.fmean(each[kind]) >= 0.8)
            for each in cells.values()
        )
        for what in ("suggestions", "cells")
        for kind in ("good", "strictly")
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
