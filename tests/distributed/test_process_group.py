"""`grad_norm_group`: the global gradient norm if each rank has other whole tensors, as under ZeRO."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars, shard_update
from tests.support.cases import Kind, set_gradients
from tests.support.processes import group_of_one
from tests.support.ranks import ranks
from tests.support.tables import for_every

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, on import (torch 2.13)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def parameters() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(5, 4)), Parameter(torch.randn(70))]


def gradients(mode: str, step: int) -> list[Tensor | None]:
    """Return gradients; a mode omits one, so that rank 1 has nothing to do, or makes one NaN."""
    torch.manual_seed(1)
    matrix, vector = torch.randn(5, 4), torch.randn(70)
    if mode == "nonfinite" and step == 1:
        matrix[0, 0] = torch.nan
    return [matrix, None if mode == "idle" else vector]


OWN: dict[Kind, dict[str, Any]] = {
    Lamb: {"betas": (0.8, 0.9)},
    Came: {"betas": (0.8, 0.9, 0.99), "eps": (1e-2, 1e-16), "bias_correction": True},
    Lars: {"trust_coefficient": 0.3, "lr_in_momentum": False},
}
"""Options that show the scale of gradients, which a small eps would hide."""


@pytest.mark.parametrize("mode", ["finite", "nonfinite", "idle", "empty"])
@ranks(2)
def test_the_norm_is_summed_over_the_group(kind: Kind, mode: str) -> None:
    """Clips and skips equal one process with all tensors, also if a rank has no gradients or parameters."""
    options = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.5, "skip_nonfinite": True, **OWN[kind]}
    whole, rank = parameters(), dist.get_rank()
    indices = ([0, 1] if rank == 0 else []) if mode == "empty" else [rank]
    mine = [parameters()[i] for i in indices]
    alone = kind(whole, **options)
    sharded = kind([{"params": mine}], grad_norm_group=dist.group.WORLD, **options)
    for step in range(3):
        grads = gradients(mode, step)
        set_gradients(whole, grads)
        set_gradients(mine, [grads[i] for i in indices])
        alone.step()
        sharded.step()
    assert sharded.telemetry().skipped == alone.telemetry().skipped
    for i, p in zip(indices, mine, strict=True):
        torch.testing.assert_close(p, whole[i], rtol=1e-6, atol=1e-7)
        assert mode == "idle" or not p.equal(parameters()[i])


# ---- ZeroRedundancyOptimizer ----------------------------------------------------------------------------------------


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def small() -> nn.Module:
    """Return a model with fewer parameters than ranks."""
    torch.manual_seed(0)
    return nn.Linear(5, 3, bias=False)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@for_every(("model", "clips"), [(large, "no"), (large, "by option"), (large, "by group"), (small, "by group")])
@ranks(1, 2)
def test_a_zero_redundancy_optimizer_is_one_optimizer(kind: Kind, model: Callable[[], nn.Module], clips: str) -> None:
    """Steps and checkpoints equal one optimizer; a checkpoint also loads without ZeRO.

    The wrapper writes an option of the whole optimizer into every group.
    """
    if clips == "by option" and dist.get_world_size() > 1:
        return  # refused: ranks would clip by the norm of their own parameters
    options = {"lr": 0.1, "weight_decay": 0.1, **OWN[kind]}
    clip: dict[str, Any] = {} if clips == "no" else {"max_grad_norm": 0.5}
    grouped: Any = functools.partial(kind, grad_norm_group=dist.group.WORLD, **clip)
    made = (grouped, {}) if clips == "by group" else (kind, clip)

    def sharing(net: nn.Module) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(net.parameters(), made[0], **options, **made[1])

    alone, sharded = model(), model()
    whole, zero = kind(alone.parameters(), **options, **clip), sharing(sharded)
    train(alone, whole, range(3))
    train(sharded, zero, range(3))
    assert_same(sharded, alone)

    zero.consolidate_state_dict(to=0)
    states = [zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(states)
    zero = sharing(sharded)
    zero.load_state_dict(states[0])  # type: ignore[arg-type]
    train(alone, whole, range(3, 5))
    train(sharded, zero, range(3, 5))
    assert_same(sharded, alone)

    other = kind(sharded.parameters(), **options, **clip)
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        other.load_state_dict(zero.state_dict())
        train(alone, whole, range(5, 6))
        train(sharded, other, range(5, 6))
        assert_same(sharded, alone)


class Shares(torch.optim.Optimizer):
    """Gives each rank a part of the parameters, like FairScale's OSS."""

    def __init__(self, params: Any, optim: Any, **options: Any) -> None:
        super().__init__(params, options)
        rank = dist.get_rank()
        self.optim = optim([group | {"params": group["params"][rank::2]} for group in self.param_groups], **options)


class Whole(torch.optim.Optimizer):
    """Wraps an optimizer of all parameters, like Lookahead and SAM."""

    def __init__(self, params: Any, optim: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.optim = optim(self.param_groups, **options)


@pytest.mark.parametrize("kind", [Lamb, Came], indirect=True, ids=["lamb", "came"])
@pytest.mark.parametrize("option", [{"max_grad_norm": 0.5}, {"skip_nonfinite": True}], ids=str)
@ranks(2)
def test_a_zero_redundancy_optimizer_that_would_clip_by_rank(kind: Kind, option: dict[str, Any]) -> None:
    """Each rank once clipped its own parameters, and skipped its part of a step; `grad_norm_group` prevents it."""
    net = large()
    Whole(net.parameters(), kind, lr=0.1, **option)
    Shares(net.parameters(), kind, lr=0.1)
    with pytest.raises(ValueError, match="Shares gives each rank a part"):
        Shares(net.parameters(), kind, lr=0.1, **option)
    name, group = next(iter(option)), dist.group.WORLD
    for make, given, text in (
        (kind, option, name),
        (kind, {"process_group": group, **option}, name),
        (kind, {"grad_norm_group": group, **option}, "cannot be saved"),
        (functools.partial(kind, **option), {}, name),
    ):
        with pytest.raises(ValueError, match=text) as refused:
            ZeroRedundancyOptimizer(net.parameters(), make, lr=0.1, **given)  # type: ignore[arg-type]
        assert "shard_update" in str(refused.value)
        assert "grad_norm_group=" in str(refused.value)
    shard_update(kind(net.named_parameters(), lr=0.1, **option))
    ZeroRedundancyOptimizer(net.parameters(), kind, lr=0.1, max_grad_norm=None, skip_nonfinite=False)


# ---- the group ------------------------------------------------------------------------------------------------------


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
