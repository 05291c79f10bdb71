"""TailOverlap on several ranks, against DistributedDataParallel and one process."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from bighorn import Lamb, LossScaler, TailOverlap, WindowScale
from bighorn.compat.npu_bridge import (
    FixedLossScaleManager,
    NPUDistributedOptimizer,
    NPULossScaleOptimizer,
    NPUOptimizer,
)
from tests.support.overlap_worker import (
    LAMB,
    Make,
    assert_same,
    backward,
    batch,
    branches,
    distributed,
    loss,
    network,
    raises,
)
from tests.support.processes import outcomes
from tests.support.ranks import ranks
from tests.support.tables import for_every

STEPS = 20


def mine(samples: Tensor) -> Tensor:
    return samples.chunk(dist.get_world_size())[dist.get_rank()]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, so that every bucket has parameters of both."""
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
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "fused adamw": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "sgd groups": lambda model: SGD(groups(model), lr=0.05, momentum=0.9),
}


def equals_one_process(
    name: str, freeze: bool = False, accumulate: int = 1, schedule: bool = False, **options: Any
) -> None:
    """Steps with overlap on all ranks equal those of one process with the joined batch."""
    inner, alone = network(), network()
    for model in (inner, alone) if freeze else ():
        for param in model[2].parameters():
            param.requires_grad = False
    ddp = distributed(inner, **options)
    optimizer, reference = MAKERS[name](inner), MAKERS[name](alone)
    schedules = [StepLR(reference, 3, 0.5)] if schedule else []
    if schedule:
        schedules.append(StepLR(optimizer, 3, 0.5))
    overlap = TailOverlap(ddp, optimizer)
    buckets = 0
    for step in range(STEPS):
        for part in range(accumulate):
            samples = batch(step * accumulate + part)
            with ddp.no_sync() if part < accumulate - 1 else contextlib.nullcontext():
                backward(loss(ddp, mine(samples)) / accumulate)
            backward(loss(alone, samples) / accumulate)
        buckets = max(buckets, len(overlap._in_flight))
        overlap.step()
        reference.step()
        overlap.zero_grad()
        reference.zero_grad()
        for each in schedules:
            each.step()
    assert buckets >= (1 if "bucket_cap_mb" in options else 4)
    assert_same(inner, alone)


@for_every(
    ("name", "options"),
    [
        *((name, {}) for name in MAKERS if name != "unscaling lamb"),
        *((name, {"accumulate": 3}) for name in ("lamb", "adamw")),
        *((name, {"schedule": True}) for name in ("lamb", "adamw")),
        ("lamb", {"bucket_cap_mb": 25}),
        ("lamb", {"static_graph": True}),
        ("lamb", {"freeze": True}),
    ],
)
@ranks(2)
def test_equals_one_process(name: str, options: dict[str, Any]) -> None:
    equals_one_process(name, **options)


@for_every("name", ["lamb", "clip", "groups"])
@ranks(4)
def test_four_ranks_equal_one_process(name: str) -> None:
    equals_one_process(name)


@ranks(2)
def test_checkpoints() -> None:
    """An optimizer without overlap resumes one with it, and the other way round."""
    inner, alone = network(), network()
    ddp, reference = distributed(inner), Lamb(alone.parameters(), **LAMB)
    overlap = TailOverlap(ddp, Lamb(inner.parameters(), **LAMB))
    for step in range(15):
        if step == 5:
            weights, state = copy.deepcopy((inner.state_dict(), overlap.optimizer.state_dict()))
            inner = network()
            inner.load_state_dict(weights)
            ddp = distributed(inner)
            overlap = TailOverlap(ddp, Lamb(inner.parameters(), lr=1.0))
            overlap.optimizer.load_state_dict(state)
        if step == 10:
            taken = Lamb(alone.parameters(), lr=1.0)
            taken.load_state_dict(copy.deepcopy(overlap.optimizer.state_dict()))
            reference = taken
        backward(loss(ddp, mine(batch(step))))
        overlap.step()
        overlap.zero_grad()
        backward(loss(alone, batch(step)))
        reference.step()
        reference.zero_grad()
    assert_same(inner, alone)


@ranks(2)
def test_same_bits() -> None:
    """The result equals that of DistributedDataParallel in float32: with two ranks no sum depends on its order."""
    inner, plain = network(torch.float32), network(torch.float32)
    ddp, reference = distributed(inner), distributed(plain)
    overlap, optimizer = TailOverlap(ddp, Lamb(inner.parameters(), **LAMB)), Lamb(plain.parameters(), **LAMB)
    for step in range(STEPS):
        for model, stepper in ((ddp, overlap), (reference, optimizer)):
            backward(loss(model, mine(batch(step, torch.float32))))
            stepper.step()
            stepper.zero_grad()
    assert_same(inner, plain, rtol=0, atol=0)


@ranks(2)
def test_plain_step() -> None:
    """Use `optimizer.step()`, use gradients before it, and omit a step."""
    inner, alone = network(), network()
    ddp, reference = distributed(inner), AdamW(alone.parameters(), lr=0.01)
    optimizer = AdamW(inner.parameters(), lr=0.01)
    overlap = TailOverlap(ddp, optimizer)
    for step in range(STEPS):
        backward(loss(ddp, mine(batch(step))))
        backward(loss(alone, batch(step)))
        if step % 4 == 1:
            overlap.synchronize()
            torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.01)
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        if step % 4 == 2:
            with raises(RuntimeError, "overlap.step()", "overlap.synchronize()"):
                optimizer.step()
            overlap.synchronize()
            optimizer.step()
        elif step % 4 == 3:
            continue  # the next backward() adds to these gradients
        else:
            overlap.step()
        reference.step()
        overlap.zero_grad()
        reference.zero_grad()
    assert_same(inner, alone)


@ranks(2)
def test_changed_on_the_wire() -> None:
    for change in (
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model: setattr(
            model.get_parameter("0.0.weight"), "grad", model.get_parameter("0.0.weight").grad.clone()
        ),
        lambda model: model.zero_grad(set_to_none=False),
    ):
        inner, alone = network(), network()
        ddp = distributed(inner)
        overlap, plain = TailOverlap(ddp, AdamW(inner.parameters())), AdamW(alone.parameters())
        backward(loss(ddp, mine(batch(0))))
        change(inner)
        for look in (overlap.step, overlap.synchronize):
            with raises(RuntimeError, "in flight", "overlap.synchronize()", "overlap.zero_grad()"):
                look()
        torch.testing.assert_close(inner.get_parameter("0.0.bias"), alone.get_parameter("0.0.bias"), rtol=0, atol=0)
        overlap.zero_grad()
        backward(loss(ddp, mine(batch(1))))
        overlap.step()
        backward(loss(alone, batch(1)))
        plain.step()
        assert_same(inner, alone)


@ranks(2)
def test_two_backwards() -> None:
    inner = network()
    ddp = distributed(inner, bucket_cap_mb=25)
    overlap = TailOverlap(ddp, AdamW(inner.parameters()))
    both = loss(ddp, mine(batch(0)))
    both.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with contextlib.suppress(RuntimeError):
        backward(both)
    with raises(RuntimeError, "in flight", "overlap.synchronize()"):
        overlap.step()
    overlap.zero_grad()


@ranks(2)
def test_joined_inputs() -> None:
    inner = network()
    ddp = distributed(inner)
    TailOverlap(ddp, AdamW(inner.parameters()))
    with raises(RuntimeError, "join()"), ddp.join():
        loss(ddp, mine(batch(0)))


@ranks(2)
def test_refusals() -> None:
    """Each error is raised on every rank, and the ranks agree afterwards."""
    model = network()
    optimizer = AdamW(model.parameters())
    for refused, words in (
        (DistributedDataParallel(model), "gradient_as_bucket_view=True"),
        (distributed(model, find_unused_parameters=True), "find_unused_parameters=False"),
    ):
        with raises(ValueError, words):
            TailOverlap(refused, optimizer)
        agree()
    ddp = distributed(model)
    TailOverlap(ddp, optimizer)
    with raises(ValueError, "communication hook"):
        TailOverlap(ddp, optimizer)
    agree()
    with raises(RuntimeError, "can only be called once"):
        ddp.register_comm_hook(None, lambda _, bucket: bucket)
    agree()
    one_rank_only = torch.optim.LBFGS(model.parameters()) if dist.get_rank() == 0 else optimizer
    with raises(ValueError, *(["LBFGS"] if dist.get_rank() == 0 else ["on rank 0", "LBFGS"])):
        TailOverlap(distributed(model), one_rank_only)
    agree()
    scaler = torch.amp.GradScaler("cpu", enabled=dist.get_rank() == 0)
    with raises(ValueError, "ranks differ", "scaler"):
        TailOverlap(distributed(model), optimizer, scaler=scaler)
    agree()


def agree() -> None:
    dist.all_reduce(torch.ones(()))


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
    """The result equals that of DistributedDataParallel with its GradScaler; one rank's overflow skips all ranks."""
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
    """A module with one parameter, whose gradient is the input."""

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


@ranks(2)
def test_npu_optimizer() -> None:
    """The example's branches, with and without tailing, are equal on all ranks and in one process."""
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
    """With a clip between the halves of a step, nested wrappers on all ranks equal torch in one process."""
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
            torch.nn.utils.clip_grad_norm_([var for _, var in pairs], 0.01)  # .grad is the same tensor
            optimizer.apply_gradients(pairs)
            if not bad:
                backward(loss(alone, batch(step)))
                torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
                reference.step()
                reference.zero_grad()
        assert_same(inner, alone)
        with raises(ValueError, "is_tailing_optimization") if tailing else contextlib.nullcontext():
            NPUOptimizer(optimizer)


@ranks(2)
def test_hooks() -> None:
    """A hook runs once per step, not once per bucket, and a read before the step returns the average."""
    inner = network()
    ddp = distributed(inner)
    optimizer = Lamb(inner.parameters(), **LAMB)
    overlap = TailOverlap(ddp, optimizer)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        backward(loss(ddp, mine(batch(step))))
        overlap.step()
        overlap.zero_grad()
    assert calls == ["after"] * 3
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in inner.parameters()))  # type: ignore[union-attr]
    backward(loss(ddp, mine(batch(4))))
    overlap.step()
    assert calls == ["after"] * 4
    for p, grad in zip(inner.parameters(), seen, strict=True):
        assert p.grad is not None
        assert p.grad.equal(grad)


@pytest.mark.parametrize(
    ("where", "why", "elsewhere"),
    [
        ("model", "appears not to match", "Connection closed by peer"),
        ("forward", "rank 1 has had enough", "one of them has stopped"),
        ("backward", "ZeroDivisionError", "one of them has stopped"),
        ("step", "lr=-1.0 is out of range", "one of them has stopped"),
    ],
)
def test_a_rank_that_stops_ends_all(where: str, why: str, elsewhere: str, tmp_path: Path) -> None:
    program = """
        import sys
        from tests.distributed.test_overlap_ranks import stopping

        stopping(*sys.argv[1:])
    """
    first, second = outcomes(program, [[where, rank, tmp_path / "store"] for rank in range(2)])
    assert 0 not in (first.code, second.code)
    assert elsewhere in first.errors
    assert why in second.errors


def stopping(where: str, rank: str, store: str) -> None:
    """Stop rank 1 with an error: before it sends anything, between two buckets, or before its step.

    With "model", rank 1 has another model instead.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    if where == "model":
        try:
            distributed(nn.Linear(3, 2 + dist.get_rank()))
        finally:
            # A process that ends with unread messages resets its connections; the other rank must see them closed.
            time.sleep(0.5)
    inner = network()
    ddp = distributed(inner)
    overlap = TailOverlap(ddp, Lamb(inner.parameters(), **LAMB))
    for step in range(5):
        value = loss(ddp, mine(batch(step)))
        if step == 2 and dist.get_rank() == 1:
            if where == "forward":
                raise RuntimeError("rank 1 has had enough")
            if where == "backward":
                inner.get_parameter("0.0.weight").register_hook(lambda _: 1 / 0)  # type: ignore[no-untyped-call]  # the last layer to get a gradient
        backward(value)
        if step == 2 and dist.get_rank() == 1:
            overlap.optimizer.param_groups[0]["lr"] = -1.0
        overlap.step()
        overlap.zero_grad()
