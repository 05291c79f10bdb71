"""The unseen tasks at each optimizer's best known options: by a longer search than `bighorn compare` makes, and by it.

    python workbench/benchmarks/tuned_reference.py JSON [VERDICTS]   # of unseen_verdicts.py; 80 minutes of two cores

80 trials of all options by TPE (Bergstra et al., NeurIPS 2011), the first of them the scan of `compare`; the ten best
with eight more seeds. The options that `compare` has chosen are run with the same nine seeds. The best by its mean on
validation data is run on test data with 40 further seeds.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna

from bighorn_workbench.builtin_tasks.trial import held_out
from bighorn_workbench.compare import CompareConfig
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.space import Entry
from bighorn_workbench.tasks import defaults
from bighorn_workbench.trials import configured, make
from rate_grid import PLACE, SPANS, loaded
from unseen_tasks import UNSEEN

TRIALS, FINALISTS = 80, 10
SEARCHED, TESTED = range(1000, 1009), range(2000, 2040)
"""The seeds on validation data, of which trials have the first one, and those on test data."""

OPTIONS = "lr", "weight_decay", "warmup", "optimizer_option"


def entry_of(name: str, optimizer: str) -> Entry:
    """Return the cell of an optimizer on a task."""
    place = f"{PLACE}:{name}"
    [entry] = CompareConfig(task=place, optimizers=optimizer).entries(loaded(place))
    return entry


def values(config: RunConfig, seeds: Sequence[int], split: str) -> list[float]:
    """Return the metric of runs; infinities are runs that diverged."""
    task = loaded(config.task)
    task = held_out(task) if split == "validation" else task
    return [make(replace(config, seed=seed), task, split, evaluations=1).value for seed in seeds]


def judged(config: RunConfig) -> dict[str, Any]:
    """Return options with their mean on validation data, the worst infinity if a run diverged."""
    found = values(config, SEARCHED, "validation")
    worst = -math.inf if defaults(loaded(config.task)).higher_is_better else math.inf
    mean = fmean(found) if all(map(math.isfinite, found)) else worst
    return {"options": {name: getattr(config, name) for name in OPTIONS}, "validation": mean}


def searched(name: str, optimizer: str) -> list[dict[str, Any]]:
    """Return the ten best options of a search."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    entry = entry_of(name, optimizer)
    sign = -1 if defaults(loaded(entry.base.task)).higher_is_better else 1
    search = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True))
    for point in entry.scan():
        search.enqueue_trial(point)

    def objective(trial: optuna.Trial) -> float:
        point = {option: trial.suggest_float(option, *span, log=True) for option, span in entry.space.items()}
        return sign * values(configured(entry.base, point, 0), SEARCHED[:1], "validation")[0]

    search.optimize(objective, n_trials=TRIALS)
    best = sorted(search.trials, key=lambda trial: trial.values[0])[:FINALISTS]
    return [judged(configured(entry.base, trial.params, 0)) for trial in best]


def tuned(name: str, optimizer: str, kept: dict[str, Any] | None, chosen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best options of the search, or those that were kept, and of ``compare``, with their test data."""
    entry = entry_of(name, optimizer)
    found = searched(name, optimizer) if kept is None else [kept]
    configs = [replace(entry.base, **{**each, "optimizer_option": tuple(each["optimizer_option"])}) for each in chosen]
    found += map(judged, configs)
    sign = -1 if defaults(loaded(entry.base.task)).higher_is_better else 1
    best = min(found, key=lambda each: sign * each["validation"])
    by = "the search" if found.index(best) < len(found) - len(chosen) else "compare"
    if "test" in best:
        return best
    options = {**best["options"], "optimizer_option": tuple(best["options"]["optimizer_option"])}
    return {**best, "by": by, "test": values(replace(entry.base, **options), TESTED, "test")}


def main(file: Path, verdicts: Path | None = None) -> None:
    """Search for each task that the file lacks, and run what `compare` has chosen for each."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found |= {**provenance(f"python {' '.join(sys.argv)}"), "tasks": found.get("tasks", {})}
    budgets = [] if verdicts is None else json.loads(verdicts.read_text())["budgets"].values()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        futures = {}
        for name in [each.__name__ for each in UNSEEN]:
            finals = {each: [of["tasks"][name]["cells"][each]["final"][0] for of in budgets] for each in SPANS}
            for each in SPANS:
                chosen = [{option: final[option] for option in OPTIONS} for final in finals[each]]
                kept = found["tasks"].get(name, {}).get(each)
                futures[name, each] = pool.submit(tuned, name, each, kept, chosen)
        for (name, each), future in futures.items():
            found["tasks"].setdefault(name, {})[each] = future.result()
            write_json(file, found)
            best = found["tasks"][name][each]
            print(f"{name}, {each}: {best['validation']:.4g}, by {best['by']}; {fmean(best['test']):.4g}", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
