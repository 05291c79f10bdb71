"""Digests of a training of large, small and misaligned tensors, for tests in subprocesses."""

from __future__ import annotations

import functools
import math
import os
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lamb

OPTIONS: dict[str, dict[str, Any]] = {
    "lamb": {},
    "adam": {"adam": True, "decay_mode": "decoupled"},
    "clipped": {"max_grad_norm": 1.0, "skip_nonfinite": True, "second_moment": "adagrad"},
    "l2": {"decay_mode": "l2"},
}
FEW_BITS: dict[str, dict[str, Any]] = {
    "stochastic-int8": {"weight_rounding": "stochastic", "state_dtype": "int8", "rounding_seed": 1 << 40},
    "int8": {"state_dtype": "int8"},
    "kahan-int4": {"weight_rounding": "kahan", "state_dtype": "int4"},
    "master": {"weight_rounding": "master", "state_dtype": "bfloat16"},
}
"""Options for bfloat16 matrices, whose blocks do not divide the parts of threads."""
SHAPES = ((1300, 1001), (300_000, 4), (600, 257), (70, 99))

# All threads share tensors above 2**18 elements; above a million for each thread x is applied from the first block on,
# and above 2 million in all the workspace does not hold all of u.
SIZES = (3_000_000, 1_500_001, (1 << 18) + 1, 1 << 18, 100_000, 8193, 8192, 8191, *range(1, 40))


@functools.cache
def noise(seed: int) -> Tensor:
    return torch.randn(1 + max(SIZES), generator=torch.Generator().manual_seed(seed))


def parameters(seed: int = 0, largest: int = SIZES[0]) -> list[Parameter]:
    plain = [noise(seed)[:size].clone() for size in SIZES if size <= largest]
    misaligned = [noise(seed + 1)[: size + 1].clone().narrow(0, 1, size) for size in (2_000_000, 70_001, 13)]
    low = [noise(seed + 2)[:1_200_000].bfloat16()]
    return [Parameter(values) for values in (*plain, *misaligned, *low)]


def matrices(seed: int = 0) -> list[Parameter]:
    return [Parameter(noise(seed)[: math.prod(shape)].view(shape).bfloat16()) for shape in SHAPES]


def set_gradients(params: list[Parameter], seed: int) -> None:
    for p in params:
        p.grad = noise(seed)[: p.numel()].view(p.shape).to(p.dtype).clone()


def train(params: list[Parameter], steps: int = 2, **options: Any) -> Lamb:
    optimizer = Lamb(params, lr=0.1, weight_decay=0.1, backend="cpu", **options)
    for step in range(steps):
        set_gradients(params, 100 + step)
        optimizer.step()
    return optimizer


def digest(params: list[Parameter], optimizer: Lamb) -> int:
    """Return a digest of all bits of the parameters, the state and the telemetry."""
    states = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    summary = 0
    for tensor in (*params, *states, optimizer.telemetry().trust_ratio):
        summary = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data, summary)
    return summary


def digests(threads: int) -> list[int]:
    """Return one digest for each set of options."""
    os.environ["BIGHORN_NUM_THREADS"] = str(threads)
    runs = [(parameters, OPTIONS[name]) for name in OPTIONS] + [(matrices, FEW_BITS[name]) for name in FEW_BITS]
    out = []
    for make, options in runs:
        params = make()
        out.append(digest(params, train(params, steps=1, **options)))
    return out
