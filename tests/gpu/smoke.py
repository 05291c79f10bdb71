"""Checks in less than a minute that Triton kernels run on this machine and are correct: `python -m tests.gpu.smoke`.

It compares three steps with each of a few sets of options with the reference in float64. The tests of `make gpu` are
thorough; the script stops early on a machine where all of them would fail.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.cases import EXACT, KINDS, Kind, set_gradients

SHAPES = ((1000, 1000), (4097,), (64, 3, 7, 7), (30522, 128), (1,))
OPTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"max_grad_norm": 1.0, "skip_nonfinite": True},
    {"state_dtype": "int8"},
    {"weight_rounding": "stochastic"},
)
STEPS = 3
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The largest allowed relative error of a tensor; except for float32, it is the rounding of parameters."""
LIMIT_OF_INT8 = 1e-3


def main() -> int:
    """Print a line for each set of options; the exit status is the number of failed sets."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        print("torch sees no GPU here")
        return 1
    failures = 0
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for options in OPTIONS:
                if dtype != torch.float32 or "weight_rounding" not in options:
                    failures += not check(kind, dtype, options, device)
    return failures


def check(
    kind: Kind, dtype: torch.dtype, options: Mapping[str, Any], device: torch.device, backend: str = "triton"
) -> bool:
    """Compare one set of options with the reference, and print the result."""
    begin = time.perf_counter()
    exact = {name: value for name, value in options.items() if name != "weight_rounding"}
    ours = trained(kind, dtype, dtype, device, {**options, "backend": backend})
    true = trained(EXACT[kind], dtype, torch.float64, device, {**exact, "backend": "reference"})
    off = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, true, strict=True))
    limit = max(LIMITS[dtype], LIMIT_OF_INT8 if "state_dtype" in options else 0.0)
    good = off <= limit  # False for NaN
    seconds = time.perf_counter() - begin
    words = ", ".join(f"{name}={value}" for name, value in options.items())
    print(f"{'ok ' if good else 'BAD'} {kind.__name__:4} {dtype!s:14} {off:.1e} {seconds:5.1f} s  {words}", flush=True)
    return good


def trained(
    kind: Kind, dtype: torch.dtype, wide: torch.dtype, device: torch.device, options: Mapping[str, Any]
) -> list[Tensor]:
    """Return parameters after steps in `wide`, from values and gradients that are rounded to `dtype`."""
    generator = torch.Generator(device).manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, device=device).to(dtype).to(wide) for shape in SHAPES]

    params = [Parameter(values) for values in draw()]
    optimizer = kind(params, **{"lr": 0.05, "weight_decay": 0.1, **options})
    for _ in range(STEPS):
        set_gradients(params, list(draw()))
        optimizer.step()
    return [param.detach() for param in params]


if __name__ == "__main__":
    sys.exit(main())
