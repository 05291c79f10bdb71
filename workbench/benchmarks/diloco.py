"""CAME as the outer optimizer of DiLoCo, which takes few steps: as published and with bias_correction, by rate.

    python workbench/benchmarks/diloco.py [--seeds N]

Four workers train the model of the task `digits` on shards of its data, by AdamW with a constant rate, at batch 32.
After every 20 steps the outer optimizer takes the weights minus the mean of the workers' weights as its gradient, and
the workers continue from its weights with their own AdamW states (Douillard et al., arXiv:2311.08105).
A run is an outer optimizer, an outer and an inner rate and a seed; its losses are the outer weights' on the
training data, before the first and after each outer step. `mean of the workers` has no outer optimizer.
Writes workbench/benchmarks/results/diloco.json, and the table in workbench/benchmarks/results/came-rates.md.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bighorn import Came
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.environment import provenance
from result_files import RESULTS

RESULT, PAGE = RESULTS / "diloco.json", RESULTS / "came-rates.md"
TABLE = re.compile(r"(<!-- table of diloco\.json[^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
WORKERS, INNER_STEPS, OUTER_STEPS, BATCH_SIZE = 4, 20, 20, 32
SHOWN = 5, 20
"""The outer steps of the table."""
INNER_RATES = 1e-3, 1e-2
RATES = 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1
MEAN = "mean of the workers"
OUTER: dict[str, tuple[Callable[..., Optimizer], tuple[float, ...]]] = {
    "CAME as published": (Came, RATES),
    "CAME, bias_correction": (lambda params, lr: Came(params, lr=lr, bias_correction=True), RATES),
    MEAN: (torch.optim.SGD, (1.0,)),
}


def losses(task: Digits, make: Callable[..., Optimizer], rate: float, inner_rate: float, seed: int) -> list[float]:
    """Return the loss of the outer weights before the first outer step and after each; it ends if not finite."""
    torch.manual_seed(seed)
    model = task.model()
    workers = [copy.deepcopy(model) for _ in range(WORKERS)]
    inner = [torch.optim.AdamW(worker.parameters(), lr=inner_rate) for worker in workers]
    outer = make(model.parameters(), lr=rate)
    inputs, targets = task.data["train"]
    shards = torch.randperm(len(inputs)).chunk(WORKERS)
    found = [loss_of(task, model)]
    for _ in range(OUTER_STEPS):
        for worker, optimizer, shard in zip(workers, inner, shards, strict=True):
            worker.load_state_dict(model.state_dict())
            for _ in range(INNER_STEPS):
                chosen = shard[torch.randint(len(shard), (BATCH_SIZE,))]
                loss, _ = task.loss(worker, (inputs[chosen], targets[chosen]))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for param, *theirs in zip(model.parameters(), *(w.parameters() for w in workers), strict=True):
                param.grad = param - torch.stack(theirs).mean(0)
        outer.step()
        found.append(loss_of(task, model))
        if not math.isfinite(found[-1]):
            break
    return found


@torch.no_grad()
def loss_of(task: Digits, model: nn.Module) -> float:
    model.eval()
    loss, _ = task.loss(model, task.data["train"])
    model.train()
    return float(loss)


def table(saved: dict[str, Any]) -> str:
    """Return the loss by outer rate as Markdown, medians and ranges over the seeds."""
    lines = [f"| outer optimizer | inner rate | steps | {' | '.join(f'{rate:g}' for rate in RATES)} |"]
    lines.append("|---" * (3 + len(RATES)) + "|")
    for name, inner_rate, step in itertools.product(OUTER, INNER_RATES, SHOWN):
        cells = []
        for rate in RATES if name != MEAN else (1.0,):
            mine = (name, inner_rate, rate)
            runs = [run for run in saved["runs"] if (run["optimizer"], run["inner_lr"], run["lr"]) == mine]
            values = sorted(run["losses"][step] if step < len(run["losses"]) else math.inf for run in runs)
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f}-{values[-1]:.2f})")
        cells += [""] * (len(RATES) - len(cells))
        lines.append(f"| {name} | {inner_rate:g} | {step} | {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + "\n\n"


def written() -> str:
    """Return the page with its table rewritten."""
    saved = json.loads(RESULT.read_text())
    return TABLE.sub(lambda match: match[1] + table(saved) + match[2], PAGE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="write the table alone, from the figures there are")
    arguments = parser.parse_args()
    if not arguments.page:
        about = provenance(f"python workbench/benchmarks/diloco.py --seeds {arguments.seeds}")
        torch.set_num_threads(1)
        task = Digits()
        runs = []
        for (name, (make, rates)), inner_rate in itertools.product(OUTER.items(), INNER_RATES):
            for rate, seed in itertools.product(rates, range(arguments.seeds)):
                found = losses(task, make, rate, inner_rate, seed)
                runs.append({"optimizer": name, "inner_lr": inner_rate, "lr": rate, "seed": seed, "losses": found})
                print(*runs[-1].values(), flush=True)
        data = {"description": task.description, "sha256": task.fingerprint()}
        files.write_json(RESULT, {**about, "data": data, "runs": runs})
    PAGE.write_text(written())


if __name__ == "__main__":
    main()
