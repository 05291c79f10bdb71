"""The error of CAME's momentum in 4 bits: the code of `_kernels/codec.py` beside others, by block and by rounding.

    python workbench/benchmarks/four_bits.py [--steps N] [--seeds N] [--data FILE]
    python workbench/benchmarks/four_bits.py --page

First the error of the step: a small GPT is trained with the momentum in float32, on the task `text`. Beside it the
momentum of each matrix is kept in every form too, advanced by the same u and rounded at each step; the error is m's
relative to its norm. Then training itself, for the forms of `TRAINED`: the loss on test data after as many steps.
Writes workbench/benchmarks/results/four-bits.json, and with --page only its table in results/precision.md.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels import codec
from bighorn._kernels.codec import Form
from bighorn._kernels.options import CameOptions
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.run import Run
from result_files import RESULTS

RESULT = RESULTS / "four-bits.json"
PAGE = RESULTS / "precision.md"
TABLE = re.compile(r"(<!-- table of four-bits\.json[^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
BETA1, EVERY = 0.9, 10
VALUES = {
    "linear": torch.arange(8) / 7,
    "power 1.5": (torch.arange(8) / 7) ** 1.5,
    "squares": torch.arange(8).square() / 49,
    "cubes": torch.arange(8) ** 3 / 343,
    "powers of 2": torch.tensor([0.0, *(2.0**-i for i in range(6, -1, -1))]),
}
"""The magnitudes that the codes 0 to 7 stand for, of the scale."""

Threshold = Callable[[Tensor], Tensor]
"""A function that returns, for each value, the share of the way to the next code from which it is rounded up."""


def nearest(share: Tensor) -> Tensor:
    return torch.full_like(share, 0.5)


def by_chance(share: Tensor) -> Tensor:
    return torch.rand(share.shape)


class Dither:
    """As `rounding.dither`: each element's thresholds step through the unit interval, and neighbours' differ."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, share: Tensor) -> Tensor:
        self.calls += 1
        golden = 0.6180339887
        return ((torch.arange(share.numel()) + self.calls) * golden % 1).view_as(share).float()


ROUNDINGS: dict[str, Threshold] = {"nearest": nearest, "dithered": Dither(), "by chance": by_chance}
BLOCKS = (64, 128, 256)
TRAINED = (
    *("float32", "int8", "linear, 256, nearest", "power 1.5, 256, nearest", "squares, 256, nearest"),
    *("powers of 2, 256, nearest", "linear, 256, dithered", "power 1.5, 256, dithered", "squares, 64, dithered"),
    *("squares, 256, dithered", "squares, 256, by chance"),
)


def form(values: Tensor, threshold: Threshold) -> Form:
    """Return codes in 4 bits for these magnitudes."""

    def to_code(share: Tensor, _: codec.Dither) -> Tensor:
        size = share.abs()
        below = (torch.bucketize(size, values, right=True) - 1).clamp(max=6)
        low, high = values[below], values[below + 1]
        return (below + ((size - low) / (high - low) >= threshold(size))) * share.sign()

    return Form(torch.uint8, to_code, lambda code: values[code.abs().long()] * code.sign(), int4=True)


FORMS = {
    f"{code}, {block}, {rounding}": (form(VALUES[code], ROUNDINGS[rounding]), block)
    for code, block, rounding in product(VALUES, BLOCKS, ROUNDINGS)
}


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Set the size of blocks."""
    before, codec.BLOCK = codec.BLOCK, size
    try:
        yield
    finally:
        codec.BLOCK = before


def run_of(data: str | None, steps: int, seed: int, state_dtype: str) -> Run:
    made = TASKS["text"](data)
    config = RunConfig(
        *("text", data), optimizer="came", steps=steps, batch_size=16, threads=1, seed=seed, backend="foreach",
        state_dtype=state_dtype, optimizer_option=("bias_correction=True",),
    )  # fmt: skip
    return Run(config.resolved(made), made)


def errors_of_steps(data: str | None, steps: int) -> dict[str, dict[str, float]]:
    """Return the error of the momentum in each form."""
    run = run_of(data, steps, 0, "fp32")
    matrices = [p for p in run.model.parameters() if p.ndim > 1 and p.numel() >= 4096]
    kept = {name: [torch.zeros_like(x) for x in matrices] for name in FORMS}
    exact = [torch.zeros_like(x) for x in matrices]
    errors = defaultdict[str, list[float]](list)
    t = 0

    @torch.no_grad()
    def follow(optimizer: Any, *_: object) -> None:
        nonlocal t
        t += 1
        for i, x in enumerate(matrices):
            m = optimizer.state[x]["exp_avg"]
            u = (m - BETA1 * exact[i]) / (1 - BETA1)
            exact[i].copy_(m)
            for name, (tried, block) in FORMS.items():
                with blocks_of(block):
                    kept[name][i] = codec.decode(
                        *codec.encode(BETA1 * kept[name][i] + (1 - BETA1) * u, tried), tried
                    ).view_as(x)
                if t % EVERY == 0:
                    errors[name].append(float((kept[name][i] - m).norm() / m.norm()))

    run.optimizer.register_step_post_hook(follow)
    while not run.done:
        run.train_step()
    return {name: {"median": statistics.median(each), "max": max(each)} for name, each in errors.items()}


def loss_of(name: str, data: str | None, steps: int, seed: int) -> float:
    """Return the loss on test data of a run with the momentum in a form."""
    tried, block = FORMS.get(name, (codec.INT4, codec.BLOCK))
    forms: Any = CameOptions.forms["exp_avg"]
    before, forms[torch.uint8] = forms[torch.uint8], tried
    try:
        with blocks_of(block):
            run = run_of(data, steps, seed, {"float32": "fp32", "int8": "int8"}.get(name, "int4"))
            while not run.done:
                run.train_step()
            return float(run.evaluate()["loss"])
    finally:
        forms[torch.uint8] = before


def table(found: dict[str, Any]) -> str:
    """Return the losses of the forms that were trained, beside float32's of the same seeds, and the errors."""
    exact = found["losses"]["float32"]
    head = ("codes, block, rounding", "error of m", "loss", "beside float32")
    rows = [f"| {' | '.join(head)} |", "|---|---|---|---|"]
    for name, losses in found["losses"].items():
        error = f"{found['errors'][name]['median']:.0%}" if name in found["errors"] else ""
        beside = ", ".join(f"{loss - other:+.4f}" for loss, other in zip(losses, exact, strict=True))
        rows.append(f"| {name} | {error} | {', '.join(f'{loss:.4f}' for loss in losses)} | {beside} |")
    return "\n".join(rows) + "\n"


def written() -> str:
    """Return the page with the table of the results."""
    return TABLE.sub(lambda match: match[1] + table(json.loads(RESULT.read_text())) + match[2], PAGE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        files.write_text(PAGE, written())
        return
    torch.manual_seed(0)
    results = {
        **provenance(f"python workbench/benchmarks/four_bits.py --steps {arguments.steps} --seeds {arguments.seeds}"),
        "errors": errors_of_steps(arguments.data, arguments.steps // 3),
        "losses": {},
    }
    for name, figures in results["errors"].items():
        print(f"{name:30}", *(f"{value:8.4f}" for value in figures.values()), flush=True)
    for name in TRAINED:
        seeds = range(1, arguments.seeds + 1)
        losses = [loss_of(name, arguments.data, arguments.steps, seed) for seed in seeds]
        results["losses"][name] = losses
        print(f"{name:30}", *(f"{value:8.4f}" for value in losses), flush=True)
        files.write_json(RESULT, results)


if __name__ == "__main__":
    main()
