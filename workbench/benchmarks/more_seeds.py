"""Adds seeds to every cell of a comparison at equal tuning that has fewer, with the options that its trials chose.

    python workbench/benchmarks/more_seeds.py equal-resnet 15 --data DIR

All cells then have the same number, independent of earlier results; the file names the commit that added seeds. Then
`python workbench/benchmarks/equal_tuning.py` writes the page.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from bighorn_workbench.builtin_tasks import load
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.trials import make
from equal_tuning import CLASSES, Cell
from evidence import Repeat, results, wrong_data
from result_files import RESULTS
from result_files import load as load_file


def run(config: RunConfig) -> dict[str, Any]:
    """Return a run of the key "more", which leaves the planned runs and the figures from them unchanged."""
    task = load(config.task, config.data)
    trial = make(config, task, "test", evaluations=1)
    loss = trial.loss if math.isfinite(trial.loss) else None
    return {"seed": config.seed, task.metric: trial.value, "loss": loss, "seconds": round(trial.seconds, 3)}


def main(study: str, seeds: int, data: str | None, processes: int) -> None:
    """Make the runs and write the file."""
    about = provenance(f"python workbench/benchmarks/more_seeds.py {study} {seeds} --data DIR")
    saved = load_file(study)
    cells = [Cell(each, CLASSES.get(study, 10)) for each in saved["cells"]]
    short_of_seeds = [cell for cell in cells if len(cell.finals) < seeds]
    repeats = [
        Repeat(study, cell, cell.config(data), cell.new_seeds(seeds - len(cell.finals))) for cell in short_of_seeds
    ]
    if not repeats:
        raise SystemExit(f"All cells of {study} have {seeds} seeds.")
    if message := wrong_data(study, repeats[0]):
        raise SystemExit(message)
    for repeat, runs in zip(repeats, results(repeats, run, processes), strict=True):
        cell = repeat.cell
        cell.saved["more"] = cell.saved.get("more", []) + runs
        print(cell.name, cell.batch, len(runs), "more", flush=True)
    names = list(dict.fromkeys(cell.name for cell in short_of_seeds))
    saved["more_seeds"] = [*saved.get("more_seeds", []), {"seeds": seeds, "optimizers": names, **about}]
    write_json(RESULTS / f"{study}.json", saved)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("seeds", type=int)
    parser.add_argument("--data")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    main(given.study, given.seeds, given.data, given.processes)
