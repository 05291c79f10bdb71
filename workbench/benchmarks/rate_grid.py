"""An exhaustive grid of learning rates for tasks outside the workbench, to compare its answers with.

python workbench/benchmarks/rate_grid.py JSON   # 24 rates x 5 seeds x 3 optimizers x 12 tasks: 40 minutes of a core
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bighorn_workbench.builtin_tasks import load
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.trials import make
from unseen_tasks import UNSEEN

PLACE = Path(__file__).with_name("unseen_tasks.py")
SPANS = {"adamw": (0.0001, 0.3), "lamb": (0.002 / 3, 1.5), "came": (0.0001 / 3, 0.09)}
RATES, SEEDS = 24, 5

loaded = cache(load)


def rates(name: str, count: int = RATES) -> list[float]:
    """Return rates evenly in the logarithm."""
    low, high = SPANS[name]
    return [float(f"{low * (high / low) ** (index / (count - 1)):.3g}") for index in range(count)]


def run(place: str, name: str, lr: float, seed: int) -> float:
    """Return the metric on test data after training with defaults, except for the rate."""
    task = loaded(place)
    config = replace(RunConfig(task=place, threads=1, optimizer=name).resolved(task), lr=lr, seed=seed)
    return make(config, task, "test", evaluations=1).value


def main(file: Path) -> None:
    """Fill the grid, task by task; tasks that the file has already are kept."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found |= {**provenance(f"python {sys.argv[0]} {file}"), "tasks": found.get("tasks", {})}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for each in UNSEEN:
            if each.__name__ in found["tasks"]:
                continue
            started, place = time.perf_counter(), f"{PLACE}:{each.__name__}"
            futures = {
                name: {
                    lr: [pool.submit(run, place, name, lr, seed) for seed in range(1, SEEDS + 1)] for lr in rates(name)
                }
                for name in SPANS
            }
            cells = {
                name: {f"{lr:g}": [future.result() for future in runs] for lr, runs in grid.items()}
                for name, grid in futures.items()
            }
            found["tasks"][each.__name__] = {"metric": each.metric, "grid": cells}
            write_json(file, found)
            best = {
                name: (max if each.higher_is_better else min)((sum(v) / len(v), lr) for lr, v in grid.items())
                for name, grid in cells.items()
            }
            print(f"{each.__name__}: {time.perf_counter() - started:.0f} s, {best}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
