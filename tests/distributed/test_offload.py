"""Offload of sharded parameters on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.optim import AdamW, Optimizer

from bighorn import Came, Lamb, LossScaler, WindowScale, offload
from bighorn.offloading import OffloadedOptimizer
from tests.support.offloading import scaled_step
from tests.support.ranks import ranks
from tests.support.slow_copies import SlowCopies
from tests.support.tables import for_every

STEPS = 4
MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lamb": lambda net: Lamb(net.named_parameters(), lr=0.1, weight_decay=0.1),
    "clip": lambda net: Lamb(net.named_parameters(), lr=0.1, max_grad_norm=0.01, skip_nonfinite=True),
    "came": lambda net: Came(net.named_parameters(), lr=0.01),
    "adamw": lambda net: AdamW(net.parameters(), lr=0.01),
}


def network(sharded: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 71), nn.Tanh(), nn.LayerNorm(71), nn.Linear(71, 90), nn.Tanh(), nn.Linear(90, 3))
    if sharded:
        for layer in (net[0], net[2], net[3], net[5]):
            fully_shard(layer, **options)
        fully_shard(net, **options)
    return net


def loss_of(net: nn.Module, step: int, rank: int | None = None) -> Any:
    rank = dist.get_rank() if rank is None else rank
    return net(torch.randn(4, 9, generator=torch.Generator().manual_seed(7 * step + rank))).square().mean()


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def assert_equal(net: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
        assert whole(ours).equal(whole(theirs)), name


def offloaded(net: nn.Module, optimizer: Optimizer, **options: Any) -> OffloadedOptimizer:
    return offload(net, optimizer, bucket_mb=0.005, copies=SlowCopies(seed=dist.get_rank()), **options)


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@for_every("name", ["lamb", "clip", "came"])
@ranks(2)
def test_cpu_offload_policy(name: str) -> None:
    """Torch moves gradients and weights, and the optimizer steps shards in the host's memory."""
    nets = network(), network(offload_policy=CPUOffloadPolicy(pin_memory=False))
    for net in nets:
        train(net, MAKERS[name](net), range(STEPS))
    assert_equal(*nets)
    alone = network(sharded=False)
    optimizer = MAKERS[name](alone)
    for step in range(STEPS):
        (sum(loss_of(alone, step, rank) for rank in range(dist.get_world_size())) / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(nets[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), theirs.detach(), rtol=1e-3, atol=1e-5)


@for_every("name", MAKERS)
@ranks(2)
def test_shards(name: str) -> None:
    """offload() moves the shards in its own buckets."""
    nets = network(), network()
    plain, theirs = MAKERS[name](nets[0]), offloaded(nets[1], MAKERS[name](nets[1]))
    for net, optimizer in zip(nets, (plain, theirs), strict=True):
        train(net, optimizer, range(STEPS))
        assert all(param.grad is None for param in net.parameters())
    assert_equal(*nets)


@ranks(2)
def test_accumulation() -> None:
    nets = network(), network()
    plain, theirs = MAKERS["lamb"](nets[0]), offloaded(nets[1], MAKERS["lamb"](nets[1]))
    for step in range(STEPS):
        loss_of(nets[0], 2 * step).backward()
        loss_of(nets[0], 2 * step + 1).backward()
        with theirs.accumulate():
            loss_of(nets[1], 2 * step).backward()
        loss_of(nets[1], 2 * step + 1).backward()
        for optimizer in (plain, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(*nets)


@for_every("name", ["lamb", "came"])
@ranks(2)
def test_checkpoints(name: str) -> None:
    reference, nets = network(), (network(), network())
    train(reference, MAKERS[name](reference), range(STEPS))
    optimizers = [offloaded(net, MAKERS[name](net)) for net in nets]
    train(nets[0], optimizers[0], range(2))
    model, state = dcp.get_state_dict(nets[0], optimizers[0])
    dcp.set_state_dict(nets[1], optimizers[1], model_state_dict=model, optim_state_dict=state)
    train(nets[1], optimizers[1], range(2, STEPS))
    assert_equal(nets[1], reference)


@ranks(2)
def test_overflow_on_one_rank() -> None:
    nets = network(), network()
    scalers = [LossScaler(WindowScale(init_scale=64.0)) for _ in nets]
    plain, theirs = MAKERS["lamb"](nets[0]), offloaded(nets[1], MAKERS["lamb"](nets[1]), scaler=scalers[1])
    for step in range(STEPS):
        for net, optimizer, scaler in zip(nets, (plain, theirs), scalers, strict=True):
            overflows = step == 1 and dist.get_rank() == 1
            scaled_step(scaler, optimizer, loss_of(net, step) * (torch.inf if overflows else 1.0))
    assert_equal(*nets)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0


@ranks(2)
def test_forward_overlap_is_refused() -> None:
    net = network()
    with pytest.raises(ValueError, match="would send sums between ranks from two threads"):
        offloaded(net, MAKERS["lamb"](net), overlap="forward")
