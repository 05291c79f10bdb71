"""The loss over the steps of AdamW in float32 and of Came with fewer bits, over the same seeds: loss-curves.json.

    python workbench/benchmarks/loss_curves.py TEXT_FILE [--seeds 5]

Trains the character GPT at batch 8 with the options that the trials of equal-characters.json chose for AdamW and for
Came in float32; only the form differs, so nothing is tuned for fewer bits. Writes results/loss-curves.json, from which
front.py draws docs/front-loss.svg. One thread: products of bfloat16 take most of the time on a CPU without them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from bighorn_workbench import files
from bighorn_workbench.builtin_tasks import fingerprint
from bighorn_workbench.environment import provenance
from bighorn_workbench.run import Run
from equal_tuning import cells_of
from evidence_tasks import Characters
from few_bits import config_of
from result_files import RESULTS

RESULT = RESULTS / "loss-curves.json"
STUDY, BATCH, EVALUATIONS = "equal-characters", 8, 20
FEW = {"weight_rounding": "stochastic"}
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, fp32": ("adamw", {}),
    "Came int8, bf16": ("came", {"state_dtype": "int8", **FEW}),
    "Came int4, bf16": ("came", {"state_dtype": "int4", **FEW}),
}
"""By label: the optimizer of the study, and the form of its state and weights."""


def curve(task: Characters, label: str, data: str, seed: int) -> list[tuple[int, float]]:
    """Return the loss on test data after some steps of a run."""
    name, form = CONTESTANTS[label]
    [cell] = [each for each in cells_of(STUDY)[BATCH] if each.name == name]
    config = replace(config_of(cell, data, form, seed), task="text", threads=1)
    run = Run(config.resolved(task), task, evaluations=EVALUATIONS)
    losses = [(0, float(run.evaluate()["loss"]))]
    while not run.done:
        run.train_step()
        if run.evaluation_due:
            losses.append((run.step, float(run.evaluate()["loss"])))
    return losses


def main() -> None:
    """Make the runs and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="TEXT_FILE")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    about = provenance("python workbench/benchmarks/loss_curves.py TEXT_FILE")
    task = Characters(arguments.text)
    about["data"] = {"description": task.description.replace(arguments.text, "FILE"), "sha256": fingerprint(task, 1)}
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {label: {} for label in CONTESTANTS}
    for seed in range(1, arguments.seeds + 1):
        for label in CONTESTANTS:
            curves[label][str(seed)] = curve(task, label, arguments.text, seed)
            print(label, seed, curves[label][str(seed)][-1], flush=True)
    files.write_json(RESULT, {**about, "study": STUDY, "batch_size": BATCH, "curves": curves})


if __name__ == "__main__":
    main()
