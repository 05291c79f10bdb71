"""Weight-update sharding on two ranks equals the unsharded optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from bighorn import Came, FlatLayout, Fragment, Lamb, groups, schedules, shard_update
from bighorn.compat.npu_bridge import LAMBOptimizer, NPUDistributedOptimizer
from tests.support.processes import group_of_one
from tests.support.ranks import ranks
from tests.support.tables import for_every

CLIP: dict[str, Any] = {"weight_decay": 0.1, "max_grad_norm": 0.1}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def grouped(net: nn.Module) -> list[dict[str, Any]]:
    return groups.by_rules(net.named_parameters(), [groups.Rule("bias", weight_decay=0.0)])


def halves(step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(2, 4, 5)


def lamb_with_a_schedule(net: nn.Module) -> Lamb:
    return Lamb(grouped(net), lr=schedules.Cosine(0.1, 8), **CLIP)


def lamb_with_an_exclusion(net: nn.Module) -> Lamb:
    return Lamb(net.named_parameters(), lr=0.1, exclude_from_weight_decay=["bias"], **CLIP)


def came(net: nn.Module) -> Came:
    return Came(grouped(net), lr=schedules.RelativeStep(), **CLIP)


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def lamb_of_npu_bridge(net: nn.Module) -> LAMBOptimizer:
    return LAMBOptimizer(0.1, 0.01, exclude_from_weight_decay=["bias"], params=net.named_parameters())


@for_every(
    ("make", "bridge"),
    [
        *((make, {}) for make in (lamb_with_a_schedule, lamb_with_an_exclusion, came, adamw)),
        *((lamb_of_npu_bridge, {"is_weight_update_sharding": sharding}) for sharding in (False, True)),
    ],
)
@ranks(2)
def test_it_equals_the_optimizer_that_holds_everything(
    make: Callable[[nn.Module], Any], bridge: dict[str, Any]
) -> None:
    whole, shared = network(), network()
    model = DistributedDataParallel(shared)
    alone, inner = make(whole), make(shared)
    sharded: Any = NPUDistributedOptimizer(inner, **bridge, model=model) if bridge else shard_update(inner)
    for step in range(5):
        inputs = halves(step)
        whole(inputs.flatten(0, 1)).square().mean().backward()
        alone.step()
        alone.zero_grad()
        loss = model(inputs[dist.get_rank()]).square().mean()
        if bridge:
            sharded.minimize(loss)
        else:
            loss.backward()
            sharded.step()
            sharded.zero_grad()
            rates = [[group["lr"] for group in each.param_groups] for each in (alone, sharded)]
            assert rates[0] == rates[1]
    for a, b, start in zip(shared.parameters(), whole.parameters(), network().parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert not a.equal(start)
    if not bridge:  # each rank has the state of its own tensors
        counts = torch.tensor([len(sharded.optim.state)])
        assert 0 < counts < 6
        dist.all_reduce(counts)
        assert counts == 6


def test_what_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="not Linear"):
        shard_update(model)  # type: ignore[arg-type]
    mixed = Lamb([Parameter(torch.ones(2)), Parameter(torch.ones(2, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match=r"torch\.bfloat16 and torch\.float32"):
        shard_update(mixed)
    stepped = Lamb(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    stepped.step()
    with pytest.raises(ValueError, match="before its first step"):
        shard_update(stepped)
    with pytest.raises(TypeError, match=r"process_group must be a .*ProcessGroup, not 3"):
        shard_update(Lamb(model.parameters()), process_group=3)


def test_what_is_spread_already() -> None:
    with group_of_one():
        layout = FlatLayout([[Fragment("w", (2, 1), numel=2)]])
        with pytest.raises(ValueError, match="flat tensors, whose state is on several ranks already"):
            shard_update(Lamb([{"params": [Parameter(torch.ones(2))], "flat_layout": layout}]))
        spread = shard_update(Lamb([Parameter(torch.ones(2))]))
        with pytest.raises(ValueError, match="is a ZeroRedundancyOptimizer, spread over ranks already"):
            shard_update(spread)
        net = network()
        fully_shard(net)
        with pytest.raises(ValueError, match="sharded already"):
            shard_update(Lamb(net.parameters(), lr=0.1))


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        shard_update(Lamb([Parameter(torch.ones(2))]))
