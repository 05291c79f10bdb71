"""The contract of torch.optim.Optimizer, on which trainers and schedulers rely: steps and their gradients."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from bighorn import Lars
from bighorn._optim.step import Steps
from tests.support.cases import Case, Kind, serving
from tests.support.error_checks import refused
from tests.support.optimizer_runs import (
    BY_ID,
    advance,
    assert_bitwise,
    assert_same_everything,
    backward,
    copies,
    figures,
    model,
    runs,
)
from tests.support.tables import for_every


def test_closure_runs_with_gradients_enabled_and_its_loss_is_returned(kind: Kind, backend: str) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=1e-3, backend=backend)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(net)

    with torch.no_grad():
        first, second = (optimizer.step(closure).detach() for _ in range(2))
    assert second.item() < first.item()
    assert optimizer.step() is None


def test_what_is_no_closure(kind: Kind) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=0.1)
    loss = backward(net)
    with refused(
        list(net.parameters()), optimizer, TypeError, r"closure must be a function.*not a Tensor: call loss\."
    ):
        optimizer.step(loss)  # type: ignore[arg-type]


def test_step_hooks(kind: Kind) -> None:
    """Hooks run in torch's order with torch's arguments, and none runs after it is removed."""
    net = model()
    optimizer = kind(net.parameters(), lr=0.1)
    calls: list[tuple[object, ...]] = []
    handles = [
        register(lambda *given, name=name: calls.append((name, *given)))
        for name, register in {
            "own pre": optimizer.register_step_pre_hook,
            "own post": optimizer.register_step_post_hook,
            "global pre": register_optimizer_step_pre_hook,
            "global post": register_optimizer_step_post_hook,
        }.items()
    ]
    backward(net)
    optimizer.step()
    assert calls == [
        (name, optimizer, (optimizer,), {}) for name in ("global pre", "own pre", "own post", "global post")
    ]
    for handle in handles:
        calls.clear()
        handle.remove()
        optimizer.step(closure=None)
        names = {name for name, *_ in calls}
        assert len(names) == len(calls) == len(handles) - 1 - handles.index(handle)
        assert all(given == [optimizer, (optimizer,), {"closure": None}] for _, *given in calls)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_profiler_sees_one_step(hooked: bool, kind: Kind) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=0.1)
    if hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    backward(net)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    name = f"Optimizer.step#{kind.__name__}.step"
    assert [event.count for event in profiled.key_averages() if event.key == name] == [1]


def test_gradients_written_in_place_between_steps(kind: Kind, backend: str) -> None:
    parameter, other = Parameter(torch.ones(20)), Parameter(torch.ones(20))
    parameter.grad = torch.zeros(20)
    one = kind([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    two = kind([other], lr=0.1, weight_decay=0.1, backend=backend)
    for step in range(3):
        values = torch.linspace(-1, step + 1.0, 20)
        parameter.grad.copy_(values)
        other.grad = values
        one.step()
        two.step()
    assert_bitwise([parameter], [other])


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("numbers", ["real", "complex"])
def test_a_gradient_that_becomes_a_lazy_view_of_the_same_memory(
    numbers: str, max_grad_norm: float | None, kind: Kind, backend: str
) -> None:
    """`z.conj()` and its imaginary part have the address and strides of `z`, but are negated when read."""
    z = torch.randn(6, dtype=torch.complex64)
    views = (z, z.conj(), z) if numbers == "complex" else (z.imag, z.conj().imag, z.imag)
    parameter = Parameter(torch.ones(6, dtype=views[0].dtype))
    (other,) = copies([parameter])
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": max_grad_norm, "backend": backend}
    one, two = kind([parameter], **options), kind([other], **options)
    for view in views:
        parameter.grad, other.grad = view, view.resolve_conj().resolve_neg().clone()
        one.step()
        two.step()
        assert_same_everything([parameter], one, [other], two)


@pytest.mark.parametrize(
    ("backend", "case"),
    runs(
        BY_ID[name]
        for name in ("clip-skip", "stacked", "came-clip-skip", "came-everything", "came-stacked", "lars-clip-skip")
    ),
    indirect=["backend"],
)
def test_torchs_default_dtype_changes_nothing(case: Case, backend: str) -> None:
    runs = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            parameters = case.parameters()
            optimizer = case.optimizer(parameters, backend)
            advance(case, parameters, optimizer, range(2))
            runs.append((parameters, optimizer, figures(optimizer.telemetry())))
        finally:
            torch.set_default_dtype(torch.float32)
    (parameters, optimizer, ours), (others, other, theirs) = runs
    assert_same_everything(parameters, optimizer, others, other)
    for name, column in theirs.items():
        assert ours[name].dtype is torch.float32
        assert ours[name].equal(column), name


INT8, CLIP, SKIPPED = {"state_dtype": "int8"}, {"max_grad_norm": 2.0**64}, True


@for_every(
    ("options", "one", "others", "skipped"),
    [
        *((options, *values, SKIPPED) for options in ({}, INT8, CLIP) for values in ((3e19, 0.0), (6e17, 6e17))),
        *((options, 0.99 * 2.0**53, 1.0, not SKIPPED) for options in ({}, INT8)),
        *((options, 0.99 * 2.0**53 / 8192**0.5, 0.99 * 2.0**53 / 8192**0.5, not SKIPPED) for options in ({}, INT8)),
        ({"max_grad_norm": 1.0}, 3e19, 3e19, not SKIPPED),
    ],
)
def test_steps_whose_squares_are_beyond_float32_are_skipped(
    options: dict[str, Any], one: float, others: float, skipped: bool, kind: Kind, backend: str
) -> None:
    """One element of 3e19 once made all 524,288 weights of a matrix NaN, even with skip_nonfinite."""
    if kind is Lars and options is INT8 and backend == "cpu":
        return  # the C library has no momentum of LARS in blocks
    weight = Parameter(torch.ones(64, 128))
    optimizer = kind([weight], lr=0.1, skip_nonfinite=True, backend=backend, **options)
    for _ in range(3):
        weight.grad = torch.full((64, 128), others)
        weight.grad[3, 5] = one
        optimizer.step()
    assert int(optimizer.telemetry().skipped) == 3 * skipped
    assert weight.isfinite().all()
    assert weight.equal(torch.ones(64, 128)) == skipped
    weight.grad = torch.ones(64, 128)
    optimizer.step()
    assert int(optimizer.telemetry().skipped) == 3 * skipped
    assert not weight.equal(torch.ones(64, 128))


@pytest.mark.parametrize("skipped", [False, True])
def test_gradients_are_let_go_after_the_step(skipped: bool, kind: Kind, backend: str) -> None:
    p = Parameter(torch.ones(4, 3))
    optimizer = kind([p], lr=0.01, skip_nonfinite=True, backend=backend)
    for value in (1.0, math.inf if skipped else 1.0):
        p.grad = torch.full_like(p, value)
        optimizer.step()
    grad, p.grad = weakref.ref(p.grad), None
    assert grad() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_step_in_parts_is_a_step_to_the_last_bit(dtype: torch.dtype, kind: Kind, backend: str) -> None:
    """In parts, tensors have other places in a backend's workspace; `make attack` found a difference in float64."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((33, 7), (5,), (3000,), (6, 1))]
    whole, parted = ([Parameter(value.clone()) for value in values] for _ in range(2))
    backend = serving(backend, dtype)
    first, second = (kind(params, lr=0.01, weight_decay=0.1, backend=backend) for params in (whole, parted))
    for _ in range(3):
        for a, b in zip(whole, parted, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, dtype=dtype)
            b.grad = a.grad.clone()
        first.step()
        second.step_in_parts([[param] for param in reversed(parted)], lambda _: None)
    assert all(a.equal(b) for a, b in zip(whole, parted, strict=True))


@pytest.mark.parametrize("way", ["step", "step_in_parts", "step_param"])
@pytest.mark.parametrize("saved", ["param", "exp_avg"])
def test_a_graph_from_before_the_step_is_refused(saved: str, way: str, kind: Kind, backend: str) -> None:
    """Autograd does not track writes of kernels, and would silently compute gradients from the new values."""
    params = [Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2)]
    optimizer: Any = kind(params, lr=0.1, backend=backend)

    def step(stepped: list[Parameter]) -> None:
        for param in stepped:
            param.grad = torch.ones(3, 4)
        if way == "step_param":
            optimizer.step_param(stepped[0])
        if way == "step_in_parts":
            optimizer.step_in_parts([stepped], lambda _: None)
        else:
            optimizer.step()
        optimizer.zero_grad()

    step(params)
    factors: list[Tensor] = [param if saved == "param" else optimizer.state[param][saved] for param in params]
    changed, unchanged = ((param * factor).sum() for param, factor in zip(params, factors, strict=True))
    step(params[:1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.backward()  # type: ignore[no-untyped-call]
    unchanged.backward()  # type: ignore[no-untyped-call]  # a parameter without a gradient is not written


def test_a_second_thread_is_refused_while_one_is_in_a_step(kind: Kind, backend: str) -> None:
    """Three threads once lost counts of steps without an error."""
    param = Parameter(torch.ones(3, 4))
    optimizer: Any = kind([param], lr=0.1, backend=backend)
    param.grad = torch.ones(3, 4)
    optimizer.step()
    begun, may_end = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        may_end.wait(timeout=60)

    thread = threading.Thread(target=optimizer.step_in_parts, args=([[param]], wait))
    thread.start()
    begun.wait(timeout=60)
    with refused([param], optimizer, RuntimeError, "two threads step one optimizer at once"):
        optimizer.step()
    may_end.set()
    thread.join()
    optimizer.step()
    assert optimizer.state[param]["step"] == 3


def test_a_state_cannot_be_loaded_inside_a_step(kind: Kind, backend: str) -> None:
    """It once ended in an error of a lock, with half a step taken; groups may be added."""
    params = [Parameter(torch.ones(3, 4)) for _ in range(3)]
    optimizer: Any = kind(params[:2], lr=0.1, backend=backend)
    for param in params:
        param.grad = torch.ones(3, 4)
    optimizer.step()
    saved = optimizer.state_dict()

    def wait(part: int) -> None:
        if part == 1:
            with pytest.raises(RuntimeError, match=r"load_state_dict\(\) was called while a step is running"):
                optimizer.load_state_dict(saved)
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": params[2:]})

    optimizer.step_in_parts([params[:1], params[1:2]], wait)
    assert [int(optimizer.state[param]["step"]) for param in params[:2]] == [2, 2]
    assert not optimizer.state.get(params[2])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3, 1]


def test_an_interrupt_leaves_no_lock_held() -> None:
    """Ctrl-C between the lock and its `try` once left it held, and every other thread was refused for good."""
    optimizer = Lars([Parameter(torch.ones(2))], lr=0.1)

    def interrupted(at: int) -> bool:
        """Interrupt the lock before one of its instructions; return whether it came that far before the step ended."""
        ended: list[int] = []
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            if frame.f_code is not Steps.alone.__code__:
                return None
            frame.f_trace_opcodes = True
            count += event == "opcode"
            if count == at and not ended:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            optimizer._steps.alone(lambda: ended.append(1), waits=False)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    at = 1
    while interrupted(at):
        assert not optimizer._steps.running, at
        at += 1
    assert at > 15
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()


@pytest.mark.parametrize("way", ["step", "step_in_parts", "step_param"])
def test_parameters_that_two_groups_exchange_have_the_options_of_their_new_group(
    way: str, kind: Kind, backend: str
) -> None:
    params = [Parameter(torch.ones(3, 4)) for _ in range(4)]
    pairs = [(f"w{i}", param) for i, param in enumerate(params)]
    groups: list[dict[str, Any]] = [{"params": pairs[:2]}, {"params": pairs[2:], "lr": 0.5}]
    optimizer: Any = kind(groups, lr=0.1, backend=backend)

    def rates() -> dict[str, float]:
        for param in params:
            param.grad = torch.ones(3, 4)
        if way == "step_in_parts":
            optimizer.step_in_parts([[param] for param in params], lambda _: None)
        else:
            for param in params if way == "step_param" else ():
                optimizer.step_param(param)
            optimizer.step()
        found = optimizer.telemetry()
        return {name: round(rate, 3) for name, rate in zip(found.names, found.lr.tolist(), strict=True)}

    rates()
    assert rates() == {"w0": 0.1, "w1": 0.1, "w2": 0.5, "w3": 0.5}
    first, second = optimizer.param_groups
    for key in ("params", "param_names"):
        first[key][1], second[key][1] = second[key][1], first[key][1]
    assert rates() == rates() == {"w0": 0.1, "w3": 0.1, "w2": 0.5, "w1": 0.5}


def test_a_replaced_parameter_is_freed(kind: Kind, backend: str) -> None:
    """A framework replaces a tensor in a group; plans with the old one would keep its memory."""
    old = Parameter(torch.ones(4, 5))
    optimizer = kind([old], lr=0.1, backend=backend)
    old.grad = torch.ones(4, 5)
    optimizer.step()
    new = Parameter(old.detach().clone())
    new.grad = torch.ones(4, 5)
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = optimizer.state.pop(old)
    kept = weakref.ref(old)
    del old
    optimizer.step()
    assert kept() is None
