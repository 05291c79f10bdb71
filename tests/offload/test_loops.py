"""Training loops with offload: accumulation, clipping, scalers, schedules, hooks, checkpoints and written weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from bighorn import Came, Lamb, LossScaler, WindowScale
from tests.support.cases import Kind
from tests.support.offloading import (
    Make,
    Twins,
    assert_equal,
    in_groups,
    loss_of,
    network,
    offloaded,
    scaled_step,
    train,
)
from tests.support.optimizer_runs import assert_bitwise, saved_and_loaded


def lamb(net: nn.Module, **options: Any) -> Lamb:
    return Lamb(net.named_parameters(), **{"lr": 0.1, "weight_decay": 0.1, **options})


def clipping_lamb(net: nn.Module) -> Lamb:
    return lamb(net, max_grad_norm=0.01)


def lamb_with_a_tensor(net: nn.Module) -> Lamb:
    return lamb(net, lr=torch.tensor(0.1))


def adamw(net: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), **{"lr": 0.1, **options})


with_both_makes = pytest.mark.parametrize("make", [lamb, adamw])


@with_both_makes
def test_accumulation(make: Make) -> None:
    twins = Twins(make)
    for step in range(4):
        for net, optimizer in twins:
            with optimizer.accumulate() if optimizer is twins.offloaded else contextlib.nullcontext():
                for micro in range(2):
                    loss_of(net, 3 * step + micro).backward()
            assert all(param.grad is not None for param in net.parameters())
            train(net, optimizer, range(3 * step + 2, 3 * step + 3))
    twins.assert_equal()


def test_a_closure() -> None:
    twins = Twins(lamb)
    for step in range(3):
        for net, optimizer in twins:

            def closure(net: nn.Module = net, optimizer: Any = optimizer, step: int = step) -> Any:
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
    twins.assert_equal()


# ---- clips -----------------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def mixed() -> Any:
    """Return a network with weights of two dtypes."""
    net = network()
    net[0].bfloat16()
    net[1] = nn.Sequential(nn.Tanh(), Cast())
    return net


BUILDS: list[Callable[[], Any]] = [network, lambda: network().double(), lambda: network().bfloat16(), mixed]


def clipped_step(scaler: Any, plain: torch.optim.Optimizer, loss: Any) -> None:
    """The equivalent of offload(max_grad_norm=0.01) in torch."""
    scaler.scale(loss).backward()
    scaler.unscale_(plain)
    nn.utils.clip_grad_norm_([param for group in plain.param_groups for param in group["params"]], 0.01)
    scaler.step(plain)
    scaler.update()
    plain.zero_grad()


@pytest.mark.parametrize("build", BUILDS, ids=["float32", "float64", "bfloat16", "mixed"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
def test_a_clip_is_clip_grad_norm(scaled: bool, build: Callable[[], Any]) -> None:
    """They are equal bit for bit, with gradients below and above the norm, and parameters without gradients."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=1000.0, enabled=scaled) for _ in "12"]
    options: dict[str, Any] = {"max_grad_norm": 0.01, "scaler": scalers[1], "bucket_mb": 1e-4}
    twins = Twins(lambda net: adamw(net, lr=1e-3), build, **options)
    for step, factor in enumerate((1.0, 1e-4, 30.0, 1.0)):
        for net in twins.nets:
            net[5].requires_grad_(step != 3)
        clipped_step(scalers[0], twins.plain, loss_of(twins.nets[0], step) * factor)
        scaled_step(scalers[1], twins.offloaded, loss_of(twins.nets[1], step) * factor)
    twins.assert_equal()


@pytest.mark.parametrize("build", BUILDS[:3], ids=["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_clip_of_gradients_that_are_not_finite(bad: float, build: Callable[[], Any]) -> None:
    """One element reaches every gradient, as in torch: NaN makes all NaN, and inf makes the finite ones 0."""
    twins = Twins(adamw, build, max_grad_norm=1.0)
    for net, optimizer in twins:
        grads = torch.autograd.grad(loss_of(net, 0), list(net.parameters()))
        grads[2][3] = bad
        for param, grad in zip(net.parameters(), grads, strict=True):
            param.grad = grad
        if optimizer is twins.plain:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    for a, b in zip(twins.nets[0].parameters(), twins.nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert [bool(p.isnan().all()) for p in twins.nets[1].parameters()] == [bool(torch.tensor(bad).isnan())] * 8


class InParts(torch.optim.SGD):
    """An optimizer with the method that TailOverlap documents; it may wait more than once for a part."""

    def step_in_parts(self, parts: list[list[torch.Tensor]], wait: Callable[[int], None]) -> None:
        for part in [*range(len(parts)), *range(len(parts))]:
            wait(part)
        torch.optim.SGD.step.__wrapped__(self)  # type: ignore[attr-defined]


def test_an_optimizer_that_steps_in_parts_by_itself() -> None:
    nets = network(), network()
    plain, other = (kind(net.parameters(), lr=0.1) for kind, net in zip((torch.optim.SGD, InParts), nets, strict=True))
    theirs = offloaded(nets[1], other, max_grad_norm=0.01)
    for step in range(3):
        clipped_step(torch.amp.GradScaler("cpu", enabled=False), plain, loss_of(nets[0], step))
        train(nets[1], theirs, range(step, step + 1))
    assert_equal(*nets)


# ---- scalers --------------------------------------------------------------------------------------------------------

SCALERS: dict[str, Callable[[], Any]] = {
    "LossScaler": lambda: LossScaler(WindowScale(init_scale=1024.0, growth_interval=2)),
    "GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
}


@pytest.mark.parametrize("make", [lamb, clipping_lamb, adamw])
@pytest.mark.parametrize("name", SCALERS)
def test_scalers(name: str, make: Make) -> None:
    """The third batch overflows: the step is skipped, and the scale falls."""
    scalers = [SCALERS[name]() for _ in "12"]
    twins = Twins(make, scaler=scalers[1])
    for step in range(6):
        for (net, optimizer), scaler in zip(twins, scalers, strict=True):
            scaled_step(scaler, optimizer, loss_of(net, step) * (torch.inf if step == 2 else 1.0))
    twins.assert_equal()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert {int(state["step"]) for state in twins.offloaded.state.values()} == {5}


def test_a_scaler_where_new_tensors_are_float64() -> None:
    net, scaler = network(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer, loss = offloaded(net, lamb(net), scaler=scaler), loss_of(net, 0)
    torch.set_default_dtype(torch.float64)
    try:
        scaled_step(scaler, optimizer, loss)
        optimizer.synchronize()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", SCALERS)
@with_both_makes
def test_a_scaler_that_was_not_passed(make: Make, name: str) -> None:
    net, scaler = network(), SCALERS[name]()
    optimizer = offloaded(net, make(net))
    before = [param.clone() for param in net.parameters()]
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match="pass it to offload"):
        scaler.step(optimizer)
    assert_bitwise(list(net.parameters()), before)


# ---- groups, schedules, hooks, reports ------------------------------------------------------------------------------


def test_groups_and_schedules(kind: Kind) -> None:
    twins = Twins(lambda net: in_groups(kind, net))
    for step in range(6):
        if step == 3:
            for _, optimizer in twins:
                optimizer.param_groups[0]["lr"] = 0.005
        twins.train(range(step, step + 1))
        twins.offloaded.synchronize()
        assert [g["lr"] for g in twins.offloaded.param_groups] == [g["lr"] for g in twins.plain.param_groups]
        assert [g["schedule_step"] for g in twins.offloaded.param_groups] == [step + 1] * 2
    twins.assert_equal()
    assert sorted(twins.offloaded.telemetry().names) == sorted(twins.plain.telemetry().names)
    assert twins.offloaded.explain().startswith(twins.plain.explain())


@pytest.mark.parametrize("make", [lamb, lamb_with_a_tensor, adamw])
def test_schedulers_of_torch(make: Make, recwarn: pytest.WarningsRecorder) -> None:
    """OneCycleLR writes betas, too, and a tensor as lr is written in place."""
    twins = Twins(make)
    both = [[StepLR(o, 2), OneCycleLR(o, 0.2, total_steps=8)] for _, o in twins]
    for step in range(6):
        for (net, optimizer), schedulers in zip(twins, both, strict=True):
            train(net, optimizer, range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()
    twins.assert_equal()
    assert [str(w.message) for w in recwarn if "before `optimizer.step()`" in str(w.message)] == []


def test_hooks_of_the_optimizer_run_once() -> None:
    net = network()
    inner, said = lamb(net), []
    inner.register_step_pre_hook(lambda *_: said.append("before"))
    optimizer = offloaded(net, inner)
    optimizer.register_step_post_hook(lambda *_: said.append("after"))
    train(net, optimizer, range(2))
    assert said == ["before", "after"] * 2


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True], ids=["plain-first", "offloaded-first"])
@with_both_makes
def test_checkpoints_are_those_of_the_optimizer(make: Make, first: bool) -> None:
    """A run continues from a checkpoint of the other kind; the model is loaded first or last."""
    whole, nets = network(), (network(), network())
    reference = make(whole)
    train(whole, reference, range(6))
    optimizers = [make(net) for net in nets]
    optimizers[not first] = offloaded(nets[not first], optimizers[not first])
    train(nets[0], optimizers[0], range(3))
    saved = saved_and_loaded({"model": nets[0].state_dict(), "optimizer": optimizers[0].state_dict()})
    if first:
        nets[1].load_state_dict(saved["model"])
    optimizers[1].param_groups[0]["lr"] = 0.5
    optimizers[1].load_state_dict(saved["optimizer"])
    assert optimizers[1].param_groups[0]["lr"] == 0.1
    if not first:
        nets[1].load_state_dict(saved["model"])
    train(nets[1], optimizers[1], range(3, 6))
    if not first:
        optimizers[1].synchronize()  # type: ignore[attr-defined]
    assert_equal(nets[1], whole)
    ours, plain = optimizers[1].state_dict(), reference.state_dict()
    assert ours["param_groups"] == plain["param_groups"]
    for key, state in plain["state"].items():
        assert ours["state"][key].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(ours["state"][key][name]), torch.as_tensor(value))


@with_both_makes
def test_a_checkpoint_loaded_between_backward_and_step_keeps_the_gradients(make: Make) -> None:
    twins = Twins(make)
    for net, optimizer in twins:
        train(net, optimizer, range(2))
        saved = saved_and_loaded(optimizer.state_dict())
        train(net, optimizer, range(2, 3))
        loss_of(net, 3).backward()
        optimizer.load_state_dict(saved)
        optimizer.step()
    twins.assert_equal()


def test_an_optimizer_that_has_state_already() -> None:
    whole, net = network(), network()
    reference, inner = Came(whole.named_parameters(), lr=0.1), Came(net.named_parameters(), lr=0.1)
    train(whole, reference, range(6))
    train(net, inner, range(3))
    optimizer = offloaded(net, inner)
    assert set(optimizer.state) == set(net.parameters())
    train(net, optimizer, range(3, 6))
    assert_equal(net, whole)


# ---- written weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "kahan", "master"])
def test_weights_that_a_program_writes_are_taken_over(rounding: str) -> None:
    twins = Twins(lambda net: lamb(net, weight_rounding=rounding), lambda: network().bfloat16())
    for step in range(5):
        for net, optimizer in twins:
            twins.offloaded.synchronize()
            if step == 2:
                with torch.no_grad():
                    net[0].weight.mul_(0.5)
            if step == 3:
                net[3].bias.data.fill_(0.25)
                twins.offloaded.read_weights()
            if step == 4:
                net[3].weight.data = net[3].weight * 0.5
            loss_of(net, step).backward()
            if step == 4:  # between backward and step
                with torch.no_grad():
                    net[5].weight.clamp_(-0.01, 0.01)
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal()
