"""Many steps of tiny parameters: memory and the number of objects are the same at the end as at the beginning.

`python soak_worker.py STEPS` steps whole parameters, `python soak_worker.py STEPS RANK WORLD STORE` shards of them.

The first 1,000 steps are not measured, because caches fill during them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from bighorn import Came, Lamb

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


def measured(step: Callable[[], None], steps: int) -> tuple[int, int]:
    """Return allocated bytes and Python objects after this number of steps."""
    for _ in range(steps):
        step()
    gc.collect()
    return allocated(), len(gc.get_objects())


def main() -> None:
    steps, ranks = int(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    if ranks:
        rank, world, store = ranks
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
        fully_shard(model)
    for optimizer in optimizers(model):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)

        def step(optimizer: Lamb | Came = optimizer) -> None:
            optimizer.step()
            if optimizer.telemetry().skipped:
                raise AssertionError("a step was skipped")

        measured(step, WARM_UP // 2)  # the first collection itself allocates
        memory, objects = measured(step, WARM_UP // 2)
        later_memory, later_objects = measured(step, steps)
        print(f"{steps} steps: {later_memory - memory} bytes and {later_objects - objects} objects more")
        assert later_objects <= objects, f"{later_objects - objects} Python objects more"
        assert later_memory <= memory + SLACK, f"{later_memory - memory} bytes more"


if __name__ == "__main__":
    main()
