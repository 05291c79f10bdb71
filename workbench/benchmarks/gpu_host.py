"""The time of first steps, and the host's part of steps, on a GPU: `python workbench/benchmarks/gpu_host.py FILE.json`.

Parameters are many and small, so that the device has little to do. For each optimizer and number of tensors: the first
step of a new optimizer, also where nothing is compiled any more, the time until a step returns, with gradients where
they were and at other addresses, and the time of a step in 50 steps in a row. A kernel that is not in Triton's cache is
compiled at a first step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from bighorn import Came, Lamb, Lars
from bighorn_workbench import cuda
from bighorn_workbench.environment import provenance
from bighorn_workbench.measure import nothing

SETS = {400: (16, 16), 1000: (64, 64), 4000: (16, 16)}
"""Shapes by the number of tensors."""

OPTIMIZERS: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    "torch AdamW, fused": lambda params: AdamW(params, fused=True),
    "torch SGD, fused": lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Lamb": lambda params: Lamb(params, lr=0.1),
    "Lamb, int8": lambda params: Lamb(params, lr=0.1, state_dtype="int8"),
    "Came": lambda params: Came(params, lr=0.1),
    "Lars": lambda params: Lars(params, lr=0.1),
}


def main() -> None:
    """Measure, print, and write the results."""
    content = {**provenance("python workbench/benchmarks/gpu_host.py", "cuda"), "device": cuda.facts(), "rows": []}
    for name, make in OPTIMIZERS.items():
        for tensors in SETS:
            content["rows"].append({"optimizer": name, "tensors": tensors, **measured(make, tensors)})
            print(content["rows"][-1], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(content, indent=1) + "\n")


def measured(make: Callable[[list[Parameter]], Optimizer], tensors: int) -> dict[str, float]:
    """Milliseconds: the first steps of two optimizers, then medians of the second one's steps."""
    first, _ = begun(make, tensors)
    again, optimizer = begun(make, tensors)
    params = optimizer.param_groups[0]["params"]
    places = [[param.grad for param in params], [param.grad.clone() for param in params]]

    def move(number: int) -> None:
        for param, grad in zip(params, places[number % 2], strict=True):
            param.grad = grad

    for _ in range(cuda.WARM_UP):
        optimizer.step()
    samples: dict[str, list[float]] = {
        "host_ms": [cuda.host_seconds(optimizer.step) for _ in range(5)],
        "host_moved_ms": [cuda.host_seconds(optimizer.step, move) for _ in range(5)],
        "wall_ms": [cuda.wall_seconds(optimizer.step, nothing) for _ in range(3)],
    }
    times = {"first_ms": first, "first_again_ms": again} | {k: statistics.median(v) for k, v in samples.items()}
    return {name: round(1e3 * seconds, 3) for name, seconds in times.items()}


def begun(make: Callable[[list[Parameter]], Optimizer], tensors: int) -> tuple[float, Any]:
    """Return the seconds of a new optimizer's first step, and the optimizer."""
    params = [Parameter(torch.ones(SETS[tensors], device="cuda")) for _ in range(tensors)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = make(params)
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start, optimizer


if __name__ == "__main__":
    main()
