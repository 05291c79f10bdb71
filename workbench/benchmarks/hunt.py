"""A search for slow steps; a case takes half a second.

    python workbench/benchmarks/hunt.py [--help]

Random cases of shapes, layouts, dtypes, options and changes between steps are timed against torch's fused AdamW on
tensors of the same shapes, in turn. The program lists the cases whose ratio is above twice the median of their kind:
the same optimizer, and tensors of a similar size. `--case` times one of them again.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.optim import Optimizer

import cliffs
from bighorn import Came, Lamb
from bighorn_workbench import files
from bighorn_workbench.environment import provenance
from bighorn_workbench.measure import LR, Copy, beside, contiguous, draw, nothing, rounds

MOST_ELEMENTS = 4_000_000
MOST_SLICES = 64
"""The largest dim 0 of a stacked parameter, each of whose slices is a row of the kernels."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"lamb": Lamb, "came": Came}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CHANGES = {"nothing": None, "missing": cliffs.missing, "moved": cliffs.moved, "alternating": cliffs.alternating}


def misaligned(drawn: Tensor) -> Tensor:
    """Return a copy that begins one element after a multiple of 64 bytes."""
    return torch.cat([drawn.flatten()[:1], drawn.flatten()])[1:].view(drawn.shape)


LAYOUTS: dict[str, Copy] = {
    "contiguous": contiguous,
    "channels_last": cliffs.channels_last,
    "transposed": cliffs.transposed,
    "with_gaps": cliffs.with_gaps,
    "misaligned": misaligned,
}

SHARED_OPTIONS: dict[str, list[Any]] = {
    "max_grad_norm": [1.0],
    "skip_nonfinite": [True],
    "state_dtype": ["bfloat16", "float16", "int8"],
    "grad_centralization": [True],
    "maximize": [True],
    "stacked": [True],
}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "lamb": {
        **SHARED_OPTIONS,
        "adam": [True],
        "decay_mode": ["decoupled", "l2"],
        "second_moment": ["amsgrad", "adagrad"],
        "cautious": [True],
        "trust_ratio_bounds": [(0.0, 10.0)],
    },
    "came": {
        **SHARED_OPTIONS,
        "factor": ["last_two"],
        "bias_correction": [True],
        "scale_parameter": [True],
        "decay_rate": [0.8],
    },
}
"""The values of options beside the defaults."""

ROUNDINGS = ["stochastic", "kahan", "master"]
GROUP_OPTIONS = ("grad_centralization", "stacked")


@dataclass(frozen=True)
class Trial:
    """One case; all of its tensors have one shape."""

    optimizer: str
    shape: tuple[int, ...]
    count: int
    dtype: str
    layout: str
    grad_layout: str
    change: str
    options: dict[str, Any]

    @property
    def kind(self) -> str:
        """The optimizer, and the order of magnitude of a tensor's elements."""
        size = torch.Size(self.shape).numel()
        return f"{self.optimizer}, up to {10 ** len(str(max(size - 1, 1))):,} elements"

    def __str__(self) -> str:
        options = "".join(f" {name}={value!r}" for name, value in self.options.items())
        layouts = f"{self.layout}/{self.grad_layout}"
        return f"{self.count} x {self.shape} {self.dtype} {layouts} {self.change}{options}"

    def make(self, params: Sequence[Tensor]) -> Optimizer:
        """Return the optimizer of these parameters."""
        own = {name: value for name, value in self.options.items() if name in GROUP_OPTIONS}
        rest = {name: value for name, value in self.options.items() if name not in GROUP_OPTIONS}
        return OPTIMIZERS[self.optimizer]([{"params": list(params), **own}], lr=LR, weight_decay=0.01, **rest)


def trial(rng: random.Random, optimizer: str) -> Trial:
    """Return a random case; each property is the usual one in two of three cases."""

    def usual(value: Any, others: Sequence[Any]) -> Any:
        return value if rng.random() < 2 / 3 else rng.choice(others)

    dims = rng.choice([1, 2, 2, 2, 3, 4, 4])
    size = 10 ** rng.uniform(0, 6.5)
    cuts = sorted(rng.random() for _ in range(dims - 1))
    shares = [b - a for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
    shape = tuple(max(1, round(size**share)) for share in shares)
    numel = torch.Size(shape).numel()
    count = max(1, min(round(10 ** rng.uniform(0, 2.5)), MOST_ELEMENTS // numel))
    dtype = usual("float32", list(DTYPES))
    options = {name: rng.choice(values) for name, values in OPTIONS[optimizer].items() if rng.random() < 0.1}
    if dtype in ("bfloat16", "float16") and rng.random() < 0.5:
        options["weight_rounding"] = rng.choice(ROUNDINGS)
    if shape[0] > MOST_SLICES:
        options.pop("stacked", None)
    if dtype == "float64" and options.get("state_dtype") == "int8":
        del options["state_dtype"]
    layout = usual("contiguous", list(LAYOUTS))
    grad_layout = usual(layout if layout != "with_gaps" else "contiguous", list(LAYOUTS))
    return Trial(optimizer, shape, count, dtype, layout, grad_layout, usual("nothing", list(CHANGES)), options)


def measured(case: Trial, seconds: float) -> dict[str, Any]:
    """Return the times of a case and of AdamW, as JSON. AdamW's gradients have the strides of its parameters.

    Raises:
        ValueError: The optimizer refuses the case.
    """
    shapes, device = [case.shape] * case.count, torch.device("cpu")
    weights, grads = (draw(shapes, scale, DTYPES[case.dtype], device, seed) for seed, scale in enumerate((0.02, 1e-3)))
    params, theirs = ([LAYOUTS[case.layout](weight) for weight in weights] for _ in range(2))
    for param, other, grad in zip(params, theirs, grads, strict=True):
        param.grad, other.grad = LAYOUTS[case.grad_layout](grad), LAYOUTS[case.layout](grad)
    baseline = torch.optim.AdamW(theirs, lr=LR, weight_decay=0.01, fused=True)
    optimizer = case.make(params)
    optimizer.step()
    baseline.step()
    change = CHANGES[case.change]
    ours = nothing if change is None else change(params)
    of_baseline = nothing if change is None or case.change == "alternating" else change(theirs)
    of_adamw, own = rounds(baseline, optimizer, seconds, (of_baseline, ours))
    return beside(of_adamw, own)


def outliers(results: Sequence[tuple[Trial, dict[str, Any]]]) -> list[tuple[float, Trial, dict[str, Any]]]:
    """Return the cases whose ratio is more than twice the median of their kind, by that factor, largest first."""
    kinds: dict[str, list[float]] = {}
    for case, times in results:
        kinds.setdefault(case.kind, []).append(times["ratio"]["median"])
    factors = [(times["ratio"]["median"] / statistics.median(kinds[case.kind]), case, times) for case, times in results]
    return sorted((row for row in factors if row[0] > 2), key=lambda row: -row[0])


@click.command()
@click.option("--cases", default=200, show_default=True, help="Cases of each optimizer.")
@click.option("--case", type=int, help="Time this case of each optimizer alone.")
@click.option("--seed", default=0, show_default=True, help="Seed of the cases.")
@click.option("--seconds", default=0.2, show_default=True, help="Seconds of each case, at least 5 rounds.")
@click.option("--optimizers", default="lamb,came", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all cases as JSON.")
@click.pass_context
def main(
    ctx: click.Context,
    cases: int,
    case: int | None,
    seed: int,
    seconds: float,
    optimizers: str,
    json_file: Path | None,
) -> None:
    """Time random cases, and list the slow ones."""
    console = Console(soft_wrap=True, highlight=False)
    numbers = range(cases) if case is None else [case]
    results: list[tuple[Trial, dict[str, Any]]] = []
    written: list[dict[str, Any]] = []
    refused = 0
    for name in optimizers.split(","):
        for number in track(numbers, name, console=console, transient=True):
            drawn = trial(random.Random(f"{name} {seed} {number}"), name)
            try:
                times = measured(drawn, seconds)
            except ValueError:
                refused += 1
                continue
            results.append((drawn, times))
            written.append({"number": number, "kind": drawn.kind, **asdict(drawn), **times})
            if case is not None:
                console.print(f"{drawn}: {times['ratio']['median']:.2f}", markup=False)
    console.print(f"{len(results)} cases, {refused} refused by their optimizer")
    for factor, drawn, times in outliers(results):
        line = f"{factor:5.1f} times its kind, {times['ratio']['median']:6.2f} of AdamW ({drawn.kind}): {drawn}"
        console.print(line, markup=False)
    if json_file is not None:
        files.write_json(json_file, {**provenance(f"python {ctx.command_path}", "cpu"), "results": written})


if __name__ == "__main__":
    main()
