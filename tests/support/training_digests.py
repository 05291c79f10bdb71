"""Digests of a training of large, small and misaligned tensors, for tests in subprocesses."""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb

PLAIN: tuple[dict[str, Any], ...] = (
    {},
    {"adam": True, "decay_mode": "decoupled"},
    {"max_grad_norm": 1.0, "skip_nonfinite": True, "second_moment": "adagrad"},
    {"decay_mode": "l2"},
)
FEW_BITS: tuple[dict[str, Any], ...] = (
    {"weight_rounding": "stochastic", "state_dtype": "int8", "rounding_seed": 1 << 40},
    {"state_dtype": "int8"},
    {"weight_rounding": "kahan", "state_dtype": "int4"},
    {"weight_rounding": "master", "state_dtype": "bfloat16"},
)
"""Options for bfloat16 matrices, whose blocks do not divide the parts of threads."""
SHAPES = ((1300, 1001), (300_000, 4), (600, 257), (70, 99))
CAME: tuple[dict[str, Any], ...] = (
    {},
    {"factor": "last_two", "scale_parameter": True},
    {"factor": "last_two", "state_dtype": "int8"},
)
OF_CAME = ((1_500_001,), (1500, 1800), (5, 220_000), (5, 700, 600), (220_000, 5), (400, 300, 3, 3), (70, 90), (3, 17))

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


def matrices() -> list[Parameter]:
    return [Parameter(noise(0)[: math.prod(shape)].view(shape).bfloat16()) for shape in SHAPES]


def of_came() -> list[Parameter]:
    return [Parameter(noise(0)[: math.prod(shape)].view(shape).clone()) for shape in OF_CAME]


def set_gradients(params: list[Parameter], seed: int) -> None:
    for p in params:
        p.grad = noise(seed)[: p.numel()].view(p.shape).to(p.dtype).clone()


def train(params: list[Parameter], steps: int = 2, kind: type[Lamb | Came] = Lamb, **options: Any) -> Lamb | Came:
    optimizer = kind(params, lr=0.1, weight_decay=0.1, backend="cpu", **options)
    for step in range(steps):
        set_gradients(params, 100 + step)
        optimizer.step()
    return optimizer


def digest(params: list[Parameter], optimizer: Lamb | Came) -> int:
    """Return a digest of all bits of the parameters, the state and the telemetry."""
    states = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    figures = [value for value in vars(optimizer.telemetry()).values() if isinstance(value, Tensor)]
    summary = 0
    for tensor in (*params, *states, *figures):
        summary = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data, summary)
    return summary


Runs = Sequence[tuple[Callable[[], list[Parameter]], type[Lamb | Came], tuple[dict[str, Any], ...]]]
RUNS: Runs = (
    (parameters, Lamb, PLAIN),
    (matrices, Lamb, FEW_BITS),
)
WITH_CAME = (*RUNS, (of_came, Came, CAME))


def digests(threads: int, runs: Runs = RUNS) -> list[int]:
    """Return one digest for each set of options."""
    os.environ["BIGHORN_NUM_THREADS"] = str(threads)
    out = []
    for make, kind, rows in runs:
        for options in rows:
            params = make()
            out.append(digest(params, train(params, steps=1, kind=kind, **options)))
    return out
