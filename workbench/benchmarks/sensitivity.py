"""The effect of changing an option of a tuned optimizer: the last table in results/equal-tuning.md.

    python workbench/benchmarks/sensitivity.py STUDY TEXT_FILE JSON

Each optimizer has the options that its trials in STUDY chose at the smallest batch, then one of
:data:`CHANGES`, with the same five seeds. Spikes are counted, too: the steps whose loss is a fifth above the mean of
the ten steps before. With the file of an interrupted study at the same commit, only the missing runs are made.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bighorn_workbench.builtin_tasks import fingerprint, load
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.errors import InputError
from bighorn_workbench.files import write_json
from bighorn_workbench.run import DivergedError, Run
from bighorn_workbench.tasks import defaults
from equal_tuning import cells_of

NAMES = {"equal-characters": ("adamw", "lamb", "came", "adafactor"), "equal-gpt": ("nesterov", "lars")}
"""The optimizers by study: the smaller GPT's has neither momentum nor LARS."""

SEEDS = range(1, 6)

EPS = {
    "adamw": ("eps=1e-6", "eps=1e-4"),
    "lamb": ("eps=1e-4", "eps=1e-2"),
    "came": ("eps=(1e-30, 1e-14)", "eps=(1e-30, 1e-12)"),
    "adafactor": ("eps=(1.2e-5, 1e-3)", "eps=(1.2e-3, 1e-3)"),
    "lars": ("eps=1e-6", "eps=1e-4"),
}
"""A hundred and ten thousand times the default eps: of CAME its second one, of Adafactor its first."""

CHANGES = (
    "none",
    *(f"rate x {factor}" for factor in (2, 4, 8)),
    "no warm-up",
    "eps x 100",
    "eps x 10,000",
    "bf16",
    "bf16, stochastic",
)
"""In bf16 are weights, gradients and, of torch's optimizers, the state. Torch's round to the nearest alone."""

OURS = ("lamb", "came", "lars")
WINDOW, SPIKE = 10, 1.2


def changed(name: str, tuned: RunConfig, change: str) -> RunConfig | None:
    """Return the options of a run, or None if the optimizer has no such option.

    Example:
        >>> changed("adamw", RunConfig(lr=0.1), "rate x 2").lr
        0.2
    """
    kind, _, factor = change.partition(" x ")
    if kind == "rate":
        assert tuned.lr is not None
        return replace(tuned, lr=tuned.lr * int(factor))
    if kind == "eps":
        return _with(tuned, EPS[name][factor != "100"]) if name in EPS else None
    if kind == "no warm-up":
        return replace(tuned, warmup="0")
    if kind == "bf16, stochastic":
        return _with(replace(tuned, precision="bf16"), "weight_rounding=stochastic") if name in OURS else None
    return replace(tuned, precision=kind) if kind == "bf16" else tuned


def _with(config: RunConfig, option: str) -> RunConfig:
    return replace(config, optimizer_option=(*config.optimizer_option, option))


def spikes(losses: list[float]) -> int:
    """Return the number of spikes.

    Example:
        >>> spikes([2.0] * 10 + [2.3, 2.5, 2.3])
        1
    """
    return sum(
        losses[step] > SPIKE * statistics.fmean(losses[step - WINDOW : step]) for step in range(WINDOW, len(losses))
    )


def made(config: RunConfig) -> dict[str, Any]:
    """Make a run, and return its loss on test data, which is null if it diverged, and its spikes."""
    task = load(config.task, config.data)
    run = Run(config, task, evaluations=1)
    try:
        while not run.done:
            run.train_step()
        loss = float(run.evaluate()["loss"])
    except DivergedError:
        loss = math.nan
    return {"seed": config.seed, "loss": loss if math.isfinite(loss) else None, "spikes": spikes(run.history.loss)}


def main(study: str, data: str, result: str) -> None:
    """Make all runs that the file does not have, and write each option's when they end."""
    about = provenance(f"python workbench/benchmarks/sensitivity.py {study} TEXT_FILE JSON")
    tuned = {cell.name: cell.config(data) for cell in next(iter(cells_of(study).values())) if cell.name in NAMES[study]}
    configs = {
        (name, change): config
        for name in tuned
        for change in CHANGES
        if (config := changed(name, tuned[name], change)) is not None
    }
    task = load(next(iter(tuned.values())).task, data)
    of = {"description": defaults(task).description.replace(data, "FILE"), "sha256": fingerprint(task, 1)}
    path = Path(result)
    before = json.loads(path.read_text()) if path.exists() else {}
    this = {"command": about["command"], "commit": about["commit"], "data": of}
    cells: list[dict[str, Any]] = before["changed"] if this.items() <= before.items() else []
    for cell in cells:
        print(f"{path} has {cell['name']}, {cell['change']}", flush=True)
        del configs[cell["name"], cell["change"]]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        futures = {
            key: [pool.submit(made, replace(config, seed=seed)) for seed in SEEDS] for key, config in configs.items()
        }
        try:
            for (name, change), runs in futures.items():
                found = [run.result() for run in runs]
                options = {key: value for key, value in asdict(configs[name, change]).items() if key != "data"}
                cells.append({"name": name, "change": change, "config": options, "runs": found})
                write_json(path, {**about, "data": of, "changed": cells})
                print(name, change, *(run["loss"] for run in found), flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=NAMES)
    parser.add_argument("data", metavar="TEXT_FILE")
    parser.add_argument("result", metavar="JSON")
    given = parser.parse_args()
    try:
        main(given.study, given.data, given.result)
    except InputError as error:
        sys.exit(f"Error: {error}")
