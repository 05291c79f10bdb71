"""Many steps of tiny parameters: memory and the number of objects are the same at the end as at the beginning.

The first 1,000 steps are not measured, because caches fill during them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from bighorn import Came, Lamb
from tests.support.ranks import ranks

MEASURABLE = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MEASURABLE, reason="memory is measured by glibc 2.33 or later"),
]

WARM_UP = 1000
SLACK = 1 << 16
"""In bytes. One object lost in each step would exceed it: a tensor takes hundreds of bytes."""


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated() -> int:
    """Return the bytes that malloc has allocated; resident memory is larger, and grows longer under gloo's threads."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def optimizers(model: nn.Module) -> list[Lamb | Came]:
    return [
        Lamb(model.parameters(), lr=1e-3, max_grad_norm=1.0, skip_nonfinite=True),
        Lamb(model.parameters(), lr=lambda step: 1e-3 / (1 + step), state_dtype="int8", min_8bit_size=1),
        Came(model.parameters(), lr=1e-3, max_grad_norm=1.0),
    ]


def counted(step: Callable[[], object], steps: int) -> tuple[int, int]:
    """Return allocated bytes and Python objects after this number of steps."""
    for _ in range(steps):
        step()
    gc.collect()
    return allocated(), len(gc.get_objects())


def leaves_nothing_behind(model: nn.Module, steps: int) -> None:
    for optimizer in optimizers(model):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
        counted(optimizer.step, WARM_UP // 2)  # the first collection itself allocates
        memory, objects = counted(optimizer.step, WARM_UP // 2)
        later_memory, later_objects = counted(optimizer.step, steps)
        assert optimizer.telemetry().skipped == 0
        assert later_objects <= objects, f"{later_objects - objects} Python objects more"
        assert later_memory <= memory + SLACK, f"{later_memory - memory} bytes more"


@ranks(1)
def test_plain_steps() -> None:
    leaves_nothing_behind(nn.Linear(6, 4), 100_000)


@ranks(2)
def test_sharded_steps() -> None:
    model = nn.Linear(6, 4)
    fully_shard(model)
    leaves_nothing_behind(model, 10_000)
