"""LAMB, CAME and LARS inside of megatron-core's distributed optimizer, on several ranks and a CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bighorn import Came, Lamb, Lars, megatron_groups
from tests.support.cases import Kind
from tests.support.tables import for_every

if find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: pip install --no-deps megatron-core", allow_module_level=True)

from tests.support.flat_runs import refused
from tests.support.megatron_core import Megatron, on_the_cpu
from tests.support.ranks import ranks
from tests.support.sharded_runs import assert_close, cost

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's own

Options = Mapping[str, Any]
SMALL, LARGE = 300, 10**6
"""Sizes of buckets: several of them, and one."""

LAMB: Options = {"lr": 0.1, "exclude_from_layer_adaptation": [r"^1\.", "bias"]}
CAME: Options = {"lr": 0.01, "bias_correction": True}
LARS: Options = {"lr": 0.1}
DTYPES = (torch.float32, torch.bfloat16)
EACH = [(Lamb, LAMB), (Came, CAME), (Lars, LARS)]


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(9, 40), nn.LayerNorm(40), nn.Linear(40, 13, bias=False), nn.Linear(13, 1)
    return nn.Sequential(*layers).to(dtype)


def inside(kind: Kind, dtype: torch.dtype, bucket_size: int, **options: Any) -> Megatron:
    """Return a model in Megatron, with one of our optimizers inside."""
    megatron = Megatron(network(dtype), bucket_size)
    megatron.distributed.optimizer = kind(megatron_groups(megatron.distributed), **options)
    for group in megatron.distributed.optimizer.param_groups:
        group["weight_decay"] = 0.1 * group["wd_mult"]  # like Megatron's scheduler
    return megatron


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def flat(megatron: Megatron) -> list[Tensor]:
    return [p for group in megatron.distributed.optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "bucket_size"),
    [
        *itertools.product([Lamb], [LAMB], DTYPES, (SMALL, LARGE)),
        *itertools.product([Came], [CAME], DTYPES, (SMALL, LARGE)),
        *itertools.product([Lars], [LARS], DTYPES, [SMALL]),
    ],
)
@ranks(2, 4)
@on_the_cpu()
def test_equals_one_process(kind: Kind, options: Options, dtype: torch.dtype, bucket_size: int) -> None:
    """Ten steps equal one process with the same gradients and float32 weights."""
    megatron, theirs = inside(kind, dtype, bucket_size, **options), network(dtype).float()
    named = list(theirs.named_parameters())
    decay = [{"params": [item for item in named if item[1].dim() > 1], "weight_decay": 0.1}]
    alone = kind([*decay, {"params": [item for item in named if item[1].dim() < 2], "weight_decay": 0.0}], **options)
    for group in alone.param_groups:
        group["lr"] = 0.1  # groups keep Megatron's rate
    for step in range(10):
        grads = gradients(theirs, step)
        megatron.step(grads)
        for name, q in named:
            q.grad = grads[name]
        alone.step()
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-8
    for (name, p), (_, q) in zip(megatron.model.named_parameters(), named, strict=True):
        assert_close(p, q, tolerance, name)
    names, ranges = {p: name for name, p in megatron.model.named_parameters()}, megatron.ranges()
    distributed = megatron.distributed
    empty = 0
    for index, group in enumerate(distributed.optimizer.param_groups):
        assert "wd_mult" in group
        mine = [*distributed.model_fp32_groups[index], *distributed.model_float16_groups[index]]
        empty += not mine
        for p, shard in zip(mine, group["params"], strict=False):
            whole = theirs.get_parameter(names[p]).view(-1)
            assert (shard - whole[ranges[p]]).abs().max() <= 2e-6 * whole.abs().max(), names[p]
    without = torch.tensor([empty])
    dist.all_reduce(without)
    assert without > 0 or dist.get_world_size() == 2  # with four ranks, one has nothing of a group
    assert set(distributed.optimizer.telemetry().names) == set(alone.telemetry().names)
    assert cost(distributed.optimizer)[0] == (3 if kind is Came else 1)


@for_every(("kind", "options"), EACH)
@ranks(2, 4)
@on_the_cpu()
def test_resumes(kind: Kind, options: Options, folder: Path) -> None:
    """A run continues bit for bit after the page's save and load, which need the float32 weights."""
    megatron = inside(kind, torch.bfloat16, SMALL, **options)
    for step in range(3):
        megatron.step(gradients(megatron.model, step))
    saved = {"optimizer": megatron.distributed.optimizer.state_dict(), "weights": [p.detach() for p in flat(megatron)]}
    file = folder / f"{kind.__name__}-{dist.get_world_size()}-{dist.get_rank()}.pt"
    torch.save(saved, file)
    runs = [megatron]
    for whole in (True, False):
        runs.append(inside(kind, torch.bfloat16, SMALL, **options))
        runs[-1].model.load_state_dict(megatron.model.state_dict())
        runs[-1].distributed.reload_model_params()
        loaded = torch.load(file)
        runs[-1].distributed.optimizer.load_state_dict(loaded["optimizer"])
        for p, weights in zip(flat(runs[-1]), loaded["weights"] if whole else (), strict=whole):
            p.detach().copy_(weights)
    for step in range(3, 5):
        for run in runs:
            run.step(gradients(run.model, step))
    first, again, without = (torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs)
    assert first.equal(again)
    assert not first.equal(without)


@ranks(2, 4)
@on_the_cpu()
def test_megatron_saves_lamb_by_ranks() -> None:
    """Megatron's checkpoint by ranks contains all of Lamb's state."""
    megatron, again = (inside(Lamb, torch.bfloat16, SMALL, **LAMB) for _ in range(2))
    for step in range(3):
        megatron.step(gradients(megatron.model, step))
    megatron.optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "dp_reshardable"})
    saved = copy.deepcopy(megatron.distributed.get_parameter_state_dp_reshardable())
    for buckets in (buckets for index in range(len(megatron.distributed.buffers)) for buckets in saved[index].values()):
        for param in (param for bucket in buckets for param in bucket):
            param["padding"] = False
    again.model.load_state_dict(megatron.model.state_dict())
    again.optimizer.load_state_dict(megatron.optimizer.state_dict())
    with torch.no_grad():
        again.distributed.load_parameter_state_from_dp_reshardable(saved)
    for step in range(3, 5):
        for run in (megatron, again):
            run.step(gradients(run.model, step))
    assert all(p.equal(q) for p, q in zip(megatron.model.parameters(), again.model.parameters(), strict=True))


@for_every(("kind", "options"), [*EACH, (Lamb, {**LAMB, "second_moment": "amsgrad"})])
@ranks(2, 4)
@on_the_cpu()
def test_megatron_refuses(kind: Kind, options: Options, folder: Path) -> None:
    megatron = inside(kind, torch.float32, LARGE, **options)
    megatron.step(gradients(megatron.model, 0))
    words = kind.__name__, "--no-save-optim", "docs/sharding.md"
    file = folder / "refused.pt"
    refused(lambda: megatron.optimizer.save_parameter_state(str(file)), "get_parameter_state_dp_zero", *words)
    if options != LAMB:  # Megatron's checkpoint by ranks holds all of plain Lamb's state
        refused(lambda: megatron.optimizer.sharded_state_dict({}), "sharded_state_dict", *words)
    assert not file.exists()
