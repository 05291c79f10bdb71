"""Models and gradients for the tests of offload, on a stand-in for a device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import groups, offload, schedules
from bighorn.offloading import OffloadedOptimizer
from tests.support.cases import Kind, allow_gradients_of
from tests.support.optimizer_runs import assert_bitwise
from tests.support.sharded_runs import full
from tests.support.slow_copies import SlowCopies

SMALL_BUCKET = 0.0005
"""In megabytes; `network()` has five buckets of this size."""

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Give(torch.autograd.Function):
    """A loss of one parameter with a given gradient."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def backward_with(params: Sequence[Parameter], grads: Sequence[Tensor | None]) -> None:
    """Run a backward pass that accumulates the gradients, the last parameter first."""
    total = torch.zeros(())
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            if grad.dtype != param.dtype:
                allow_gradients_of(param, grad.dtype)
            total = total + Give.apply(param, grad)  # type: ignore[no-untyped-call]
    total.backward()  # type: ignore[no-untyped-call]


def network() -> Any:
    """Return a Sequential, whose elements torch types as plain modules; two ranks share the last unevenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.LayerNorm(70), nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 3))


def loss_of(net: nn.Module, step: int) -> Any:
    """Return a loss; torch does not type its `backward`."""
    dtype = next(net.parameters()).dtype
    inputs = torch.randn(4, 9, generator=torch.Generator().manual_seed(step)).to(dtype)
    return net(inputs).square().mean()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Train with a loss for each step."""
    for step in steps:
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(net: nn.Module, other: nn.Module) -> None:
    """Check that two models have the same weights, bit for bit."""
    assert_bitwise([full(param) for param in net.parameters()], [full(param) for param in other.parameters()])


def in_groups(kind: Kind, net: nn.Module) -> Any:
    """Return an optimizer of a `network` with a separate group for the last weights, and a schedule."""
    named = groups.by_rules(net.named_parameters(), [groups.Rule("^5", lr=0.03)])
    return kind(named, lr=schedules.Cosine(0.1, 8), weight_decay=0.1)


def scaled_step(scaler: Any, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    """Train one step with a scaler; an offloaded optimizer holds it, and `step()` replaces `scaler.step`."""
    scaler.scale(loss).backward()
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.step()
    else:
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> OffloadedOptimizer:
    """Offload to the stand-in, with random delays and a random order of arrival."""
    options.setdefault("copies", SlowCopies(seed=zlib.crc32(repr(sorted(map(str, options.items()))).encode())))
    options.setdefault("bucket_mb", SMALL_BUCKET)
    return offload(model, optimizer, **options)


class Twins:
    """Two equal models: one has an optimizer, the other the same optimizer offloaded.

    Args:
        make: Returns an optimizer of a model.
        build: Returns a model, each time with the same weights.
        options: Options of `offload`.
    """

    def __init__(self, make: Make, build: Callable[[], Any] = network, **options: Any) -> None:
        self.nets = build(), build()
        self.plain: Any = make(self.nets[0])
        self.offloaded = offloaded(self.nets[1], make(self.nets[1]), **options)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Return each model with its optimizer, the plain one first."""
        return iter(zip(self.nets, (self.plain, self.offloaded), strict=True))

    def train(self, steps: Iterable[int]) -> None:
        for net, optimizer in self:
            train(net, optimizer, steps)

    def assert_equal(self) -> None:
        self.offloaded.synchronize()
        assert_equal(*self.nets)
