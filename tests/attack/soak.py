"""Many steps of tiny parameters: memory and objects at the end are those of the beginning.

`python soak.py STEPS` steps whole parameters, `python soak.py STEPS RANK WORLD STORE` shards of them.

The first 10,000 steps are not measured: meanwhile the allocator and gloo grow, also with torch's AdamW and clipping.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from bighorn import Came, Lamb

WARM_UP = 10_000
SLACK = 1 << 18
"""Bytes. One object lost in each step would be above that: a tensor takes hundreds of bytes."""


def resident() -> int:
    """Bytes of memory that is the process's own; pages of libraries come and go with the load of the machine."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def optimizers(model: nn.Module) -> list[Lamb | Came]:
    return [
        Lamb(model.parameters(), lr=1e-3, max_grad_norm=1.0, skip_nonfinite=True),
        Lamb(model.parameters(), lr=lambda step: 1e-3 / (1 + step), state_dtype="int8", min_8bit_size=1),
        Came(model.parameters(), lr=1e-3, max_grad_norm=1.0),
    ]


def measured(step: Callable[[], None], steps: int) -> tuple[int, int]:
    """Resident bytes and Python objects after so many steps."""
    for _ in range(steps):
        step()
    gc.collect()
    return resident(), len(gc.get_objects())


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
