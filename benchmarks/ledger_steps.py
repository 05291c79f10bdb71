"""The steps that `ledger.py` counts, with stand-ins for a GPU, another rank, and an offloading device."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.support

Step = Callable[[], Any]
Events = list[tuple[str, int]]
"""The events of a stand-in: names of launches, copies and tables, with their programs or bytes."""

KINDS: dict[str, type[Lamb | Came | Lars]] = {"lamb": Lamb, "came": Came, "lars": Lars}


def efficientnet_b0() -> list[tuple[int, ...]]:
    """Return the shapes of EfficientNet-B0, as in timm."""

    def convolution(out: int, channels: int, kernel: int = 1) -> list[tuple[int, ...]]:
        return [(out, channels, kernel, kernel), (out,), (out,)]

    shapes, channels = convolution(32, 3, 3), 32
    for kernel, out, blocks in ((3, 16, 1), (3, 24, 2), (5, 40, 2), (3, 80, 3), (5, 112, 3), (5, 192, 4), (3, 320, 1)):
        for _ in range(blocks):
            expanded, squeezed = channels if out == 16 else 6 * channels, channels // 4
            shapes += convolution(expanded, channels) if expanded != channels else []
            shapes += convolution(expanded, 1, kernel)
            shapes += [(squeezed, expanded, 1, 1), (squeezed,), (expanded, squeezed, 1, 1), (expanded,)]
            shapes += convolution(out, expanded)
            channels = out
    return [*shapes, *convolution(1280, channels), (1000, 1280), (1000,)]


TENSORS: dict[str, list[tuple[int, ...]]] = {
    "few": [(4, 4)] * 20,
    "tiny": [(4, 4)] * 200,
    "thousand": [(4, 4)] * 1000,
    "efficientnet_b0": efficientnet_b0(),
    "large": [(1024, 2048)],
}

USES: dict[str, dict[str, Any]] = {
    "": {},
    "clip": {"max_grad_norm": 1.0},
    "int8": {"state_dtype": "int8"},
    "bf16": {"weight_rounding": "stochastic"},
    "missing": {},  # a tenth of the gradients, in turn the first and the last
    "first": {},  # the step that creates the state
}

PLACES = {
    "cpu": ["tiny", "thousand", "efficientnet_b0", "large", *(f"tiny {use}" for use in USES if use)],
    "foreach": ["tiny", "efficientnet_b0", "large", "tiny clip"],
    "triton": ["tiny", "efficientnet_b0", "tiny clip", "tiny missing"],
    "sharded": ["few", "few clip"],
    "offload": ["few"],
}
"""The steps of each backend, of one of two ranks, and of an offloaded model: the tensors, and the use if any."""

ROWS = [f"{kind} {place} {step}" for place, each in PLACES.items() for kind in KINDS for step in each]


@contextlib.contextmanager
def steps_of(row: str) -> Iterator[tuple[Iterator[Step], Events]]:
    """Return steps of a row to call, without end, and the list that a stand-in adds events to."""
    kind, place, tensors, use = (*row.split(), "")[:4]
    events: Events = []
    placed: Callable[[Tensor], Tensor] = Parameter
    with contextlib.ExitStack() as stack:
        if place == "triton":
            from tests.support import fake_gpu

            patch = stack.enter_context(pytest.MonkeyPatch.context())
            events = stack.enter_context(fake_gpu.gpu(patch)).launched
            patch.setattr(torch, "frombuffer", _recording(torch.frombuffer, events))  # every table begins with it
        if place == "sharded":
            placed = stack.enter_context(_two_ranks())
        if place == "offload":
            yield stack.enter_context(contextlib.closing(_offloaded(KINDS[kind], events))), events
        else:
            backend = "cpu" if place == "sharded" else place
            yield _steps(KINDS[kind], backend, TENSORS[tensors], use, placed), events


def _steps(
    kind: type[Lamb | Came | Lars],
    backend: str,
    shapes: list[tuple[int, ...]],
    use: str,
    placed: Callable[[Tensor], Tensor],
) -> Iterator[Step]:
    """Yield steps whose gradients are at two addresses in turn."""
    dtype = torch.bfloat16 if use == "bf16" else torch.float32
    params, *both = [[placed(torch.ones(shape, dtype=dtype)) for shape in shapes] for _ in range(3)]
    params = [Parameter(param.detach()) for param in params]
    tenth = len(params) // 10 if use == "missing" else 0
    optimizer: Lamb | Came | Lars | None = None
    for turn in itertools.count():
        for i, (param, *grads) in enumerate(zip(params, *both, strict=True)):
            missing = i < tenth if turn % 2 else i >= len(params) - tenth
            param.grad = None if missing else grads[turn % 2].detach()
        if optimizer is None or use == "first":
            named = [(f"layer{i}", param) for i, param in enumerate(params)]
            optimizer = kind(named, lr=1e-4, weight_decay=0.01, backend=backend, **USES[use])
        yield optimizer.step


def _offloaded(kind: type[Lamb | Came | Lars], events: Events) -> Generator[Step, None, None]:
    """Yield backward passes with the steps after them."""
    from bighorn import offload
    from tests.support.slow_copies import SlowCopies

    class Copies(SlowCopies):
        def to_host(self, pairs: Any) -> Any:
            events.extend(("copies", host.nbytes) for host, _ in pairs)
            return super().to_host(pairs)

        def to_device(self, pairs: Any) -> Any:
            events.extend(("copies", host.nbytes) for host, _ in pairs)
            return super().to_device(pairs)

    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(10)))
    copies = Copies(delay=0.0, seed=None)
    optimizer: Any = offload(model, kind(model.parameters(), lr=1e-4), copies=copies, bucket_mb=0.01)

    def step(loss: Any) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        while True:
            yield partial(step, model(torch.ones(4, 32)).square().mean())
    finally:
        optimizer.synchronize()  # a process that ends during a copy is aborted


def _recording(frombuffer: Callable[..., Tensor], events: Events) -> Callable[..., Tensor]:
    def recorded(*arguments: Any, **options: Any) -> Tensor:
        table = frombuffer(*arguments, **options)
        events.append(("tables", table.nbytes))
        return table

    return recorded


@contextlib.contextmanager
def _two_ranks() -> Iterator[Callable[[Tensor], Tensor]]:
    """Pretend to be one of two ranks. Return a function that shards a tensor over them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.support.processes import end_process_group

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        yield lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
    finally:
        end_process_group()
