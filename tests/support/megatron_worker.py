"""The scenarios of test_megatron.py, run on each rank: `python megatron_worker.py RANK WORLD FOLDER`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from bighorn import Came, Lamb, megatron_groups
from tests.support.cases import Kind
from tests.support.flat_worker import refused
from tests.support.megatron_stand_in import DistributedOptimizer
from tests.support.processes import run_as_rank
from tests.support.sharding_worker import assert_close, cost

Options = Mapping[str, Any]
SMALL, LARGE = 300, 10**6
"""Sizes of buckets: several of them, and one."""


class Wrapped(nn.Module):
    """A model inside of a wrapper, as Megatron's DistributedDataParallel."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(9, 40), nn.LayerNorm(40), nn.Linear(40, 13, bias=False), nn.Linear(13, 1)
        self.module = nn.Sequential(*layers).to(dtype)
        self.module[1].float()


def adam(model: nn.Module) -> torch.optim.AdamW:
    """Return an optimizer with Megatron's groups and keys; the last group is on one rank alone."""
    named = list(model.named_parameters())
    last = [p for name, p in named if name.startswith("module.3")]
    rest = [p for name, p in named if not name.startswith("module.3")]
    keys = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 0.1, "min_lr": 0.0}
    decays, others = [p for p in rest if p.dim() > 1], [p for p in rest if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": decays, **keys},
        {"params": others, **keys, "wd_mult": 0.0, "weight_decay": 0.0},
        {"params": last, **keys},
    ]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)


def inside(kind: Kind, model: nn.Module, bucket_size: int, **options: Any) -> DistributedOptimizer:
    """Return the stand-in of Megatron's distributed optimizer, with one of ours inside."""
    distributed = DistributedOptimizer(adam(model), model, bucket_size)
    inner: Any = kind(megatron_groups(distributed), **options)
    distributed.optimizer = inner
    return distributed


def advance(model: Wrapped, distributed: DistributedOptimizer, step: int) -> dict[str, torch.Tensor]:
    """Make a step, of which this rank has the gradients of its ranges alone, and return all gradients."""
    generator = torch.Generator().manual_seed(step)
    grads = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    for buffer in distributed.buffers:
        buffer.grad_data.fill_(torch.nan)
    for name, p in model.named_parameters():
        if p in distributed.ranges:
            held = distributed.ranges[p]["param"]
            p.main_grad.view(-1)[held.start : held.end] = grads[name].view(-1)[held.start : held.end]  # type: ignore[attr-defined]
    distributed.step()
    return grads


def equals_one_process(kind: Kind, options: Options, dtype: torch.dtype, bucket_size: int) -> None:
    """Ten steps equal those of one process with the same gradients and float32 weights."""
    ours, theirs = Wrapped(dtype), Wrapped(dtype).float()
    distributed = inside(kind, ours, bucket_size, **options)
    given = adam(theirs)
    named = {p: name.removeprefix("module.") for name, p in theirs.named_parameters()}
    groups = [
        {"params": [(named[p], p) for p in g["params"]], "lr": g["lr"], "weight_decay": g["weight_decay"]}
        for g in given.param_groups
    ]
    alone = kind(groups, **options)
    for step in range(10):
        grads = advance(ours, distributed, step)
        for name, q in theirs.named_parameters():
            q.grad = grads[name].clone()
        alone.step()
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-8
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(p, q, tolerance if p.dtype == dtype else 2e-6, name)
    for index, group in enumerate(distributed.optimizer.param_groups):
        assert group["max_lr"] == 0.1
        mine = [*distributed.model_fp32_groups[index], *distributed.model_float16_groups[index]]
        for p, shard in zip(mine, group["params"], strict=False):
            held = distributed.ranges[p]["param"]
            name = next(name for name, q in ours.named_parameters() if q is p)
            whole = theirs.get_parameter(name).view(-1)[held.start : held.end]
            assert (shard - whole).abs().max() <= 2e-6 * theirs.get_parameter(name).abs().max(), name
    told, expected = distributed.optimizer.telemetry(), alone.telemetry()  # type: ignore[attr-defined]
    assert set(told.names) == set(expected.names)
    assert cost(distributed.optimizer)[0] == (1 if kind is Lamb else 3)  # type: ignore[arg-type]


def resumes(kind: Kind, options: Options) -> None:
    """A run whose inner optimizer was saved and loaded continues bit for bit."""
    model, again = Wrapped(torch.bfloat16), Wrapped(torch.bfloat16)
    distributed = inside(kind, model, SMALL, **options)
    for step in range(3):
        advance(model, distributed, step)
    saved = copy.deepcopy(distributed.optimizer.state_dict())
    masters = [p.detach().clone() for group in distributed.optimizer.param_groups for p in group["params"]]
    other = inside(kind, again, SMALL, **options)
    other.optimizer.load_state_dict(saved)
    for value, group_p in zip(masters, [p for g in other.optimizer.param_groups for p in g["params"]], strict=True):
        group_p.detach().copy_(value)
    for step in range(3, 5):
        advance(model, distributed, step)
        advance(again, other, step)
    assert all(p.equal(q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def refusals() -> None:
    """Parts of layers, and an inner optimizer that holds the weights, are refused."""

    class Two:
        def size(self) -> int:
            return 2

    model = Wrapped(torch.bfloat16)
    distributed = DistributedOptimizer(adam(model), model, SMALL, tp_group=Two())
    megatron_groups(distributed)
    for p in model.parameters():
        p.tensor_model_parallel = True  # type: ignore[attr-defined]
    refused(lambda: megatron_groups(distributed), "a part of a layer", "tensor_model_parallel_size 1")
    model = Wrapped(torch.bfloat16)
    distributed = DistributedOptimizer(adam(model), model, SMALL)
    for group in distributed.optimizer.param_groups:
        group["params"] = [p.bfloat16() for p in group["params"]]
    if any(group["params"] for group in distributed.optimizer.param_groups):
        refused(lambda: megatron_groups(distributed), "no float32 weights of", "use_precision_aware_optimizer")


def scenarios() -> Mapping[str, Callable[[], None]]:
    """Return the scenarios, which are the same for any number of ranks."""
    lamb: Options = {"lr": 0.1, "exclude_from_layer_adaptation": [r"^1\.", "bias"]}
    came: Options = {"lr": 0.01, "bias_correction": True}
    todo: dict[str, Callable[[], None]] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        for size, of in ((SMALL, "small"), (LARGE, "one")):
            todo[f"lamb-{name}-{of}"] = partial(equals_one_process, Lamb, lamb, dtype, size)
            todo[f"came-{name}-{of}"] = partial(equals_one_process, Came, came, dtype, size)
    todo["lamb-resumes"], todo["came-resumes"] = partial(resumes, Lamb, lamb), partial(resumes, Came, came)
    todo["refusals"] = refusals
    return todo


if __name__ == "__main__":
    run_as_rank(lambda *_: scenarios())
