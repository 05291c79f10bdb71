"""`grad_norm_group`: the global gradient norm if each rank has whole tensors of its own, as under ZeRO."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Lamb
from tests.support.cases import Kind
from tests.support.processes import assert_ended_well, group_of_one, outcomes

SCRIPT = """
    import sys, torch
    import torch.distributed as dist
    from torch.nn import Parameter
    from bighorn import Came, Lamb, Lars

    rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def parameters():
        torch.manual_seed(0)
        return [Parameter(torch.randn(5, 4)), Parameter(torch.randn(70))]

    def gradients(bad):
        torch.manual_seed(1)
        grads = [torch.randn(5, 4), torch.randn(70)]
        if bad:
            grads[0][0, 0] = torch.nan
        if mode == "idle":
            grads[1] = None  # rank 1 has nothing to do in this step
        return grads

    def check(kind, **own):
        options = dict(lr=0.1, weight_decay=0.1, max_grad_norm=0.5, skip_nonfinite=True, **own)
        whole = parameters()
        alone = kind(whole, **options)
        all_here = [0, 1] if rank == 0 else []
        indices = all_here if mode == "empty" else [rank]
        mine = [parameters()[i] for i in indices]
        sharded = kind([{"params": mine}], grad_norm_group=dist.group.WORLD, **options)
        for bad in (False, mode == "nonfinite", False):
            grads = gradients(bad)
            for p, g in zip(whole, grads):
                p.grad = None if g is None else g.clone()
            for i, p in zip(indices, mine):
                p.grad = None if grads[i] is None else grads[i].clone()
            alone.step()
            sharded.step()
        assert sharded.telemetry().skipped == alone.telemetry().skipped
        for i, p in zip(indices, mine):
            torch.testing.assert_close(p, whole[i], rtol=1e-6, atol=1e-7)
            assert mode == "idle" or not p.equal(parameters()[i])

    check(Lamb)
    check(Lars, trust_coefficient=0.3, lr_in_momentum=False)
    check(Came, eps=(1e-2, 1e-16))  # a small one would hide by what gradients were scaled
"""


def run_ranks(script: str, world: int, *arguments: str) -> None:
    assert_ended_well(outcomes(script, [[rank, *arguments] for rank in range(world)]))


@pytest.mark.parametrize("mode", ["finite", "nonfinite", "idle", "empty"])
def test_the_norm_is_summed_over_the_group(mode: str, tmp_path: Path) -> None:
    """Clips and skips equal those of one process with all tensors, also with a rank without gradients or parameters."""
    run_ranks(SCRIPT, 2, str(tmp_path / "store"), mode)


ZERO = """
    import functools, sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from bighorn import Came, Lamb, Lars

    rank, store, world = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)

    def large():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    def small():
        torch.manual_seed(0)
        return nn.Linear(5, 3, bias=False)

    def train(net, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            net(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()

    def assert_same(ours, theirs):
        for a, b in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    own = {Lars: dict(trust_coefficient=0.3)}
    own |= {Lamb: dict(betas=(0.8, 0.9)), Came: dict(betas=(0.8, 0.9, 0.99), eps=(1e-2, 1e-16), bias_correction=True)}
    clip = dict(max_grad_norm=0.5)
    def cases(kind):
        grouped = functools.partial(kind, grad_norm_group=dist.group.WORLD, **clip)
        yield kind, large, kind, {}, {}
        if world == 1:  # two ranks would clip by the norm of their own parameters, and are refused
            yield kind, large, kind, clip, clip
        yield kind, large, grouped, {}, clip
        yield kind, small, grouped, {}, clip

    for kind, model, make, extra, same in (*cases(Lamb), *cases(Came), *cases(Lars)):
        options = dict(lr=0.1, weight_decay=0.1, **own[kind])
        alone, sharded = model(), model()
        whole = kind(alone.parameters(), **options, **same)
        zero = ZeroRedundancyOptimizer(sharded.parameters(), make, **options, **extra)
        train(alone, whole, range(3))
        train(sharded, zero, range(3))
        assert_same(sharded, alone)

        zero.consolidate_state_dict(to=0)
        states = [zero.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(states)
        zero = ZeroRedundancyOptimizer(sharded.parameters(), make, **options, **extra)
        zero.load_state_dict(states[0])
        train(alone, whole, range(3, 5))
        train(sharded, zero, range(3, 5))
        assert_same(sharded, alone)

        other = kind(sharded.parameters(), **options, **same)
        zero.consolidate_state_dict(to=0)
        if rank == 0:
            other.load_state_dict(zero.state_dict())
            train(alone, whole, range(5, 6))
            train(sharded, other, range(5, 6))
            assert_same(sharded, alone)
"""


@pytest.mark.parametrize("world", [1, 2])
def test_a_zero_redundancy_optimizer_is_one_optimizer(world: int, tmp_path: Path) -> None:
    """Steps and checkpoints equal those of one optimizer; a checkpoint also loads into an optimizer without ZeRO.

    The cases are the plain wrapper, an option of the whole optimizer, which the wrapper writes into every group, the
    global norm, and fewer parameters than ranks.
    """
    run_ranks(ZERO, world, str(tmp_path / "store"), str(world))


REFUSED = """
    import functools, sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from bighorn import Came, Lamb, shard_update
    from bighorn_workbench.ranks import end_process_group

    class Shares(torch.optim.Optimizer):  # as FairScale's OSS
        def __init__(self, params, optim, **options):
            super().__init__(params, options)
            groups = [group | {"params": group["params"][rank::2]} for group in self.param_groups]
            self.optim = optim(groups, **options)

    class Whole(torch.optim.Optimizer):  # as Lookahead and SAM
        def __init__(self, params, optim, **options):
            super().__init__(params, options)
            self.optim = optim(self.param_groups, **options)

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for kind in (Lamb, Came):
        for option in (dict(max_grad_norm=0.5), dict(skip_nonfinite=True)):
            Whole(net.parameters(), kind, lr=0.1, **option)
            Shares(net.parameters(), kind, lr=0.1)
            try:
                Shares(net.parameters(), kind, lr=0.1, **option)
            except ValueError as error:
                assert "Shares gives each rank a part" in str(error), error
            else:
                raise AssertionError("it was not refused")
            for make, given, said in (
                (kind, option, next(iter(option))),
                (kind, dict(process_group=dist.group.WORLD, **option), next(iter(option))),
                (kind, dict(grad_norm_group=dist.group.WORLD, **option), "cannot be saved"),
                (functools.partial(kind, **option), {}, next(iter(option))),
            ):
                try:
                    ZeroRedundancyOptimizer(net.parameters(), make, lr=0.1, **given)
                except ValueError as error:
                    assert said in str(error), error
                    assert "shard_update" in str(error) and "grad_norm_group=" in str(error), error
                else:
                    raise AssertionError("it was not refused")
            shard_update(kind(net.named_parameters(), lr=0.1, **option))
            ZeroRedundancyOptimizer(net.parameters(), kind, lr=0.1, max_grad_norm=None, skip_nonfinite=False)
    end_process_group()
"""


def test_a_zero_redundancy_optimizer_that_would_clip_by_rank(tmp_path: Path) -> None:
    """Each rank once clipped its own parameters, and skipped its part of a step; `grad_norm_group` prevents this."""
    run_ranks(REFUSED, 2, str(tmp_path / "store"))


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with group_of_one() as group:
        yield group


def test_a_group_that_nothing_uses(group: Any, kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"(?s)grad_norm_group.*max_grad_norm"):
        kind([Parameter(torch.ones(3))], lr=0.1, grad_norm_group=group)
    kind([Parameter(torch.ones(3))], lr=0.1, grad_norm_group=group, skip_nonfinite=True)


def test_a_copy_has_the_same_group(group: Any) -> None:
    parameter = Parameter(torch.ones(3))
    both = (parameter, Lamb([parameter], lr=0.1, max_grad_norm=0.5, grad_norm_group=group))
    copied = copy.deepcopy(both)
    for tensor, optimizer in (both, copied):
        tensor.grad = torch.arange(3.0)
        optimizer.step()
        assert optimizer._settings.grad_norm_group is group
        assert optimizer.state[tensor]["exp_avg"].norm() == pytest.approx(0.05)
    assert copied[0] is not parameter
    assert copied[0].equal(parameter)


def test_a_group_cannot_be_pickled(group: Any, kind: Kind) -> None:
    optimizer = kind([Parameter(torch.ones(3))], lr=0.1, max_grad_norm=0.5, grad_norm_group=group)
    with pytest.raises(TypeError, match=r"(?s)grad_norm_group.*state_dict"):
        pickle.dumps(optimizer)
    pickle.dumps(optimizer.state_dict())
