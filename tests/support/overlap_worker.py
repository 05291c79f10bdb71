"""The scenarios of test_overlap.py, run on each rank: `python overlap_worker.py RANK WORLD FOLDER SCENARIO...`."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from bighorn import Lamb, LossScaler, TailOverlap, WindowScale
from bighorn.compat.npu_bridge import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    NPUDistributedOptimizer,
    NPULossScaleOptimizer,
    NPUOptimizer,
)
from tests.support.processes import run_as_rank

STEPS = 20
SMALL_BUCKETS = 0.004  # megabytes: about the weight of one layer
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


def mine(samples: Tensor) -> Tensor:
    return samples.chunk(dist.get_world_size())[dist.get_rank()]


def loss(model: nn.Module, samples: Tensor) -> Tensor:
    result: Tensor = (model(samples) - 1).square().mean()
    return result


def distributed(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **{"bucket_cap_mb": SMALL_BUCKETS, **options})


def backward(value: Tensor) -> None:
    value.backward()  # type: ignore[no-untyped-call]


def assert_same(ours: nn.Module, theirs: nn.Module, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    start = dict(network().named_parameters())
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        assert not a.requires_grad or not a.detach().to(torch.float64).equal(start[name])


def compare(make: Make, freeze: bool = False, accumulate: int = 1, schedule: bool = False, **options: Any) -> None:
    """Check that steps with overlap on all ranks equal those of one process with the joined batch."""
    inner, alone = network(), network()
    for model in (inner, alone) if freeze else ():
        for param in model[2].parameters():
            param.requires_grad = False
    ddp = distributed(inner, **options)
    optimizer, reference = make(inner), make(alone)
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


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, so that every bucket has parameters of both."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.01},
    ]


EQUAL: dict[str, Callable[[], None]] = {
    "lamb": lambda: compare(lambda model: Lamb(model.parameters(), **LAMB)),
    "adamw": lambda: compare(lambda model: AdamW(model.parameters(), lr=0.01)),
    "adamw-fused": lambda: compare(lambda model: AdamW(model.parameters(), lr=0.01, fused=True)),
    "sgd-momentum": lambda: compare(lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "one-bucket": lambda: compare(lambda model: Lamb(model.parameters(), **LAMB), bucket_cap_mb=25),
    "clip": lambda: compare(lambda model: Lamb(model.parameters(), **LAMB, max_grad_norm=0.01, skip_nonfinite=True)),
    "accumulate": lambda: compare(lambda model: Lamb(model.parameters(), **LAMB), accumulate=3),
    "accumulate-adamw": lambda: compare(lambda model: AdamW(model.parameters(), lr=0.01), accumulate=3),
    "groups": lambda: compare(lambda model: Lamb(groups(model), lr=0.05)),
    "groups-sgd": lambda: compare(lambda model: SGD(groups(model), lr=0.05, momentum=0.9)),
    "static-graph": lambda: compare(lambda model: Lamb(model.parameters(), **LAMB), static_graph=True),
    "frozen": lambda: compare(lambda model: Lamb(model.parameters(), **LAMB), freeze=True),
    "schedule": lambda: compare(lambda model: Lamb(model.parameters(), **LAMB), schedule=True),
    "schedule-adamw": lambda: compare(lambda model: AdamW(model.parameters(), lr=0.01), schedule=True),
}


def checkpoint() -> None:
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


def same_bits() -> None:
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


def plain_step() -> None:
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


@contextlib.contextmanager
def raises(error: type[Exception], *words: str) -> Iterator[None]:
    try:
        yield
    except error as caught:
        if not all(word in str(caught) for word in words):
            raise
    else:
        raise AssertionError(f"no {error.__name__} with {words}")


def changed_on_the_wire() -> None:
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


def two_backwards() -> None:
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


def joined_inputs() -> None:
    inner = network()
    ddp = distributed(inner)
    TailOverlap(ddp, AdamW(inner.parameters()))
    with raises(RuntimeError, "join()"), ddp.join():
        loss(ddp, mine(batch(0)))


def refusals() -> None:
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


def torch_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)


def bighorn_scaler() -> LossScaler:
    return LossScaler(WindowScale(init_scale=64.0, growth_interval=4), max_consecutive_overflows=3)


def scaled(make: Make, make_scaler: Callable[[], torch.amp.GradScaler] = torch_scaler) -> None:
    """The result equals that of DistributedDataParallel with its GradScaler; one rank's overflow skips all ranks."""
    inner, plain = network(torch.float32), network(torch.float32)
    ddp, reference = distributed(inner), distributed(plain)
    ours, theirs = make_scaler(), make_scaler()
    optimizer, other = make(inner), make(plain)
    overlap = TailOverlap(ddp, optimizer, scaler=ours)
    scales = []
    for step in range(STEPS):
        bad = step in (5, 6, 13) and dist.get_rank() == 0
        for model, scaler in ((ddp, ours), (reference, theirs)):
            value = loss(model, mine(batch(step, torch.float32)))
            backward(scaler.scale(value * torch.inf if bad else value))
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


def unscaled_on_the_wire() -> None:
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


def unscaling(model: nn.Module) -> Lamb:
    """Return a Lamb that unscales inside its kernels."""
    optimizer = Lamb(model.parameters(), **LAMB)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return optimizer


class Ones(nn.Module):
    """A module with one parameter, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float16))

    def forward(self, value: float) -> Tensor:
        return (self.weight * value).sum()


def half_average() -> None:
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


def late_overflow() -> None:
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


def branches() -> list[ExponentialUpdateLossScaleManager | FixedLossScaleManager | None]:
    """Return the scale managers of npu_bridge's example: npu_bert_loss_scale = 0, >= 1, and None or -1."""
    return [
        ExponentialUpdateLossScaleManager(64.0, incr_every_n_steps=4, decr_every_n_nan_or_inf=2, decr_ratio=0.5),
        FixedLossScaleManager(64.0),
        None,
    ]


def npu_optimizer() -> None:
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


def npu_clip() -> None:
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


def hooks() -> None:
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


SCENARIOS: dict[str, Callable[[], None]] = {
    **EQUAL,
    "checkpoint": checkpoint,
    "same-bits": same_bits,
    "plain-step": plain_step,
    "changed-on-the-wire": changed_on_the_wire,
    "two-backwards": two_backwards,
    "join": joined_inputs,
    "refusals": refusals,
    "hooks": hooks,
    "scaled-adamw": lambda: scaled(lambda model: AdamW(model.parameters(), lr=0.01)),
    "scaled-adamw-fused": lambda: scaled(lambda model: AdamW(model.parameters(), lr=0.01, fused=True)),
    "scaled-lamb": lambda: scaled(lambda model: Lamb(model.parameters(), **LAMB)),
    "scaled-lamb-fused": lambda: scaled(unscaling),
    "loss-scaler-lamb": lambda: scaled(lambda model: Lamb(model.parameters(), **LAMB), bighorn_scaler),
    "loss-scaler-adamw": lambda: scaled(lambda model: AdamW(model.parameters(), lr=0.01), bighorn_scaler),
    "npu-optimizer": npu_optimizer,
    "npu-clip": npu_clip,
    "unscaled-on-the-wire": unscaled_on_the_wire,
    "half-average": half_average,
}
"""The scenarios of two ranks, in order."""


def failing(where: str) -> None:
    """Stop rank 1 with an error: before it sends anything, between two buckets, or before its step.

    With "model", rank 1 has another model instead.
    """
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


def chosen(_: int, __: Path) -> Mapping[str, Callable[[], None]]:
    """Return the scenarios that the command line names, or fail as it says."""
    if sys.argv[4] == "failing":
        failing(sys.argv[5])
    return {name: {**SCENARIOS, "late-overflow": late_overflow}[name] for name in sys.argv[4:]}


if __name__ == "__main__":
    run_as_rank(chosen)
