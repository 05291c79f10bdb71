"""Offload of sharded parameters on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.optim import AdamW

from bighorn import Came, Lamb, LossScaler, WindowScale, offload
from tests.support.offloading import Make, Twins, assert_equal, loss_of, network, scaled_step, train
from tests.support.ranks import ranks
from tests.support.sharded_runs import full
from tests.support.slow_copies import SlowCopies
from tests.support.tables import for_every

STEPS = 4
MAKERS: dict[str, Make] = {
    "lamb": lambda net: Lamb(net.named_parameters(), lr=0.1, weight_decay=0.1),
    "clip": lambda net: Lamb(net.named_parameters(), lr=0.1, max_grad_norm=0.01, skip_nonfinite=True),
    "came": lambda net: Came(net.named_parameters(), lr=0.01),
    "adamw": lambda net: AdamW(net.parameters(), lr=0.01),
}


def sharded(**options: Any) -> Any:
    net = network()
    for layer in (net[0], net[2], net[3], net[5]):
        fully_shard(layer, **options)
    fully_shard(net, **options)
    return net


def samples(steps: range, rank: int | None = None) -> list[int]:
    """Return the numbers of the samples of a rank."""
    return [7 * step + (dist.get_rank() if rank is None else rank) for step in steps]


def twins(name: str, **options: Any) -> Twins:
    return Twins(MAKERS[name], sharded, bucket_mb=0.005, copies=SlowCopies(seed=dist.get_rank()), **options)


@pytest.mark.fsdp
@for_every("name", ["lamb", "clip", "came"])
@ranks(2)
def test_cpu_offload_policy(name: str) -> None:
    """Torch moves gradients and weights, and the optimizer steps shards in the host's memory."""
    nets = sharded(), sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    for net in nets:
        train(net, MAKERS[name](net), samples(range(STEPS)))
    assert_equal(*nets)
    alone = network()
    optimizer = MAKERS[name](alone)
    for step in range(STEPS):
        losses = [loss_of(alone, *samples(range(step, step + 1), rank)) for rank in range(dist.get_world_size())]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(nets[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(ours).detach(), theirs.detach(), rtol=1e-3, atol=1e-5)


@for_every("name", MAKERS)
@ranks(2)
def test_shards(name: str) -> None:
    """offload() moves the shards in its own buckets."""
    both = twins(name)
    both.train(samples(range(STEPS)))
    assert all(param.grad is None for param in both.nets[1].parameters())
    both.assert_equal()


@for_every("name", ["lamb", "came", "adamw"])
@ranks(2)
def test_checkpoints(name: str) -> None:
    both, net = twins(name), sharded()
    both.train(samples(range(2)))
    model, state = dcp.get_state_dict(both.nets[1], both.offloaded)
    assert set(state["state"]) == set(dict(net.named_parameters()))
    optimizer = offload(net, MAKERS[name](net), copies=SlowCopies())
    dcp.set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
    train(both.nets[0], both.plain, samples(range(2, STEPS)))
    train(net, optimizer, samples(range(2, STEPS)))
    assert_equal(net, both.nets[0])


@ranks(2)
def test_overflow_on_one_rank() -> None:
    scalers = [LossScaler(WindowScale(init_scale=64.0)) for _ in "12"]
    both = twins("lamb", scaler=scalers[1])
    for step in range(STEPS):
        overflows = step == 1 and dist.get_rank() == 1
        for (net, optimizer), scaler in zip(both, scalers, strict=True):
            loss = loss_of(net, *samples(range(step, step + 1)))
            scaled_step(scaler, optimizer, loss * (torch.inf if overflows else 1.0))
    both.assert_equal()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
