"""Adds seeds to every cell of a comparison at equal tuning, with the options that its trials chose.

    python benchmarks/more_seeds.py equal-resnet 10 --data DIR

All cells get them, whatever came of those before, and the file says which commit added them. Then
`python benchmarks/equal_tuning.py` writes the page.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from bighorn.cli.config import RunConfig
from bighorn.cli.environment import provenance
from bighorn.cli.files import write_json
from bighorn.cli.tasks import load
from bighorn.cli.trials import make
from equal_tuning import RESULTS, cells_of
from equal_tuning import load as load_file
from evidence import Repeat, wrong_data


def run(config: RunConfig, metric: str) -> dict[str, Any]:
    """Return a run of the key "more", which leaves the planned runs and what was computed of them as they were."""
    trial = make(config, load(config.task, config.data), "test", evaluations=1)
    loss = trial.loss if math.isfinite(trial.loss) else None
    value = loss if metric == "loss" else trial.value
    return {"seed": config.seed, metric: value, "loss": loss, "seconds": round(trial.seconds, 3)}


def main(study: str, count: int, data: str | None, processes: int) -> None:
    """Make the runs and write the file."""
    about = provenance(f"python benchmarks/more_seeds.py {study} {count} --data DIR")
    saved = load_file(study)
    cells = [cell for row in cells_of(study).values() for cell in row]
    repeats = [Repeat(study, cell, cell.config(data), cell.new_seeds(count)) for cell in cells]
    if message := wrong_data(study, repeats[0]):
        raise SystemExit(message)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [
            [pool.submit(run, replace(each.config, seed=seed), each.cell.metric) for seed in each.seeds]
            for each in repeats
        ]
        found = {(each.cell.name, each.cell.batch): runs for each, runs in zip(repeats, futures, strict=True)}
        for cell in saved["cells"]:
            runs = found[cell["name"], cell["config"]["batch_size"]]
            cell["more"] = cell.get("more", []) + [each.result() for each in runs]
            print(cell["name"], cell["config"]["batch_size"], len(cell["more"]), "more", flush=True)
    saved["more_seeds"] = [*saved.get("more_seeds", []), {"seeds": count, **about}]
    write_json(RESULTS / f"{study}.json", saved)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("count", type=int)
    parser.add_argument("--data")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    main(given.study, given.count, given.data, given.processes)
