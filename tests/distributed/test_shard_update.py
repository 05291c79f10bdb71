"""Weight-update sharding on two real ranks equals the unsharded optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from bighorn import FlatLayout, Fragment, Lamb, shard_update
from tests.distributed.test_process_group import run_ranks
from tests.support.processes import group_of_one

SCRIPT = """
    import functools, sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from bighorn import Came, Lamb, groups, schedules, shard_update
    from bighorn.compat.npu_bridge import LAMBOptimizer, NPUDistributedOptimizer

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))

    def grouped(net):
        return groups.by_rules(net.named_parameters(), [groups.Rule("bias", weight_decay=0.0)])

    def halves(step):
        torch.manual_seed(step)
        return torch.randn(2, 4, 5)

    def check(make, wrap, seen=lambda optimizer: None):
        whole, shared = network(), network()
        model = DistributedDataParallel(shared)
        alone, sharded = make(whole), wrap(make(shared), model)
        for step in range(5):
            inputs = halves(step)
            whole(inputs.flatten(0, 1)).square().mean().backward()
            alone.step()
            alone.zero_grad()
            loss = model(inputs[rank]).square().mean()
            if hasattr(sharded, "minimize"):
                sharded.minimize(loss)
            else:
                loss.backward()
                sharded.step()
                sharded.zero_grad()
            assert seen(alone) == seen(getattr(sharded, "opt", sharded))
        for a, b in zip(shared.parameters(), whole.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert not a.equal(next(iter(network().parameters()))) if a.shape == (7, 5) else True

    zero = lambda optimizer, model: shard_update(optimizer)
    rates = lambda optimizer: [group["lr"] for group in optimizer.param_groups]
    clip = dict(weight_decay=0.1, max_grad_norm=0.1)
    check(lambda net: Lamb(grouped(net), lr=schedules.Cosine(0.1, 8), **clip), zero, rates)
    check(lambda net: Lamb(net.named_parameters(), lr=0.1, exclude_from_weight_decay=["bias"], **clip), zero)
    check(lambda net: Came(grouped(net), lr=schedules.RelativeStep(), **clip), zero, rates)
    check(lambda net: torch.optim.AdamW(net.parameters(), lr=0.01), zero)
    for sharding in (False, True):
        check(
            lambda net: LAMBOptimizer(0.1, 0.01, exclude_from_weight_decay=["bias"], params=net.named_parameters()),
            lambda optimizer, model: NPUDistributedOptimizer(optimizer, sharding, model=model),
        )
    net = network()
    sharded = shard_update(Lamb(net.parameters(), lr=0.1))
    net(halves(0)[0]).square().mean().backward()
    sharded.step()
    here = len(sharded.optim.state)
    counts = torch.tensor([here])
    dist.all_reduce(counts)
    assert 0 < here < 6 and counts == 6, here  # each rank has state for its own tensors
    try:
        shard_update(Lamb(fully_shard(network()).parameters(), lr=0.1))
    except ValueError as error:
        assert "sharded already" in str(error), error
    else:
        raise AssertionError("no error")
"""


def test_it_equals_the_optimizer_that_holds_everything(tmp_path: Path) -> None:
    run_ranks(SCRIPT, 2, str(tmp_path / "store"))


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


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        shard_update(Lamb([Parameter(torch.ones(2))]))
