"""Hyperball beside Lamb and AdamW over widths, and over many steps: hyperball-widths.json and hyperball-long.json.

    python workbench/benchmarks/hyperball_runs.py widths TEXT_FILE JSON
    python workbench/benchmarks/hyperball_runs.py long TEXT_FILE JSON STUDY.json

`widths` trains a character GPT of two blocks at each width with each optimizer, on a grid of rates of factor 1.6, three
seeds each. The grid of a width starts around the best rate of the width before, and grows until its best rate has two
worse ones on either side; the last width also has the best rate of the first one. AdamW's step for embeddings, the head
and vectors keeps its rate beside Hyperball and lamb-adamw, so that only the rate of the hidden matrices is searched.
`long` trains Characters for 5,000 steps, with the options that STUDY's trials chose at batch 8, at a share of each
optimizer's rate that one seed chooses on validation data, then with three more seeds on test data. The shares are
powers of two, until the best has a worse one on either side. With the file of an interrupted run only the missing runs
are made; the file names the commits of all its runs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bighorn_workbench.builtin_tasks import fingerprint
from bighorn_workbench.builtin_tasks.text import GPT
from bighorn_workbench.builtin_tasks.trial import held_out
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.run import DivergedError, Run
from bighorn_workbench.tasks import defaults
from equal_tuning import Cell
from evidence_tasks import Characters

WIDTHS = (64, 128, 256, 512)
STEPS, BATCH, FACTOR, SEEDS = 200, 8, 1.6, (1, 2, 3)
DECAY = 0.1
FIRST_RATES = {"lamb": 0.03, "lamb-adamw": 0.03, "lamb-hyperball": 0.03, "adamw": 0.003}
ADAMW = 0.003
"""AdamW's rate for what is no hidden matrix, beside lamb-adamw and lamb-hyperball."""

LONG_STEPS, LONG_SEEDS = 5000, (11, 12, 13)
LONG = ("adamw", "lamb-hyperball", "lamb", "lamb-adamw", "muon")


class Wide(Characters):
    """Characters' GPT of another width, with heads of 16."""

    def __init__(self, data: str | None, width: int) -> None:
        super().__init__(data)
        self.width = width

    def model(self) -> GPT:
        """Build the GPT."""
        return GPT(self.classes, width=self.width, heads=self.width // 16, blocks=2, dropout=0.0)


def trained(config: RunConfig, task: Characters, split: str) -> float | None:
    """Make a run; return its loss on validation or test data, None if it diverged."""
    tuned = held_out(task) if split == "validation" else task
    run = Run(replace(config, threads=1).resolved(tuned), tuned, evaluations=1, split=split)
    try:
        while not run.done:
            run.train_step()
        loss = float(run.evaluate()["loss"])
    except DivergedError:
        return None
    return loss if math.isfinite(loss) else None


class Runs:
    """The runs of a file, by their names: each is made once."""

    def __init__(self, path: str, about: dict[str, Any]) -> None:
        self.path = Path(path)
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.made: dict[str, float | None] = before.get("runs", {})
        commits = before.get("commits", [before["commit"]] if before else [])
        self.about = {**about, "commits": list(dict.fromkeys([*commits, about["commit"]]))}

    def loss(self, name: str, config: RunConfig, task: Characters, split: str = "test") -> float:
        """Return the loss of a run, infinite if it diverged."""
        if name not in self.made:
            self.made[name] = trained(config, task, split)
            write_json(self.path, {**self.about, "runs": self.made})
            print(name, self.made[name], flush=True)
        loss = self.made[name]
        return math.inf if loss is None else loss


def widths(data: str, result: str) -> None:
    """Find the best rate of each optimizer at each width."""
    about = {**provenance("python workbench/benchmarks/hyperball_runs.py widths TEXT_FILE JSON"), "steps": STEPS}
    runs = Runs(result, {**about, "batch_size": BATCH, "factor": FACTOR, "adamw": ADAMW})
    center = dict.fromkeys(FIRST_RATES, 0)
    of_first: dict[str, int] = {}
    for width in WIDTHS:
        task = Wide(data, width)
        for name, first in FIRST_RATES.items():

            def mean(power: int, name: str = name, first: float = first, task: Wide = task) -> float:
                config = _config(name, first * FACTOR**power)
                label = f"{task.width} {name} {config.lr:g}"
                return statistics.fmean(
                    runs.loss(f"{label} {seed}", replace(config, seed=seed), task) for seed in SEEDS
                )

            losses = {power: mean(power) for power in range(center[name] - 1, center[name] + 2)}
            while True:
                best = min(losses, key=lambda power: losses[power])
                missing = [power for power in range(best - 2, best + 3) if power not in losses]
                if not missing:
                    break
                losses[missing[0]] = mean(missing[0])
            center[name] = best
            of_first.setdefault(name, best)
            if width == WIDTHS[-1]:
                mean(of_first[name])
            print(f"width {width}, {name}: {first * FACTOR**best:.3g}, loss {losses[best]:.4f}", flush=True)


def _config(name: str, lr: float) -> RunConfig:
    lr = float(f"{lr:.3g}")
    options = ("betas=(0.9, 0.99)",) + (f"adamw_rate={ADAMW / lr:.6g}",) * ("-" in name)
    config = RunConfig("text", None, name, batch_size=BATCH, steps=STEPS, lr=lr, weight_decay=DECAY, warmup="10%")
    return replace(config, optimizer_option=options)


def long(data: str, result: str, study: str) -> None:
    """Train for many steps with each optimizer's best options of a study."""
    about = provenance("python workbench/benchmarks/hyperball_runs.py long TEXT_FILE JSON STUDY.json")
    task = Characters(data)
    of = {"description": defaults(task).description.replace(data, "FILE"), "sha256": fingerprint(task, 1)}
    runs = Runs(result, {**about, "steps": LONG_STEPS, "data": of})
    cells = [Cell(each, task.classes) for each in json.loads(Path(study).read_text())["cells"]]
    chosen = {cell.name: cell.config(data) for cell in cells if cell.batch == BATCH}
    for name in LONG:
        tuned = replace(chosen[name], task="text", epochs=None, steps=LONG_STEPS, seed=1)
        assert tuned.lr is not None
        rate, tried = tuned.lr, {}
        missing = {1.0, 0.5}
        while missing:
            for share in missing:
                scaled = replace(tuned, lr=rate * share)
                tried[share] = runs.loss(f"{name} trial {share:g}", scaled, task, "validation")
            best = min(tried, key=lambda each: tried[each])
            missing = {best / 2, best * 2} - set(tried)
        for seed in LONG_SEEDS:
            runs.loss(f"{name} {best:g} {seed}", replace(tuned, lr=rate * best, seed=seed), task)


if __name__ == "__main__":
    if sys.argv[1] == "widths":
        widths(*sys.argv[2:])
    else:
        long(*sys.argv[2:])
