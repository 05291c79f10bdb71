"""A network of several buckets, its samples, and its optimizers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from bighorn import Lamb, schedules
from bighorn.compat.npu_bridge import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
)

SMALL_BUCKETS = 0.004  # megabytes: about the weight of one layer
STEPS = 20
LAMB: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}

Make = Callable[[nn.Module], Optimizer]


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (8, 24, 24, 24, 24, 24, 4)
    layers = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in itertools.pairwise(sizes)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the samples of all ranks, four for each."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4 * dist.get_world_size(), 8, generator=generator, dtype=dtype)


def loss(model: nn.Module, samples: Tensor) -> Tensor:
    result: Tensor = (model(samples) - 1).square().mean()
    return result


def distributed(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **{"bucket_cap_mb": SMALL_BUCKETS, **options})


def backward(value: Tensor) -> None:
    value.backward()  # type: ignore[no-untyped-call]


def train(model: nn.Module, stepper: Any, samples: Tensor) -> None:
    """Take a step of an optimizer or a TailOverlap."""
    backward(loss(model, samples))
    stepper.step()
    stepper.zero_grad()


def assert_same(ours: nn.Module, theirs: nn.Module, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    start = dict(network().named_parameters())
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        assert not a.requires_grad or not a.detach().to(torch.float64).equal(start[name])


@contextlib.contextmanager
def raises(error: type[Exception], *words: str) -> Iterator[None]:
    try:
        yield
    except error as caught:
        if not all(word in str(caught) for word in words):
            raise
    else:
        raise AssertionError(f"no {error.__name__} with {words}")


def branches() -> list[ExponentialUpdateLossScaleManager | FixedLossScaleManager | None]:
    """Return the scale managers of npu_bridge's example: npu_bert_loss_scale = 0, >= 1, and None or -1."""
    return [
        ExponentialUpdateLossScaleManager(64.0, incr_every_n_steps=4, decr_every_n_nan_or_inf=2, decr_ratio=0.5),
        FixedLossScaleManager(64.0),
        None,
    ]


def mine(samples: Tensor) -> Tensor:
    return samples.chunk(dist.get_world_size())[dist.get_rank()]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups; every bucket has parameters of both."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.01},
    ]


def unscaling(model: nn.Module) -> Lamb:
    """Return a Lamb that unscales inside its kernels."""
    optimizer = Lamb(model.parameters(), **LAMB)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return optimizer


MAKERS: dict[str, Make] = {
    "lamb": lambda model: Lamb(model.parameters(), **LAMB),
    "unscaling lamb": unscaling,
    "clip": lambda model: Lamb(model.parameters(), **LAMB, max_grad_norm=0.01, skip_nonfinite=True),
    "groups": lambda model: Lamb(groups(model), lr=0.05),
    "schedule": lambda model: Lamb(model.parameters(), lr=schedules.Cosine(0.05, STEPS)),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "fused adamw": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "sgd groups": lambda model: SGD(groups(model), lr=0.05, momentum=0.9),
}


def agree() -> None:
    dist.all_reduce(torch.ones(()))
