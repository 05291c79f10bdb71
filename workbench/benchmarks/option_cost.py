"""The cost of options and dtypes on a CPU that no page's table of models has: each beside the same step without it.

    python workbench/benchmarks/option_cost.py [--shapes tiny,resnet50] [--threads 1,2] [--seconds 1] [--passes 3]

A pair takes turns, step by step, on tensors of its own, as in `bighorn bench`; a ratio is of one round. All pairs are
measured once in each pass, so that a disturbance of some seconds is in one pass of a pair; ratios of all passes are
pooled. The first row of each question is its baseline beside a second one of its kind: the noise.
Writes results/option-cost.json.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from bighorn import Came, Lamb, Lars
from bighorn_workbench import files, measure
from bighorn_workbench.environment import provenance
from bighorn_workbench.shapes import SHAPES

RESULT = Path(__file__).parent / "results" / "option-cost.json"
WEIGHT_DECAY = 0.01

Make = Callable[[Sequence[Tensor], float], Optimizer]


def ours(kind: type[Lamb | Came | Lars], **options: Any) -> Make:
    return lambda params, lr: kind(params, lr=lr, weight_decay=WEIGHT_DECAY, **options)


def centralized(kind: type[Lamb | Came | Lars]) -> Make:
    return lambda params, lr: kind(
        [{"params": list(params), "grad_centralization": True}], lr=lr, weight_decay=WEIGHT_DECAY
    )


def adamw(**options: Any) -> Make:
    return lambda params, lr: AdamW(params, lr=lr, weight_decay=WEIGHT_DECAY, **options)


class Question(NamedTuple):
    """Steps that take turns with a baseline's."""

    baseline: Make
    others: dict[str, Make]
    dtype: torch.dtype = torch.float32


QUESTIONS = {
    "Lars, momentum in float32": Question(
        ours(Lars),
        {
            "bfloat16": ours(Lars, state_dtype=torch.bfloat16),
            "int8": ours(Lars, state_dtype="int8"),
            "int4": ours(Lars, state_dtype="int4"),
        },
    ),
    "Lamb": Question(ours(Lamb), {"grad_centralization": centralized(Lamb)}),
    "Came": Question(ours(Came), {"grad_centralization": centralized(Came)}),
    "Lars": Question(ours(Lars), {"grad_centralization": centralized(Lars)}),
    "fused AdamW, float64": Question(
        adamw(fused=True),
        {"foreach AdamW": adamw(foreach=True), "Lamb": ours(Lamb), "Came": ours(Came), "Lars": ours(Lars)},
        torch.float64,
    ),
    "Lamb, moments in float32": Question(
        ours(Lamb), {"bfloat16": ours(Lamb, state_dtype=torch.bfloat16), "int8": ours(Lamb, state_dtype="int8")}
    ),
    "Came, momentum in float32": Question(
        ours(Came), {"bfloat16": ours(Came, state_dtype=torch.bfloat16), "int8": ours(Came, state_dtype="int8")}
    ),
}


def rounds(question: Question, make: Make, shapes: str, seconds: float) -> list[list[float]]:
    """Return the seconds of the baseline's steps and of another's, which take turns."""
    weights, grads = (
        measure.draw(list(SHAPES[shapes]()), scale, question.dtype, torch.device("cpu"), seed)
        for seed, scale in enumerate((0.02, 1e-3))
    )

    def prepared(each: Make) -> Optimizer:
        return measure.prepared(lambda params, lr, _: each(params, lr), weights, grads, None)[0]

    return measure.rounds(prepared(question.baseline), prepared(make), seconds)


def measured(sets: list[str], threads: list[int], seconds: float, passes: int) -> list[dict[str, Any]]:
    pairs = [
        (count, shapes, name, other, question, make)
        for count, shapes, (name, question) in itertools.product(threads, sets, QUESTIONS.items())
        for other, make in {"the same": question.baseline, **question.others}.items()
    ]
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in pairs]
    loads = []
    for _ in range(passes):
        for (count, shapes, name, other, question, make), (theirs, mine) in zip(pairs, samples, strict=True):
            torch.set_num_threads(count)
            first, second = rounds(question, make, shapes, seconds)
            theirs += first
            mine += second
            loads.append(os.getloadavg()[0])
            print(count, shapes, name, other, statistics.median(mine) / statistics.median(theirs), flush=True)
    print(f"load {min(loads):.1f} to {max(loads):.1f}")
    return [
        {"threads": count, "shapes": shapes, "baseline": name, "other": other, "rounds": len(mine)}
        | measure.beside(theirs, mine)
        for (count, shapes, name, other, _, _), (theirs, mine) in zip(pairs, samples, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tiny,vit_small,resnet50")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    words = f"--shapes {arguments.shapes} --threads {arguments.threads} --seconds {arguments.seconds:g}"
    about = provenance(f"python workbench/benchmarks/option_cost.py {words} --passes {arguments.passes}")
    threads = list(map(int, arguments.threads.split(",")))
    rows = measured(arguments.shapes.split(","), threads, arguments.seconds, arguments.passes)
    files.write_json(arguments.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
