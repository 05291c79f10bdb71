"""Compares TailOverlap on several ranks with DistributedDataParallel and with one process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from bighorn import Lamb, TailOverlap
from tests.support.overlap_runs import (
    LAMB,
    MAKERS,
    STEPS,
    Make,
    agree,
    assert_same,
    backward,
    batch,
    distributed,
    groups,
    loss,
    mine,
    network,
    raises,
    train,
)
from tests.support.processes import outcomes
from tests.support.ranks import ranks
from tests.support.tables import for_every


def equals_one_process(
    name: str, freeze: bool = False, accumulate: int = 1, schedule: bool = False, **options: Any
) -> None:
    """Steps with overlap on all ranks equal one process with the joined batch."""
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
def test_same_bits() -> None:
    """The result equals DistributedDataParallel in float32: the sum of two ranks does not depend on their order."""
    inner, plain = network(torch.float32), network(torch.float32)
    ddp, reference = distributed(inner), distributed(plain)
    overlap, optimizer = TailOverlap(ddp, Lamb(inner.parameters(), **LAMB)), Lamb(plain.parameters(), **LAMB)
    for step in range(STEPS):
        for model, stepper in ((ddp, overlap), (reference, optimizer)):
            train(model, stepper, mine(batch(step, torch.float32)))
    assert_same(inner, plain, rtol=0, atol=0)


@ranks(2)
def test_plain_step() -> None:
    """Call `optimizer.step()`, read gradients before it, and omit a step."""
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
    with raises(ValueError, "ranks differ", "scaler=GradScaler", "scaler=None"):
        TailOverlap(distributed(model), optimizer, scaler=scaler)
    agree()


DIFFERENT: dict[str, tuple[Make, Make, list[str]]] = {
    "clip": (
        lambda model: Lamb(model.parameters(), max_grad_norm=1.0),
        lambda model: Lamb(model.parameters()),
        ["max_grad_norm=1.0", "max_grad_norm=None"],
    ),
    "rate of a group": (
        lambda model: Lamb(groups(model), lr=0.05),
        lambda model: Lamb([groups(model)[0], {**groups(model)[1], "lr": 0.02}], lr=0.05),
        ["param_groups[1]: lr=0.01", "param_groups[1]: lr=0.02"],
    ),
    "exclusions": (
        lambda model: Lamb(model.named_parameters(), exclude_from_weight_decay=["bias"]),
        lambda model: Lamb(model.named_parameters()),
        ["0.0.bias of shape", "(adapts)", "(decays, adapts)"],
    ),
    "betas of torch's": (
        lambda model: AdamW(model.parameters(), betas=(0.9, 0.99)),
        lambda model: AdamW(model.parameters()),
        ["param_groups[0]: betas=(0.9, 0.99)", "param_groups[0]: betas=(0.9, 0.999)"],
    ),
    "order of torch's groups": (
        lambda model: AdamW([{"params": [p]} for p in model.parameters()]),
        lambda model: AdamW([{"params": [p]} for p in reversed(list(model.parameters()))]),
        ["param_groups[0]: a parameter of shape"],
    ),
}


@for_every("name", DIFFERENT)
@ranks(2)
def test_optimizers_that_differ_are_refused_on_every_rank(name: str) -> None:
    """Their weights would drift apart without an error."""
    first, second, words = DIFFERENT[name]
    model = network()
    make = (first, second)[dist.get_rank()]
    with raises(ValueError, "ranks differ", *words):
        TailOverlap(distributed(model), make(model))
    agree()
    TailOverlap(distributed(model), first(model))


@ranks(2)
def test_parameters_that_only_one_rank_has_may_differ() -> None:
    model, own = network(), torch.nn.Parameter(torch.ones(1 + dist.get_rank()))
    for kind in (Lamb, AdamW):
        each: list[dict[str, Any]] = [{"params": list(model.parameters())}, {"params": [own], "lr": own.numel()}]
        TailOverlap(distributed(model), kind(each))


@ranks(2)
def test_hooks() -> None:
    """A hook runs once per step, not per bucket, and a read before the step returns the average."""
    inner = network()
    ddp = distributed(inner)
    optimizer = Lamb(inner.parameters(), **LAMB)
    overlap = TailOverlap(ddp, optimizer)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(ddp, overlap, mine(batch(0)))
    assert calls == ["after"]
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in inner.parameters()))  # type: ignore[union-attr]
    backward(loss(ddp, mine(batch(1))))
    overlap.step()
    assert calls == ["after"] * 2
    for p, grad in zip(inner.parameters(), seen, strict=True):
        assert p.grad is not None
        assert p.grad.equal(grad)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("forward", "rank 1 has had enough"),
        ("backward", "ZeroDivisionError"),
        ("step", "lr=-1.0 is out of range"),
    ],
)
def test_a_rank_that_stops_ends_all(where: str, why: str, tmp_path: Path) -> None:
    program = """
        import sys
        from tests.distributed.test_overlap_ranks import stopping

        stopping(*sys.argv[1:])
    """
    first, second = outcomes(program, [[where, rank, tmp_path / "store"] for rank in range(2)])
    assert 0 not in (first.code, second.code)
    assert "another rank probably exited" in first.errors
    assert why in second.errors


def stopping(where: str, rank: str, store: str) -> None:
    """Stop rank 1 with an error: before its first message, between two buckets, or before its step."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
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
