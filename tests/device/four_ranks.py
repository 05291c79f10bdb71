"""The program of each of four ranks on the stand-in: parallel trainings, compared with one process on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bighorn import Came, Lamb, Lars
from tests.device import staged_group, stand_in
from tests.device.test_loops import CLOSE, OPTIONS, STEPS, gradients, network, optimizer_of, plain
from tests.support.processes import run_scenarios

RANKS = 4
RANK = int(os.environ.get("RANK", "0"))


class Given(nn.Module):
    """A network whose loss has given gradients; its output has no part in them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network("npu")

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        total: Tensor = 0 * self.net(torch.ones(4, 9).to("npu")).square().mean()
        for param, grad in zip(self.net.parameters(), gradients, strict=True):
            given = grad.to("npu")
            if isinstance(param, DTensor):
                given = distribute_tensor(given, param.device_mesh, param.placements, src_data_rank=None)
            product = (param * given).sum()
            total = total + (product.full_tensor() if isinstance(product, DTensor) else product)
        return total


@cache
def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("npu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])


def ddp(model: Given) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: Given) -> nn.Module:
    """Rows of three, and a bias of three, leave the last rank nothing."""
    fully_shard(model, mesh=mesh(RANKS))
    assert [param.to_local().numel() == 0 for param in model.net[-1].parameters()] == [RANK == RANKS - 1] * 2  # type: ignore[attr-defined]
    return model


def hsdp(model: Given) -> nn.Module:
    """Two copies, each of unequal shards."""
    fully_shard(model, mesh=mesh(2, 2))
    return model


def tensor_parallel(model: Given) -> nn.Module:
    """Within FSDP2, so that shards are strided."""
    parallelize_module(
        model.net, mesh(2, 2)["inner"], {"3": ColwiseParallel(), "5": RowwiseParallel()}, src_data_rank=None
    )
    fully_shard(model, mesh=mesh(2, 2)["outer"])
    return model


def trained_on_the_cpu(kind: Any, options: str) -> list[Tensor]:
    net = network("cpu")
    plain(net, optimizer_of(kind, net, **OPTIONS[options]))
    return list(net.parameters())


def equals_the_cpu(way: Any, kind: Any, options: str) -> None:
    """Pairs of ranks have other gradients, whose mean is that of the CPU's training."""
    model = Given()
    parallel = way(model)
    optimizer = optimizer_of(kind, model.net, **OPTIONS[options])
    for step in range(STEPS):
        parallel([grad * (0.5 + RANK // 2) for grad in gradients(step)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    close = CLOSE if options != "int8" else {"rtol": 1e-2, "atol": 1e-2}
    for our, their in zip(model.net.parameters(), trained_on_the_cpu(kind, options), strict=True):
        whole = our.full_tensor() if isinstance(our, DTensor) else our
        torch.testing.assert_close(whole.detach().cpu(), their.detach(), **close)


WAYS = {ddp: ("clip", "int8"), fsdp2: ("clip", "int8"), hsdp: ("clip", "int8"), tensor_parallel: ("clip",)}
"""Columns that two ranks share cut through the blocks of int8, which is refused."""

CASES = {
    f"{way.__name__}-{kind.__name__}-{options}": partial(equals_the_cpu, way, kind, options)
    for way, each in WAYS.items()
    for kind in (Lamb, Came, Lars)
    for options in each
}


def scenarios(mode: str) -> dict[str, Any]:
    """Return what runs in a mode: without float64 what needs norms over all ranks."""
    return {name: case for name, case in CASES.items() if mode == "complete" or name.endswith("clip")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    stand_in.begin(mode)
    staged_group.register()
    store = f"file://{folder / 'store'}"
    dist.init_process_group(staged_group.BACKEND, init_method=store, rank=RANK, world_size=RANKS)
    run_scenarios(scenarios(mode), folder / f"report-{RANK}")
