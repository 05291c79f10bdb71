"""How often `bighorn compare` names a better optimizer: where none is, and where one is by a known difference.

    python workbench/benchmarks/null_verdicts.py JSON [STUDIES]   # 200 studies of each; minutes of one core

The metric is noise of standard deviation 1, drawn from the bits of the trained weights: each optimizer, rate and seed
has a value of its own, and none is better. In the other studies SGD has :data:`PLANTED` more. Each study is a whole
search, from the trials to the sentences.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from bighorn_workbench.builtin_tasks.user import UserTask
from bighorn_workbench.compare import CompareConfig, prepare
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.verdict import verdicts
from result_files import ROOT

STUDIES, TRIALS, SEEDS = 200, 8, 5
PLANTED = 1.0
"""The planted difference, in standard deviations between seeds."""

MEMORY = Path("/dev/shm")
"""A folder in memory, where each transaction does not wait for a disk."""

BASELINE, BETTER = "adamw", "sgd"
CLEAR = re.compile(rf"At batch \d+ {BETTER} \([^)]*\) is (ahead of|behind) {BASELINE} ")
PAGE = ROOT / "docs" / "command-line.md"
FIGURES = re.compile(r"(<!-- null verdicts -->\n).*?(<!-- end of null verdicts -->)", re.DOTALL)


class Noise:
    """A metric that is noise."""

    metric, higher_is_better = "score", True
    batch_size, steps, one_thread = 1, 1, True

    def __init__(self, study: int, planted: float) -> None:
        self.study, self.planted = study, planted

    def model(self) -> nn.Module:
        """Return two weights, the second with a thousandth of the gradient."""
        return Weights()

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> Iterable[Tensor]:  # noqa: ARG002
        """Return one batch of nothing."""
        return [torch.ones(1)]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the weights' weighted sum."""
        found: Tensor = model(batch).sum()
        return found

    def evaluate(self, model: Weights, split: str) -> dict[str, float]:
        """Return the noise of these weights, with the planted difference for SGD, whose steps follow the gradient."""
        start, large, small = (float(each) for each in (model.start, model.large, model.small))
        text = f"{self.study} {split} {start.hex()} {large.hex()} {small.hex()}"
        share = (int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") + 0.5) / 2**48
        is_sgd = abs(large - start) > 30 * abs(small - start)
        return {"score": NormalDist().inv_cdf(share) + self.planted * is_sgd}


class Weights(nn.Module):
    """Two weights that start at the same random place; the second one's gradient is a thousand times smaller."""

    start: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.rand(1))
        self.large, self.small = nn.Parameter(self.start.clone()), nn.Parameter(self.start.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return their weighted sum."""
        return self.large * x + self.small * x / 1000


def answer(study: int, planted: float) -> str:
    """Return what a study says: "ahead of", "behind", "unclear" or "not tuned"."""
    options = {"trials": TRIALS, "seeds": SEEDS, "optimizers": f"{BASELINE},{BETTER}"}
    config = CompareConfig(task="Noise", **options)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        search = prepare(config, UserTask(Noise(study, planted), "Noise"), Path(folder) / "study")
        search.work()
        cells = search.cells()
        search.database.close()
    if not all(cell.is_tuned for cell in cells):
        return "not tuned"
    clear = CLEAR.match(verdicts(cells)[0])
    return clear[1] if clear else "unclear"


def written(page: str, found: dict[str, Any]) -> str:
    """Return the page with both figures."""
    null, planted = found["null"], found["planted"]
    wrong = null["ahead of"] + null["behind"]
    text = (
        f"Where a metric is noise, {wrong} of {sum(null.values())} comparisons of two optimizers named a better one, "
        f"and 5% may; where one is better by the standard deviation between seeds, {planted['ahead of']} of "
        f"{sum(planted.values())} named it, and {planted['behind']} the other one, with {SEEDS} seeds each."
    )
    return FIGURES.sub(lambda match: match[1] + "\n".join(textwrap.wrap(text, 138)) + "\n" + match[2], page)


def main(file: Path, studies: int = STUDIES) -> None:
    """Make all studies, and write the file and the page."""
    found: dict[str, Any] = provenance(f"python workbench/benchmarks/null_verdicts.py JSON {studies}")
    started = time.process_time()
    for kind, planted in (("null", 0.0), ("planted", PLANTED)):
        counts = Counter(answer(study, planted) for study in range(studies))
        found[kind] = {word: counts[word] for word in ("ahead of", "behind", "unclear", "not tuned")}
        print(kind, found[kind], flush=True)
    settings = {
        "trials": TRIALS,
        "seeds": SEEDS,
        "difference": PLANTED,
        "seconds": round(time.process_time() - started),
    }
    write_json(file, found | settings)
    PAGE.write_text(written(PAGE.read_text(), found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
