"""Errors and deletion at any point: the optimizer records which parameters were stepped, and steps none twice."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bighorn import Lamb
from bighorn.offloading import OffloadedOptimizer
from bighorn.offloading._step import TransferBucket
from tests.support.offloading import (
    Make,
    Twins,
    assert_equal,
    loss_of,
    network,
    offloaded,
    scaled_step,
    train,
)
from tests.support.optimizer_runs import assert_bitwise, saved_and_loaded
from tests.support.processes import LIMIT
from tests.support.slow_copies import SlowCopies


def lamb(net: nn.Module) -> Lamb:
    return Lamb(net.named_parameters(), lr=0.1, weight_decay=0.1)


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def train_and_wait(net: nn.Module, optimizer: OffloadedOptimizer, steps: range) -> None:
    train(net, optimizer, steps)
    optimizer.synchronize()


def trained(make: Make, steps: range) -> Any:
    net = network()
    train(net, make(net), steps)
    return net


def step_counts(optimizer: OffloadedOptimizer) -> list[int]:
    return [int(state["step"]) for state in optimizer.state.values()]


# ---- errors that change nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
def test_an_option_out_of_range_changes_nothing(scaled: bool) -> None:
    """GradScaler keeps its scale on an optimizer whose step raises, and would multiply the next one by it."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled) for _ in "12"]
    twins = Twins(lamb, scaler=scalers[1])
    for step in range(5):
        for (net, optimizer), scaler in zip(twins, scalers, strict=True):
            if step == 2 and optimizer is twins.offloaded:
                optimizer.synchronize()
                before = [param.clone() for param in net.parameters()]
                scaler.scale(loss_of(net, step)).backward()
                optimizer.param_groups[0]["lr"] = -1.0
                with pytest.raises(ValueError, match=r"lr=-1.0 is out of range"):
                    optimizer.step()
                assert_bitwise(list(net.parameters()), before)
                assert set(step_counts(optimizer)) == {2}
                optimizer.param_groups[0]["lr"] = 0.1
                optimizer.step()  # with the same gradients
                scaler.update()
                optimizer.zero_grad()
            else:
                scaled_step(scaler, optimizer, loss_of(net, step))
    twins.assert_equal()


def test_a_second_backward_pass() -> None:
    """It fails, and step() is refused until the gradients are forgotten."""
    twins = Twins(lamb)
    net, optimizer = twins.nets[1], twins.offloaded
    loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match=r"has a second gradient.*optimizer.accumulate\(\)"):
        loss_of(net, 1).backward()
    with pytest.raises(RuntimeError, match=r"the last backward\(\) has not ended, and no parameter has taken"):
        optimizer.step()
    optimizer.zero_grad()
    twins.train(range(3))
    twins.assert_equal()


# ---- steps that have failed ------------------------------------------------------------------------------------------


def before_a_bucket(patch: pytest.MonkeyPatch, _: SlowCopies) -> None:
    """Let the stepping thread fail before it steps the third bucket."""
    land, landed = TransferBucket.land, []

    def fail(bucket: TransferBucket) -> None:
        if sys._getframe(1).f_code.co_name == "wait":  # called by the step
            landed.append(bucket)
            if len(landed) == 3:
                raise MemoryError("no memory for bucket")
        land(bucket)

    patch.setattr(TransferBucket, "land", fail)


def amid_the_arithmetic(patch: pytest.MonkeyPatch, _: SlowCopies) -> None:
    """Let a step of torch's optimizer fail after it has changed weights."""
    step, calls = torch.optim.AdamW.step.__wrapped__, []  # type: ignore[attr-defined]

    def fail(self: torch.optim.AdamW, closure: Any = None) -> Any:
        calls.append(1)
        step(self, closure)
        if len(calls) == 2:
            raise MemoryError("amid a step")

    patch.setattr(torch.optim.AdamW, "step", fail)


def on_the_way_to_the_host(_: pytest.MonkeyPatch, copies: SlowCopies) -> None:
    copies.outward.error = OSError("the bus is off")


def on_the_way_to_the_device(_: pytest.MonkeyPatch, copies: SlowCopies) -> None:
    copies.inward.error = OSError("the bus is off")


Cut = Callable[[pytest.MonkeyPatch, SlowCopies], None]
CUTS: list[tuple[Cut, Make, str]] = [
    *((before_a_bucket, make, r"no memory.*when \d of 8 parameters have taken the step \(") for make in (lamb, adamw)),
    (amid_the_arithmetic, adamw, "and others were being stepped"),
    *((on_the_way_to_the_host, make, "bus is off") for make in (lamb, adamw)),
    *((on_the_way_to_the_device, make, "bus is off.*and others were being stepped") for make in (lamb, adamw)),
]
"""Places where a step is interrupted, optimizers, and the text of the error."""


@pytest.mark.parametrize("remedy", ["zero_grad", "load"])
@pytest.mark.parametrize(("cut", "make", "message"), CUTS)
def test_a_step_that_is_cut_off(
    cut: Cut, make: Make, message: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call is refused until a remedy: a step without gradients, or a checkpoint."""
    net, copies = network(), SlowCopies(seed=None)
    optimizer = offloaded(net, make(net), copies=copies)
    train_and_wait(net, optimizer, range(2))
    saved = saved_and_loaded((net.state_dict(), optimizer.state_dict()))
    with monkeypatch.context() as patch:
        cut(patch, copies)
        with pytest.raises((RuntimeError, OSError), match=message) as error:
            train_and_wait(net, optimizer, range(2, 3))
    taken = isinstance(error.value, RuntimeError) and "have taken the step" in str(error.value)
    for call in calls_of(net, optimizer) if taken else []:
        with pytest.raises(RuntimeError, match=r"when \d of 8 parameters have taken the step \(") as again:
            call()
        assert isinstance(again.value.__cause__, MemoryError | OSError)
    if remedy == "load":
        optimizer.load_state_dict(saved[1])
        net.load_state_dict(saved[0])
        train_and_wait(net, optimizer, range(2, 5))
        assert_equal(net, trained(make, range(5)))
        return
    optimizer.zero_grad()
    before = [param.clone() for param in net.parameters()]
    optimizer.step()  # without gradients
    optimizer.synchronize()
    assert_bitwise(list(net.parameters()), before)
    hosts = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    optimizer._read_written(optimizer._setup.params)
    assert_bitwise(hosts, before)
    train_and_wait(net, optimizer, range(3, 5))
    assert set(step_counts(optimizer)) <= {4, 5}


def calls_of(net: nn.Module, optimizer: OffloadedOptimizer) -> list[Callable[[], object]]:
    """Return calls that read or change an optimizer."""
    return [
        optimizer.step,
        optimizer.state_dict,
        optimizer.synchronize,
        optimizer.read_weights,
        lambda: optimizer.state,
        lambda: loss_of(net, 9).backward(),
    ]


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_model_that_is_deleted_between_backward_and_step() -> None:
    net = network()
    copies = SlowCopies(bandwidth=1e6, seed=None)
    optimizer = offloaded(net, lamb(net), copies=copies)
    train(net, optimizer, range(1))
    loss_of(net, 1).backward()
    thread = optimizer._worker.run(threading.current_thread)
    gone = [weakref.ref(net[0].weight), weakref.ref(optimizer)]
    del net, optimizer
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()
    copies.settle()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_the_hooks_end_with_the_optimizer() -> None:
    net = network()
    optimizer = offloaded(net, lamb(net))
    train_and_wait(net, optimizer, range(1))
    del optimizer
    gc.collect()
    loss_of(net, 1).backward()
    assert all(param.grad is not None for param in net.parameters())
    again = offloaded(net, lamb(net))
    again.zero_grad()
    train(net, again, range(2))


@pytest.mark.slow
def test_ten_thousand_steps_do_not_grow() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).bfloat16()
    copies = SlowCopies(seed=None)
    optimizer = offloaded(net, lamb(net), masters=True, bucket_mb=1e-4, copies=copies)
    pages = []
    for step in range(10_000):
        net(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (4_999, 9_999):
            optimizer.synchronize()
            gc.collect()
            pages.append((int(Path("/proc/self/statm").read_text().split()[1]), len(gc.get_objects())))
    (pages_before, objects_before), (pages_after, objects_after) = pages
    assert pages_after - pages_before < 1000, "0.8 KB a step; the memory of malloc for a thread may grow once"
    assert objects_after - objects_before < 500
