"""How far CAME's first steps move the weights: as published, with bias_correction, beside AdamW.

    python workbench/benchmarks/came_first_updates.py [--steps N] [--threads N] [--picture]

The GPT of the task `text`, batch 16, a constant learning rate of 3e-4 without warm-up and without weight decay, which
would move weights too. After each step: the root mean square of the movement of all matrices, divided by the learning
rate, and the loss of the batch.
Writes workbench/benchmarks/results/came-first-updates.json and results/came-first-updates.svg; with --picture
only the latter, from the former.
"""

import argparse
import math
from typing import Any

import torch

import plots
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks.text import Text
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.run import Run
from result_files import RESULTS, load

LR, BATCH_SIZE = 3e-4, 16
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "CAME as published": ("came-published", ()),
    "CAME, bias_correction": ("came", ("bias_correction=True",)),
    "AdamW": ("adamw", ()),
}


def measured(task: Text, optimizer: str, options: tuple[str, ...], steps: int, threads: int) -> dict[str, Any]:
    """The movement and the loss of each step of one run."""
    config = RunConfig(
        "text",
        optimizer=optimizer,
        optimizer_option=options,
        batch_size=BATCH_SIZE,
        lr=LR,
        warmup="0",
        schedule="constant",
        steps=steps,
        weight_decay=0.0,
        threads=threads,
    )
    run = Run(config.resolved(task), task)
    matrices = [parameter for parameter in run.model.parameters() if parameter.ndim > 1]
    movement = []
    while not run.done:
        before = [matrix.detach().clone() for matrix in matrices]
        run.train_step()
        with torch.no_grad():
            squares = [float((old - new).square().sum()) for old, new in zip(before, matrices, strict=True)]
        movement.append(math.sqrt(sum(squares) / sum(matrix.numel() for matrix in matrices)) / LR)
    return {"optimizer": optimizer, "options": options, "movement_per_lr": movement, "loss": run.history.loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", action="store_true")
    arguments = parser.parse_args()
    if not arguments.picture:
        measure(arguments.steps, arguments.threads)
    files.write_text(RESULTS / "came-first-updates.svg", picture(load("came-first-updates")))


def measure(steps: int, threads: int) -> None:
    about = provenance(f"python workbench/benchmarks/came_first_updates.py --steps {steps} --threads {threads}")
    task = Text()
    runs = {name: measured(task, *what, steps, threads) for name, what in RUNS.items()}
    result = {
        **about,
        "data": {"description": task.description, "sha256": task.fingerprint()},
        "lr": LR,
        "batch_size": BATCH_SIZE,
        "runs": runs,
    }
    files.write_json(RESULTS / "came-first-updates.json", result)


def picture(saved: dict[str, Any]) -> str:
    """The movement and the loss of each run, by step."""
    panels = [
        (title, [(name, list(range(1, len(run[figure]) + 1)), run[figure]) for name, run in saved["runs"].items()])
        for title, figure in (("RMS movement / learning rate", "movement_per_lr"), ("training loss", "loss"))
    ]
    return plots.standalone(plots.side_by_side(panels, "step"))


if __name__ == "__main__":
    main()
