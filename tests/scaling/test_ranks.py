"""All ranks skip the same steps if a gradient of one rank overflows."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bighorn import ExponentialScale, Lamb, LossScaler, WindowScale
from tests.support.ranks import ranks
from tests.support.tables import for_every

pytestmark = pytest.mark.process


def make(mode: str, params: Iterable[Any]) -> Optimizer:
    if mode.startswith("Lamb"):
        return Lamb(params, lr=0.1, weight_decay=0.1)
    return torch.optim.AdamW(params, lr=0.1, fused=mode.startswith("fused"))


def same_on_all_ranks(value: object) -> bool:
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return bool(values[0] == values[1])


@pytest.mark.fsdp
@pytest.mark.filterwarnings("ignore")  # FSDP2's, which do not concern overflows
@for_every("mode", ["Lamb", "Lamb-clip", "AdamW", "AdamW-clip", "fused", "Lamb-fsdp2", "AdamW-fsdp2", "fused-fsdp2"])
@ranks(2)
def test_an_overflow_on_one_rank_skips_on_all(mode: str) -> None:
    """DistributedDataParallel or FSDP2 equals one process on the joined batch that omits the same steps."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    alone = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    alone.load_state_dict(net.state_dict())
    bad = False
    of_fsdp = mode.endswith("fsdp2")
    if of_fsdp:
        for layer in (net[0], net[2], net):
            fully_shard(layer)
    else:
        # Runs on this rank's own gradient, before the all-reduce.
        net.get_parameter("0.weight").register_hook(lambda grad: grad * torch.inf if bad and rank == 1 else grad)  # type: ignore[no-untyped-call]
    wrapped = net if of_fsdp else DistributedDataParallel(net)
    optimizer, other = make(mode, net.parameters()), make(mode, alone.parameters())
    scaler = LossScaler(ExponentialScale(1024.0, backoff_factor=0.5, growth_interval=2))
    scales = []
    for step in range(6):
        bad = step in (1, 2)
        data = torch.randn(4, 5)
        optimizer.zero_grad()
        scaler.scale(wrapped(data[2 * rank : 2 * rank + 2]).square().mean()).backward()
        if of_fsdp and bad and rank == 1:
            grad: Any = net.get_parameter("2.bias").grad
            grad.to_local().fill_(torch.nan)  # only this rank's shard
        if mode.endswith("clip"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if not bad:
            other.zero_grad()
            alone(data).square().mean().backward()
            if mode.endswith("clip"):
                nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            other.step()
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
        for a, b in zip(whole, alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert scales == [1024, 1024, 512, 512, 1024, 1024], scales
    assert same_on_all_ranks([p.tolist() for p in whole])


@for_every("mode", ["Lamb", "AdamW", "fused"])
@ranks(2)
def test_a_group_whose_ranks_have_tensors_of_their_own(mode: str) -> None:
    rank = dist.get_rank()
    # Each rank has other whole tensors; rank 1 has no gradient in some steps.
    names = [["a", "b"], ["c"]][rank]
    params = [Parameter(torch.ones(3)) for _ in names]
    optimizer = make(mode, zip(names, params, strict=True))
    group = dist.group.WORLD
    scaler = LossScaler(WindowScale(64.0), process_group=group, max_consecutive_overflows=2)
    scales = []
    for step, bad in enumerate((None, "b", None, "a", "c", "b")):
        optimizer.zero_grad()
        scaler.scale(torch.cat([*params]).sum()).backward()  # type: ignore[no-untyped-call]
        if rank == 1 and step in (0, 1, 3):
            optimizer.zero_grad()
        if bad in names:
            grad = params[names.index(bad)].grad
            assert grad is not None
            grad[1] = torch.nan
        before = [p.detach().clone() for p in params]
        if step == 5:  # "a" was the first, "c" the second and last that was allowed
            with pytest.raises(FloatingPointError, match=r"(?s)2 steps in a row.*gradients of c on rank 1\. "):
                scaler.step(optimizer)
            break
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped = [not p.equal(q) for p, q in zip(params, before, strict=True)]
        assert stepped == [bad is None and p.grad is not None for p in params], (step, stepped)
    assert scales == [64, 32, 32, 16, 8]
    assert same_on_all_ranks(scaler.state_dict())
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(scaler)


@for_every("mode", ["all", "idle"])
@ranks(2)
def test_mixed_meshes(mode: str) -> None:
    """Torch 2.13's GradScaler uses only the first gradient's mesh, and raises if plain tensors follow it."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))

    def parameter(mesh: DeviceMesh, *placements: Placement) -> Parameter:
        return Parameter(distribute_tensor(torch.ones(5, 3), mesh, placements))

    # The first gradient's mesh has one rank, the second's both, and the third is a plain tensor.
    params = [parameter(mesh["tp"], Replicate()), parameter(mesh["dp"], Shard(0)), Parameter(torch.ones(3))]
    names = ["alone", "sharded", "plain"]
    optimizer = torch.optim.SGD(zip(names, params, strict=True), lr=1.0, foreach=False)
    scaler = LossScaler(WindowScale(64.0), max_consecutive_overflows=3)
    scaler.scale(torch.ones(()))
    for place, on in ((0, 0), (None, 0), (1, 1), (2, 1), (0, 1)):
        for p in params:
            p.grad = torch.ones_like(p)
        if mode == "idle" and rank == 0:
            optimizer.zero_grad()
        elif place is not None and rank == on:
            grad: Any = params[place].grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = torch.inf
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
        before = [f.detach().clone() for f in full]
        scaler.step(optimizer)
        scaler.update()
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
        overflowed = place is not None and not (mode == "idle" and on == 0)
        stepped = any(not a.equal(b) for a, b in zip(before, full, strict=True))
        if mode == "all":
            assert stepped != overflowed, (place, on)
        assert same_on_all_ranks(scaler.state_dict())
    assert scaler.get_scale() == (8 if mode == "idle" else 4), scaler.get_scale()
    with pytest.raises(FloatingPointError, match=r"gradients of alone on rank 1\. "):
        scaler.step(optimizer)


@for_every("mode", ["Lamb", "AdamW"])
@ranks(2)
def test_a_zero_redundancy_optimizer(mode: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns; the ranks have it already

    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    before = [p.detach().clone() for p in net.parameters()]
    ddp = DistributedDataParallel(net)
    zero = ZeroRedundancyOptimizer(net.parameters(), Lamb if mode == "Lamb" else torch.optim.AdamW, lr=0.1)
    bad = True
    net.get_parameter("0.bias").register_hook(lambda grad: grad * torch.nan if bad and rank == 0 else grad)  # type: ignore[no-untyped-call]
    scaler = LossScaler(WindowScale(64.0))
    for bad in (True, False):
        zero.zero_grad()
        scaler.scale(ddp(torch.ones(2, 5) * (rank + 1)).square().mean()).backward()
        scaler.step(zero)
        scaler.update()
        assert all(a.equal(b) == bad for a, b in zip(before, net.parameters(), strict=True))
        assert all(p.isfinite().all() for p in net.parameters())
    assert scaler.get_scale() == 32
    assert same_on_all_ranks([p.tolist() for p in net.parameters()])
