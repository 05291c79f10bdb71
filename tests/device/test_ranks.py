"""Trainings of four ranks on the stand-in end like one process on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.device import staged_group
from tests.device.devices import CPU, Device
from tests.device.stand_in import MODES, why_absent
from tests.device.trainings import OPTIONS, STEPS, assert_close, gradients, network, optimizer_of, plain
from tests.support.cases import Kind
from tests.support.ranks import ranks

pytestmark = [pytest.mark.process, pytest.mark.skipif(why_absent() is not None, reason=str(why_absent()))]


def last() -> nn.Module:
    """Return a layer with three rows and a bias of three; the last of four ranks has none of either."""
    return nn.Linear(90, 3)


class Given(nn.Module):
    """A network whose loss has given gradients, independent of its output."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.net = network(device, last=last)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        total: Tensor = 0 * self.net(torch.ones(4, 9).to("npu")).square().mean()
        for param, grad in zip(self.net.parameters(), gradients, strict=True):
            given = grad.to("npu")
            if isinstance(param, DTensor):
                given = distribute_tensor(given, param.device_mesh, param.placements, src_data_rank=None)
            product = (param * given).sum()
            total = total + (product.full_tensor() if isinstance(product, DTensor) else product)
        return total


def parallel(model: Given, way: str) -> Any:
    """Return a model whose ranks compute together."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("npu", (4,)))
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("outer", "inner"))
    if way == "hsdp":  # two copies, each of unequal shards
        return fully_shard(model, mesh=mesh)
    plan = {"3": ColwiseParallel(), "5": RowwiseParallel()}
    parallelize_module(model.net, mesh["inner"], plan, src_data_rank=None)
    return fully_shard(model, mesh=mesh["outer"])  # shards are strided


def rows() -> list[Any]:
    """Return modes, ways and options; without float64 only those that need norms over all ranks.

    Columns that two ranks share cut through the blocks of int8, which is refused.
    """
    return [
        pytest.param(mode, way, options, marks=[pytest.mark.slow] * (mode == MODES[2]))
        for mode in MODES
        for way in ("ddp", "fsdp2", "hsdp", "tensor-parallel")
        for options in ("clip", "int8")
        if options == "clip" or (mode == "complete" and way != "tensor-parallel")
    ]


@pytest.mark.parametrize(("mode", "way", "options"), rows())
@ranks(4, set_up=lambda mode, **_: (staged_group.join, mode))
def test_ranks_are_one_process(mode: str, way: str, options: str, kind: Kind) -> None:
    """Pairs of ranks have different gradients; their mean is the gradient on the CPU."""
    device = Device(mode, "npu")
    rank, alone, model = dist.get_rank(), network(CPU, last=last), Given(device)
    plain(alone, optimizer_of(kind, alone, CPU, **OPTIONS[options]), CPU)
    together = parallel(model, way)
    if way == "fsdp2":
        assert [param.to_local().numel() == 0 for param in model.net[-1].parameters()] == [rank == 3] * 2  # type: ignore[attr-defined]
    more: dict[str, Any] = {}
    if way == "tensor-parallel":  # layers that are not cut up along "inner" have copies there
        more["grad_norm_group"] = model.net[0].weight.device_mesh.get_group()  # type: ignore[operator, union-attr]
    optimizer = optimizer_of(kind, model.net, device, **OPTIONS[options], **more)
    for step in range(STEPS):
        together([grad * (0.5 + rank // 2) for grad in gradients(alone, step)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    ends = {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().cpu()
        for name, param in model.net.named_parameters()
    }
    exact = {name: param.detach() for name, param in alone.named_parameters()}
    assert_close(ends, exact, device.rtol, coded=options == "int8")
