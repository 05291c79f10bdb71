"""The program of each of two ranks on the stand-in: DDP and FSDP2, compared with one process on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bighorn import Came, Lamb, Lars
from tests.device import staged_group, stand_in
from tests.device.test_loops import CLOSE, OPTIONS, STEPS, gradients, loss_of, network, optimizer_of, plain
from tests.support.processes import run_scenarios

RANK = int(os.environ.get("RANK", "0"))


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], options: str) -> None:
    close = CLOSE if options != "int8" else {"rtol": 1e-2, "atol": 1e-2}
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.detach().cpu(), their.detach(), **close)


def trained_on_the_cpu(kind: Any, options: str) -> list[Tensor]:
    net = network("cpu")
    plain(net, optimizer_of(kind, net, **OPTIONS[options]))
    return list(net.parameters())


def shard(whole: Tensor) -> Tensor:
    """Return the rows that FSDP2 gives to this rank."""
    return whole.tensor_split([-(-len(whole) // 2)])[RANK]


def fsdp2(kind: Any, options: str) -> None:
    """Rows of three, and a bias of three, are two on one rank and one on the other."""
    net, mesh = network("npu"), init_device_mesh("npu", (2,))
    fully_shard(net, mesh=mesh)
    assert [param.to_local().shape[0] for param in net[-1].parameters()] == [2 - RANK, 2 - RANK]  # type: ignore[attr-defined]
    optimizer = optimizer_of(kind, net, **OPTIONS[options])
    for step in range(STEPS):
        net(torch.ones(4, 9).to("npu")).square().mean().backward()
        for param, given in zip(net.parameters(), gradients(step), strict=True):
            assert isinstance(param.grad, DTensor)
            param.grad.to_local().copy_(shard(given).to("npu"))
        optimizer.step()
        optimizer.zero_grad()
    ours = [param.to_local() for param in net.parameters()]  # type: ignore[attr-defined]
    assert_close(ours, [shard(param) for param in trained_on_the_cpu(kind, options)], options)


def ddp(kind: Any, options: str) -> None:
    """Ranks have other gradients, whose mean is that of the CPU's training."""
    net = network("npu")
    parallel = DistributedDataParallel(net)
    optimizer = optimizer_of(kind, net, **OPTIONS[options])
    for step in range(STEPS):
        loss = loss_of(net, step) * (0.5 + RANK)
        (loss + 0 * parallel(torch.ones(4, 9).to("npu")).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(list(net.parameters()), trained_on_the_cpu(kind, options), options)


SCENARIOS = {
    f"{way.__name__}-{kind.__name__}-{options}": lambda way=way, kind=kind, options=options: way(kind, options)
    for way in (fsdp2, ddp)
    for kind in (Lamb, Came, Lars)
    for options in ("clip", "int8")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    stand_in.begin("complete")
    staged_group.register()
    folder = Path(sys.argv[1])
    dist.init_process_group(staged_group.BACKEND, init_method=f"file://{folder / 'store'}", rank=RANK, world_size=2)
    run_scenarios(SCENARIOS, folder / f"report-{RANK}")
