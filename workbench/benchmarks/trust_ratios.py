"""The trust ratios of LAMB with states in fewer bits, beside those with float32, over a training.

    python workbench/benchmarks/trust_ratios.py [--task text] [--steps 200] [--seeds 3] [--jobs 2]

The same training for each, by its own gradients, so that differences grow as rounding errors do in any training: a
fourth run shows how much of them is not due to the states, in float32 too, whose weights started a millionth off.
Relative differences are of one matrix in one step from float32's. Writes
workbench/benchmarks/results/trust-ratios.json and results/trust-ratios.svg; with --picture only the latter, from the
former.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

import plots
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks import TASKS, fingerprint
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.run import Run
from bighorn_workbench.tasks import defaults
from result_files import RESULTS, load

BATCH_SIZES = {"digits": 64, "text": 16}
RUNS = {"float32": "fp32", "int8": "int8", "float32, moved": "fp32"}
"""Names of runs, and their states."""
MOVED = 1e-6

Ratios = list[list[float]]
"""By step and matrix."""


def trained(task: str, steps: int, name: str, seed: int) -> tuple[Ratios, float]:
    """The trust ratios of a run, and its mean loss over the last tenth."""
    config = RunConfig(
        task, optimizer="lamb", state_dtype=RUNS[name], batch_size=BATCH_SIZES[task], steps=steps, seed=seed, threads=1
    )
    made = TASKS[task](None)
    run = Run(config.resolved(made), made)
    if name == "float32, moved":
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in run.model.parameters():
                param.mul_(1 + MOVED * torch.randn(param.shape, generator=noise))
    ratios = []
    while not run.done:
        run.train_step()
        assert run.metric is not None
        ratios.append(run.metric.tolist())
    return ratios, statistics.fmean(run.history.loss[-max(1, steps // 10) :])


def differences(ratios: Ratios, exact: Ratios) -> Ratios:
    """Relative ones."""
    return [[abs(a / b - 1) for a, b in zip(*rows, strict=True)] for rows in zip(ratios, exact, strict=True)]


def over_seeds(values: list[list[float]]) -> list[float]:
    """The median of several runs in each step."""
    return [statistics.median(each) for each in zip(*values, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="text", choices=tuple(BATCH_SIZES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--picture", action="store_true")
    arguments = parser.parse_args()
    if not arguments.picture:
        measure(arguments)
    files.write_text(RESULTS / "trust-ratios.svg", picture(load("trust-ratios")))


def measure(arguments: argparse.Namespace) -> None:
    about = provenance(
        f"python workbench/benchmarks/trust_ratios.py --task {arguments.task} --steps {arguments.steps} "
        f"--seeds {arguments.seeds}"
    )
    results: dict[str, Any] = {}
    exact: list[Ratios] = []
    run = partial(trained, arguments.task, arguments.steps)
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        found_in = {name: pool.map(run, [name] * arguments.seeds, range(arguments.seeds)) for name in RUNS}
        trainings = {name: list(runs) for name, runs in found_in.items()}
    for name, runs in trainings.items():
        ratios = [each for each, _ in runs]
        exact = exact or ratios
        off = [differences(*pair) for pair in zip(ratios, exact, strict=True)]
        every = [value for run in off for row in run for value in row]
        results[name] = {
            "state_dtype": RUNS[name],
            "last_losses": [loss for _, loss in runs],
            "difference_median": statistics.median(every),
            "difference_max": max(every),
            "median_ratio": over_seeds([[statistics.median(row) for row in run] for run in ratios]),
            "largest_difference": over_seeds([[max(row) for row in run] for run in off]),
        }
        print(name, {key: value for key, value in results[name].items() if not isinstance(value, list)}, flush=True)
    task = TASKS[arguments.task](None)
    result = {
        **about,
        "data": {"description": defaults(task).description, "sha256": fingerprint(task, 1)},
        "batch_size": BATCH_SIZES[arguments.task],
        "moved": MOVED,
        "runs": results,
    }
    files.write_json(RESULTS / "trust-ratios.json", result)


def picture(saved: dict[str, Any]) -> str:
    """The median trust ratio of each run by step, and its largest difference from float32."""
    middle, largest = [], []
    for name, run in saved["runs"].items():
        steps = list(range(1, len(run["median_ratio"]) + 1))
        middle.append((name, steps, run["median_ratio"]))
        # float32 has no difference from itself: its line is empty, and keeps its colour.
        largest.append((name, *((steps, run["largest_difference"]) if name != "float32" else ([], []))))
    panels = [("trust ratio, median of the matrices", middle), ("its largest relative difference", largest)]
    return plots.standalone(plots.side_by_side(panels, "step"))


if __name__ == "__main__":
    main()
