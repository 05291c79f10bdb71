"""TailOverlap on several ranks with scaled losses, and inside the optimizers of npu_bridge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from bighorn import Lamb, LossScaler, TailOverlap, WindowScale
from bighorn.compat.npu_bridge import (
    FixedLossScaleManager,
    NPUDistributedOptimizer,
    NPULossScaleOptimizer,
    NPUOptimizer,
)
from tests.support.overlap_runs import (
    LAMB,
    MAKERS,
    STEPS,
    agree,
    assert_same,
    backward,
    batch,
    branches,
    distributed,
    loss,
    mine,
    network,
    raises,
)
from tests.support.ranks import ranks
from tests.support.tables import for_every

SCALERS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4),
    "bighorn": lambda: LossScaler(WindowScale(init_scale=64.0, growth_interval=4), max_consecutive_overflows=3),
}


@for_every(
    ("name", "scaler"),
    [
        *((name, "torch") for name in ("lamb", "unscaling lamb", "adamw", "fused adamw")),
        *((name, "bighorn") for name in ("lamb", "adamw")),
    ],
)
@ranks(2)
def test_scaled(name: str, scaler: str) -> None:
    """The result equals DistributedDataParallel with GradScaler; an overflow on one rank skips on all."""
    inner, plain = network(torch.float32), network(torch.float32)
    ddp, reference = distributed(inner), distributed(plain)
    ours, theirs = SCALERS[scaler](), SCALERS[scaler]()
    optimizer, other = MAKERS[name](inner), MAKERS[name](plain)
    overlap = TailOverlap(ddp, optimizer, scaler=ours)
    scales = []
    for step in range(STEPS):
        bad = step in (5, 6, 13) and dist.get_rank() == 0
        for model, scales_it in ((ddp, ours), (reference, theirs)):
            value = loss(model, mine(batch(step, torch.float32)))
            backward(scales_it.scale(value * torch.inf if bad else value))
        if step == 16:  # gradients are used before the step
            overlap.synchronize()
            ours.unscale_(optimizer)
            theirs.unscale_(other)
            torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.01)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        overlap.step()
        theirs.step(other)
        ours.update()
        theirs.update()
        overlap.zero_grad()
        other.zero_grad()
        assert ours.get_scale() == theirs.get_scale()
        scales.append(ours.get_scale())
    assert min(scales) < 64 < max(scales)
    assert_same(inner, plain, rtol=1e-6, atol=1e-7)


@ranks(2)
def test_unscaled_on_the_wire() -> None:
    for attached in (False, True):
        inner = network(torch.float32)
        ddp = distributed(inner)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = AdamW(inner.parameters())
        overlap = TailOverlap(ddp, optimizer, scaler=scaler if attached else None)
        backward(scaler.scale(loss(ddp, mine(batch(0, torch.float32)))))
        with raises(RuntimeError, "unscale_", "scaler", "overlap.synchronize()"):
            scaler.step(optimizer)
        with raises(RuntimeError, "unscale_", "overlap.synchronize()") if attached else contextlib.nullcontext():
            overlap.step()
        for flight in overlap._in_flight:
            flight.wait()


class Ones(nn.Module):
    """A module with one parameter; its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float16))

    def forward(self, value: float) -> Tensor:
        return (self.weight * value).sum()


@ranks(2)
def test_half_average() -> None:
    """The sum of two gradients of 40000 exceeds float16, but their mean does not."""
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1.0)):
        model = Ones()
        ddp = distributed(model)
        overlap = TailOverlap(ddp, SGD(model.parameters(), lr=1 / 40000), scaler=scaler)
        value = ddp(40000.0)
        backward(scaler.scale(value) if scaler else value)
        overlap.step()
        assert model.weight.grad is not None
        assert model.weight.grad.eq(40000).all()
        assert model.weight.abs().max() < 1e-3


@ranks(3)
def test_late_overflow() -> None:
    """Thirds of float16's largest value are rounded up, so their sum overflows; the next step raises the error."""
    model = Ones()
    ddp = distributed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    overlap = TailOverlap(ddp, SGD(model.parameters(), lr=0.0), scaler=scaler)
    backward(scaler.scale(ddp(65504.0)))
    overlap.step()
    scaler.update()
    assert scaler.get_scale() == 1.0
    overlap.zero_grad()
    backward(scaler.scale(ddp(1.0)))
    with raises(RuntimeError, "overflowed as they were summed"):
        overlap.step()
    agree()
    overlap.zero_grad()
    backward(scaler.scale(ddp(1.0)))
    overlap.step()


@ranks(2)
def test_npu_optimizer() -> None:
    """The branches of the example, with and without tailing, equal one process on all ranks."""
    for branch in range(3):
        models = [network() for _ in range(3)]
        first, second, third = branches()[branch], branches()[branch], branches()[branch]
        ddp, plain = distributed(models[0]), distributed(models[1])
        optimizers = [Lamb(model.parameters(), **LAMB) for model in models]
        scales = first is not None
        tailing = NPUOptimizer(optimizers[0], first, True, scales, True, "tailing", model=ddp)
        if second is None:
            without = NPUOptimizer(optimizers[1], is_distributed=True, model=plain)
        else:
            without = NPULossScaleOptimizer(optimizers[1], second, is_distributed=True, model=plain)
        alone = NPUOptimizer(optimizers[2], third, is_loss_scale=scales)
        steps = [torch.tensor(0) for _ in models]
        for step in range(STEPS):
            bad = torch.inf if scales and step in (5, 9) else 1.0
            tailing.minimize(loss(ddp, mine(batch(step))) * (bad if dist.get_rank() == 0 else 1.0), steps[0])
            without.minimize(loss(plain, mine(batch(step))) * (bad if dist.get_rank() == 0 else 1.0), steps[1])
            alone.minimize(loss(models[2], batch(step)) * bad, steps[2])
        assert steps == [STEPS - 2 * scales] * 3
        assert_same(models[0], models[2])
        assert_same(models[1], models[2])
        if first is not None and second is not None and third is not None:
            assert first.get_loss_scale() == second.get_loss_scale() == third.get_loss_scale()


@ranks(2)
def test_npu_clip() -> None:
    """With a clip between the two calls of a step, nested wrappers on all ranks equal torch in one process."""
    for tailing in (False, True):
        inner, alone = network(), network()
        ddp, reference = distributed(inner), Lamb(alone.parameters(), **LAMB)
        manager, lamb = FixedLossScaleManager(64.0), Lamb(inner.parameters(), **LAMB)
        if tailing:
            optimizer = NPUOptimizer(lamb, manager, True, True, True, model=ddp)
        else:
            optimizer = NPULossScaleOptimizer(NPUDistributedOptimizer(lamb, model=ddp), manager, is_distributed=True)
        for step in range(STEPS):
            bad = step == 3
            pairs = optimizer.compute_gradients(
                loss(ddp, mine(batch(step))) * (torch.inf if bad and dist.get_rank() == 0 else 1.0)
            )
            torch.nn.utils.clip_grad_norm_([var for _, var in pairs], 0.01)  # pairs have the tensors of .grad
            optimizer.apply_gradients(pairs)
            if not bad:
                backward(loss(alone, batch(step)))
                torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
                reference.step()
                reference.zero_grad()
        assert_same(inner, alone)
        with raises(ValueError, "is_tailing_optimization") if tailing else contextlib.nullcontext():
            NPUOptimizer(optimizer)
