"""Errors, Ctrl-C and deletion at any point: what has been stepped is known, and nothing is stepped twice."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bighorn import Lamb
from bighorn.offloading import OffloadedOptimizer
from bighorn.offloading.transfers import Bucket
from tests.support.offloading import OVERLAPS, Make, Overlap, loss_of, network, offloaded
from tests.support.optimizer_runs import assert_bitwise, saved_and_loaded
from tests.support.slow_copies import SlowCopies


def lamb(net: nn.Module) -> Lamb:
    return Lamb(net.named_parameters(), lr=0.1, weight_decay=0.1)


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_and_step(net: nn.Module, optimizer: OffloadedOptimizer) -> None:
    loss_of(net, 2).backward()
    optimizer.step()
    optimizer.synchronize()


def trained(make: Make, steps: range) -> Any:
    net = network()
    train(net, make(net), steps)
    return net


def assert_equal(net: nn.Module, other: nn.Module) -> None:
    assert_bitwise(list(net.parameters()), list(other.parameters()))


def step_counts(optimizer: OffloadedOptimizer) -> list[int]:
    return [int(state["step"]) for state in optimizer.state.values()]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise ZeroDivisionError("backward has had enough")


def broken_loss(net: Any) -> Any:
    """A loss whose backward reaches the last layers only."""
    hidden = net[2](net[1](net[0](torch.ones(4, 9))))
    return net[5](net[4](net[3](Broken.apply(hidden)))).square().mean()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def landing_fails(at: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the stepping thread fail before it steps one of the buckets."""
    land, count = Bucket.land, [0]

    def fail(bucket: Bucket) -> None:
        if sys._getframe(1).f_code.co_name == "wait":  # of the step
            count[0] += 1
            if count[0] == at:
                raise MemoryError("no memory for bucket")
        land(bucket)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "land", fail)
        yield


# ---- errors that leave everything as before -------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["copies", "forward"])
def test_an_option_out_of_range_changes_nothing(overlap: Overlap) -> None:
    net = network()
    optimizer = offloaded(net, lamb(net), overlap=overlap)
    train(net, optimizer, range(2))
    optimizer.synchronize()
    before = [param.clone() for param in net.parameters()]
    loss_of(net, 2).backward()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"lr=-1.0 is out of range"):
        optimizer.step()
    assert_bitwise(list(net.parameters()), before)
    assert set(step_counts(optimizer)) == {2}
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()  # with the same gradients
    train(net, optimizer, range(3, 5))
    optimizer.synchronize()
    assert_equal(net, trained(lamb, range(5)))


def test_an_option_out_of_range_in_backward() -> None:
    net = network()
    optimizer = offloaded(net, lamb(net), overlap="backward")
    train(net, optimizer, range(2))
    before = [param.clone() for param in net.parameters()]
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(RuntimeError, match=r"no parameter has taken the step: optimizer.zero_grad") as error:
        backward_and_step(net, optimizer)
    cause = error.value.__cause__
    assert isinstance(cause, ValueError)
    assert "lr=-1.0" in str(cause)
    assert_bitwise(list(net.parameters()), before)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    train(net, optimizer, range(2, 5))
    assert_equal(net, trained(lamb, range(5)))


@pytest.mark.parametrize("make", [lamb, adamw])
@pytest.mark.parametrize("overlap", ["copies", "forward"])
def test_a_backward_pass_that_fails(overlap: Overlap, make: Make) -> None:
    net = network()
    optimizer = offloaded(net, make(net), overlap=overlap)
    train(net, optimizer, range(2))
    with pytest.raises(ZeroDivisionError, match="has had enough"):
        broken_loss(net).backward()
    with pytest.raises(RuntimeError, match=r"the last backward\(\) has not ended, and no parameter has taken"):
        optimizer.step()
    optimizer.zero_grad()
    train(net, optimizer, range(2, 4))
    optimizer.synchronize()
    assert_equal(net, trained(make, range(4)))


# ---- steps that were broken off -------------------------------------------------------------------------------------


def refuses_everything(net: nn.Module, optimizer: OffloadedOptimizer, cause: type[BaseException] | None) -> None:
    calls: list[Any] = [
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
        optimizer.synchronize,
        lambda: loss_of(net, 9).backward(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"of 8 parameters have taken a step that was not ended \(") as error:
            call()
        assert (None if error.value.__cause__ is None else type(error.value.__cause__)) is cause


@pytest.mark.parametrize("make", [lamb, adamw])
@pytest.mark.parametrize("remedy", ["finish", "drop", "load"])
@pytest.mark.parametrize("accumulate", ["device", "host"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_error_between_two_buckets(
    overlap: Overlap, accumulate: str, remedy: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network()
    optimizer = offloaded(net, make(net), overlap=overlap, accumulate=accumulate)
    train(net, optimizer, range(2))
    saved = saved_and_loaded((net.state_dict(), optimizer.state_dict()))
    with landing_fails(3, monkeypatch), pytest.raises(RuntimeError, match="no memory") as error:
        backward_and_step(net, optimizer)
    assert isinstance(error.value.__cause__, MemoryError)
    refuses_everything(net, optimizer, MemoryError)
    if remedy == "finish":
        optimizer.finish_step()
    elif remedy == "drop":
        optimizer.drop_step()
        assert sorted(set(step_counts(optimizer))) == [2, 3]
    else:
        optimizer.load_state_dict(saved[1])
        net.load_state_dict(saved[0])
    train(net, optimizer, range(2 if remedy == "load" else 3, 5))
    optimizer.synchronize()
    assert max(step_counts(optimizer)) == 5
    if remedy != "drop":
        assert set(step_counts(optimizer)) == {5}
        assert_equal(net, trained(make, range(5)))


@pytest.mark.parametrize("make", [lamb, adamw])
@pytest.mark.parametrize("remedy", ["finish", "drop"])
def test_a_backward_pass_that_fails_when_buckets_have_been_stepped(remedy: str, make: Make) -> None:
    net = network()
    optimizer = offloaded(net, make(net), overlap="backward", bucket_mb=1e-4)
    train(net, optimizer, range(2))
    with pytest.raises(ZeroDivisionError):
        broken_loss(net).backward()
    with pytest.raises(RuntimeError, match=r"the last backward\(\) has not ended: 4 of 8 parameters"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="has not ended: 4 of 8"):
        optimizer.zero_grad()
    (optimizer.finish_step if remedy == "finish" else optimizer.drop_step)()
    assert sorted(step_counts(optimizer)) == [2] * 4 + [3] * 4
    train(net, optimizer, range(2, 4))
    assert sorted(step_counts(optimizer)) == [4] * 4 + [5] * 4


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_error_amid_the_arithmetic(overlap: Overlap, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    optimizer = offloaded(net, adamw(net), overlap=overlap)
    train(net, optimizer, range(2))
    step, calls = torch.optim.AdamW.step.__wrapped__, []  # type: ignore[attr-defined]

    def fail(self: torch.optim.AdamW, closure: Any = None) -> Any:
        calls.append(1)
        step(self, closure)
        if len(calls) == 2:
            raise MemoryError("amid a step")

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", fail)
        with pytest.raises(RuntimeError, match="while others were being stepped") as error:
            backward_and_step(net, optimizer)
    assert isinstance(error.value.__cause__, MemoryError)
    with pytest.raises(RuntimeError, match="the step cannot be finished"):
        optimizer.finish_step()
    refuses_everything(net, optimizer, MemoryError)
    optimizer.drop_step()
    train(net, optimizer, range(3, 5))


def test_there_is_no_step_to_finish() -> None:
    net = network()
    with pytest.raises(RuntimeError, match="no step was broken off"):
        offloaded(net, lamb(net)).finish_step()


def test_a_second_backward_pass() -> None:
    net = network()
    optimizer = offloaded(net, lamb(net))
    loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match=r"has a second gradient.*optimizer.accumulate\(\)"):
        loss_of(net, 1).backward()
    with pytest.raises(RuntimeError, match="has not ended"):
        optimizer.step()
    optimizer.zero_grad()
    train(net, optimizer, range(3))
    assert_equal(net, trained(lamb, range(3)))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_copies_that_fail(overlap: Overlap) -> None:
    net, copies = network(), SlowCopies(seed=None)
    optimizer = offloaded(net, lamb(net), overlap=overlap, copies=copies)
    train(net, optimizer, range(2))
    optimizer.synchronize()
    copies.outward.error = OSError("the bus is off")
    with pytest.raises((OSError, RuntimeError), match="bus is off"):
        backward_and_step(net, optimizer)
    optimizer.drop_step()
    train(net, optimizer, range(2, 4))
    assert max(step_counts(optimizer)) <= 5


# ---- Ctrl-C, and the end --------------------------------------------------------------------------------------------


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt: a shell starts commands in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("delay", [0.005, 0.03, 0.06, 0.1])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_interrupt(overlap: Overlap, delay: float) -> None:
    """It comes before the step, or when all parameters have taken it; a step that buckets have begun can be ended."""
    net = network()
    optimizer = offloaded(net, lamb(net), overlap=overlap, copies=SlowCopies(bandwidth=5e5, seed=None))
    train(net, optimizer, range(1))
    optimizer.synchronize()
    loss_of(net, 1).backward()
    timer = threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()

    def interrupted() -> None:
        optimizer.step()
        optimizer.synchronize()
        time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    timer.join()
    if optimizer._running is None and any(bucket.stepped for bucket in optimizer._grads.buckets):
        assert overlap == "backward"
        with pytest.raises(RuntimeError, match=r"end it with step\(\)"):
            optimizer.zero_grad()
        optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    [taken] = set(step_counts(optimizer))
    assert taken in (1, 2)
    train(net, optimizer, range(2, 4))
    optimizer.synchronize()
    other = network()
    plain = lamb(other)
    train(other, plain, range(taken))
    train(other, plain, range(2, 4))
    assert_equal(net, other)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_model_that_is_deleted_in_flight(overlap: Overlap) -> None:
    net = network()
    optimizer = offloaded(net, lamb(net), overlap=overlap, copies=SlowCopies(bandwidth=1e6))
    train(net, optimizer, range(1))
    loss_of(net, 1).backward()
    optimizer.step()
    loss_of(net, 2).backward()
    thread, gone = optimizer._worker.thread, [weakref.ref(net[0].weight), weakref.ref(optimizer)]
    del net, optimizer
    gc.collect()
    thread.join(timeout=20)
    assert not thread.is_alive()
    for _ in range(100):
        gc.collect()
        if not any(ref() for ref in gone):
            return
        time.sleep(0.02)  # until the last copies have ended
    raise AssertionError(gone)


def test_the_hooks_end_with_the_optimizer() -> None:
    net = network()
    optimizer = offloaded(net, lamb(net), overlap="forward")
    train(net, optimizer, range(1))
    optimizer.synchronize()
    del optimizer
    gc.collect()
    loss_of(net, 1).backward()
    assert all(param.grad is not None for param in net.parameters())
    again = offloaded(net, lamb(net))
    again.zero_grad()
    train(net, again, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_ten_thousand_steps_do_not_grow(overlap: Overlap) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).bfloat16()
    copies = SlowCopies(seed=None)
    optimizer = offloaded(net, lamb(net), overlap=overlap, masters=True, bucket_mb=1e-4, copies=copies)
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
