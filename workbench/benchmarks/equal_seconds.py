"""Times the steps of the comparisons at equal tuning, on an idle machine.

    python workbench/benchmarks/equal_seconds.py MNIST_DIR TEXT_FILE [STUDY ...]

At each batch size the optimizers take turns, one process with one thread, with the options that their trials chose: the
first steps of a run, the first few of them left out, three times. The runs themselves shared the machine with other
programs. `python workbench/benchmarks/equal_tuning.py` then writes the column.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

from bighorn_workbench.builtin_tasks import load
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.run import DivergedError, Run
from bighorn_workbench.tasks import Task
from equal_tuning import SECONDS, cells_of
from evidence import STUDIES
from result_files import RESULTS
from result_files import load as load_file

ROUNDS, LEFT_OUT, STEPS = 3, 4, 28


def step_seconds(config: RunConfig, task: Task) -> float:
    """Return the median time of a step, the evaluations left out."""
    times: list[float] = []
    run = Run(config, task, evaluations=1)
    try:
        while len(times) < STEPS and not run.done:
            started = time.perf_counter()
            run.train_step()
            times.append(time.perf_counter() - started)
    except DivergedError:
        pass
    return statistics.median(times[LEFT_OUT:])


def main(mnist: str, text: str, *studies: str) -> None:
    """Time all cells of some comparisons, or of all, and write them."""
    about = provenance(f"python workbench/benchmarks/equal_seconds.py {' '.join(['MNIST_DIR', 'TEXT_FILE', *studies])}")
    found = load_file(SECONDS) if studies else {}
    for study in studies or STUDIES:
        data = {"mnist": mnist, "text": text, None: None}[STUDIES[study]]
        rows = cells_of(study)
        task: Any = load(next(iter(rows.values()))[0].config(data).task, data)
        seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for batch, row in rows.items():
            for turn in range(ROUNDS):
                for cell in row:
                    seconds[cell.name][batch].append(step_seconds(replace(cell.config(data), seed=turn), task))
            print(study, batch, {cell.name: seconds[cell.name][batch] for cell in row}, flush=True)
        found[study] = {**about, "steps": seconds}
    write_json(RESULTS / f"{SECONDS}.json", found)


if __name__ == "__main__":
    main(*sys.argv[1:])
