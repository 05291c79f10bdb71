"""The host's time for a step on a GPU: tables, addresses and launches, on a simulated device.

No GPU is needed, and none is measured: launches lead nowhere, so the driver's part of them and of uploads is missing.
Run from the repository's root: `python workbench/benchmarks/gpu_host_share.py [FILE.json]`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came, Lamb
from bighorn._kernels import Bucket
from bighorn._kernels.triton.stepper import Stepper
from bighorn_workbench.environment import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support import fake_gpu

STEPS = 200


def main() -> None:
    """Measure, print, and write the results if a file is named."""
    torch.set_num_threads(1)
    about = provenance("python workbench/benchmarks/gpu_host_share.py")
    rows = []
    with pytest.MonkeyPatch.context() as patch, fake_gpu.gpu(patch):
        for kind in (Lamb, Came):
            for tensors in (400, 4000):
                rows.append({"optimizer": kind.__name__, "tensors": tensors, **measure(kind, tensors)})
                print(rows[-1])
    if len(sys.argv) > 1:
        content = {**about, "steps": STEPS, "rows": rows}
        Path(sys.argv[1]).write_text(json.dumps(content, indent=1) + "\n")


def measure(kind: type[Lamb | Came], tensors: int) -> dict[str, Any]:
    """Milliseconds of `step()`, of the kernels' part of it, and of the check and upload of addresses in that."""
    params = [Parameter(torch.ones(16, 16)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.ones(16, 16)
    optimizer = kind(params, lr=0.1, backend="triton")
    whole = spread(optimizer.step, lambda: None)
    ((kernel, *_),) = optimizer._steps.last[0].kernels
    assert isinstance(kernel, Stepper)
    buckets: list[Bucket[Any]] = kernel.buckets
    still: list[list[torch.Tensor | None]] = [[torch.ones(16, 16) for _ in params] for _ in "12"]
    buckets[0].grads = still[0]
    (part,) = kernel.groups

    def move() -> None:
        still.reverse()
        buckets[0].grads = still[0]

    def step() -> None:
        kernel.prepare()
        kernel.step()

    return {
        "launches": len(launched(step)),
        "whole_step_ms": whole,
        "step_ms": spread(step, lambda: None),
        "step_after_a_move_ms": spread(step, move),
        "addresses_ms": spread(part.update_gradients, lambda: None),
        "addresses_after_a_move_ms": spread(part.update_gradients, move),
    }


def launched(step: Callable[[], None]) -> list[Any]:
    """The launches of a step."""
    from triton.runtime import driver

    driver.active.launched.clear()
    step()
    return list(driver.active.launched)


def spread(work: Callable[[], None], before: Callable[[], None]) -> dict[str, float]:
    """Milliseconds: median, and 10th to 90th percentile."""
    times: list[float] = []
    for _ in range(2 * STEPS):  # the first half warms up
        before()
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    deciles = statistics.quantiles(times[STEPS:], n=10)
    return {"p10": round(deciles[0], 4), "median": round(deciles[4], 4), "p90": round(deciles[8], 4)}


if __name__ == "__main__":
    main()
