"""Training loops with offload: accumulation, clipping, scalers, schedules, hooks, checkpoints and written weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from bighorn import Came, FixedScale, Lamb, LossScaler, WindowScale
from tests.support.cases import Kind
from tests.support.offloading import (
    OVERLAPS,
    Make,
    Overlap,
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


def adamw(net: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), **{"lr": 0.1, **options})


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("make", [lamb, adamw])
def test_accumulation(make: Make, overlap: Overlap) -> None:
    nets = network(), network()
    plain, other = (make(net) for net in nets)
    theirs = offloaded(nets[1], other, overlap=overlap)
    for step in range(4):
        for micro in range(3):
            loss_of(nets[0], 3 * step + micro).backward()
        with theirs.accumulate():
            for micro in range(2):
                loss_of(nets[1], 3 * step + micro).backward()
        assert all(param.grad is not None for param in nets[1].parameters())
        loss_of(nets[1], 3 * step + 2).backward()
        for optimizer in (plain, theirs):
            optimizer.step()
            optimizer.zero_grad()
    theirs.synchronize()
    assert_equal(*nets)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_gradients_that_no_backward_pass_has_sent(overlap: Overlap) -> None:
    nets = network(), network()
    plain, theirs = lamb(nets[0]), offloaded(nets[1], lamb(nets[1]), overlap=overlap)
    for step in range(3):
        for net, optimizer in zip(nets, (plain, theirs), strict=True):
            for param in net.parameters():
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            optimizer.zero_grad()
    theirs.synchronize()
    assert_equal(*nets)


def test_zero_grad_forgets_what_was_sent() -> None:
    nets = network(), network()
    plain, theirs = lamb(nets[0]), offloaded(nets[1], lamb(nets[1]))
    for step in range(6):
        for net, optimizer in zip(nets, (plain, theirs), strict=True):
            loss_of(net, step).backward()
            if step % 2:
                optimizer.step()
            optimizer.zero_grad()
    assert_equal(*nets)


def test_a_closure() -> None:
    nets = network(), network()
    plain, theirs = lamb(nets[0]), offloaded(nets[1], lamb(nets[1]))
    for step in range(3):
        for net, optimizer in zip(nets, (plain, theirs), strict=True):

            def closure(net: nn.Module = net, optimizer: Any = optimizer, step: int = step) -> Any:
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
    assert_equal(*nets)


# ---- clips -----------------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def mixed(net: Any) -> Any:
    """Return a network with weights of two dtypes."""
    net[0].bfloat16()
    net[1] = nn.Sequential(nn.Tanh(), Cast())
    return net


def backward_clip_and_step(plain: torch.optim.Optimizer, loss: Any, scaler: Any = None) -> None:
    """The equivalent of offload(max_grad_norm=0.01) in torch."""
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(plain)
    nn.utils.clip_grad_norm_([param for group in plain.param_groups for param in group["params"]], 0.01)
    if scaler is None:
        plain.step()
    else:
        scaler.step(plain)
        scaler.update()
    plain.zero_grad()


@pytest.mark.parametrize("convert", [nn.Module.float, nn.Module.double, nn.Module.bfloat16, mixed])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_clip_is_clip_grad_norm(overlap: Overlap, scaled: bool, convert: Any) -> None:
    """They are equal bit for bit, with gradients below and above the norm, and parameters without gradients."""
    nets = convert(network()), convert(network())
    scalers: list[Any] = [torch.amp.GradScaler("cpu", init_scale=1000.0) if scaled else None for _ in nets]
    plain = adamw(nets[0], lr=1e-3)
    theirs = offloaded(
        nets[1], adamw(nets[1], lr=1e-3), overlap=overlap, max_grad_norm=0.01, scaler=scalers[1], bucket_mb=1e-4
    )
    for step, factor in enumerate((1.0, 1e-4, 30.0, 1.0)):
        for net, requires in ((net, step != 3) for net in nets):
            net[5].requires_grad_(requires)
        backward_clip_and_step(plain, loss_of(nets[0], step) * factor, scalers[0])
        loss = loss_of(nets[1], step) * factor
        (loss if scalers[1] is None else scalers[1].scale(loss)).backward()
        theirs.step()
        if scalers[1] is not None:
            scalers[1].update()
        theirs.zero_grad()
    theirs.synchronize()
    assert_equal(*nets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_clip_of_gradients_that_are_not_finite(bad: float, dtype: torch.dtype) -> None:
    """One element reaches every gradient, as in torch: NaN makes all NaN, and inf makes the finite ones 0."""
    nets = network().to(dtype), network().to(dtype)
    plain, theirs = adamw(nets[0]), offloaded(nets[1], adamw(nets[1]), max_grad_norm=1.0)
    for net, optimizer in zip(nets, (plain, theirs), strict=True):
        grads = torch.autograd.grad(loss_of(net, 0), list(net.parameters()))
        grads[2][3] = bad
        for param, grad in zip(net.parameters(), grads, strict=True):
            param.grad = grad
        if optimizer is plain:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert [bool(param.isnan().all()) for param in nets[1].parameters()] == [bool(torch.tensor(bad).isnan())] * 8


def test_a_clip_of_masters_is_that_of_a_float32_twin() -> None:
    net, twin = network().bfloat16(), network().bfloat16().float()
    theirs = offloaded(net, adamw(net), masters=True, max_grad_norm=0.01)
    plain = adamw(twin)
    for step in range(4):
        grads = torch.autograd.grad(loss_of(net, step), list(net.parameters()))
        for param, its, grad in zip(net.parameters(), twin.parameters(), grads, strict=True):
            param.grad, its.grad = grad, grad.float()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        for optimizer in (theirs, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert_bitwise(
        [state["master"] for _, state in sorted(theirs.state_dict()["state"].items())], list(twin.parameters())
    )


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
        backward_clip_and_step(plain, loss_of(nets[0], step))
        train(nets[1], theirs, range(step, step + 1))
    assert_equal(*nets)


def test_a_step_that_was_refused_keeps_the_scale() -> None:
    """GradScaler keeps its scale on an optimizer whose step raises, and multiplies the next one by it."""
    nets = network(), network()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in nets]
    plain, theirs = lamb(nets[0]), offloaded(nets[1], lamb(nets[1]), scaler=scalers[1])
    scalers[1].scale(loss_of(nets[1], 0)).backward()
    theirs.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"lr=-1.0 is out of range"):
        theirs.step()
    theirs.param_groups[0]["lr"] = 0.1
    theirs.step()
    scaled_step(scalers[0], plain, loss_of(nets[0], 0))
    assert_equal(*nets)


# ---- scalers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("make", [lamb, adamw])
@pytest.mark.parametrize("ours", [True, False], ids=["LossScaler", "GradScaler"])
def test_scalers(ours: bool, make: Make, overlap: Overlap) -> None:
    """The third batch overflows: the step is skipped, and the scale falls."""
    nets = network(), network()
    scalers: list[Any] = [
        LossScaler(WindowScale(init_scale=1024.0, growth_interval=2))
        if ours
        else torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for _ in nets
    ]
    plain, other = (make(net) for net in nets)
    theirs = offloaded(nets[1], other, overlap=overlap, scaler=scalers[1])
    for step in range(6):
        for net, optimizer, scaler in zip(nets, (plain, theirs), scalers, strict=True):
            scaled_step(scaler, optimizer, loss_of(net, step) * (torch.inf if step == 2 else 1.0))
    theirs.synchronize()
    assert_equal(*nets)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    steps = {int(state["step"]) for state in theirs.state.values()}
    assert steps == {5}


def test_a_scaler_where_new_tensors_are_float64() -> None:
    net, scaler = network(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer, loss = offloaded(net, lamb(net), scaler=scaler), loss_of(net, 0)
    torch.set_default_dtype(torch.float64)
    try:
        scaled_step(scaler, optimizer, loss)
        optimizer.synchronize()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_scaler_with_a_clip() -> None:
    nets = network(), network()
    scalers = [LossScaler(FixedScale(1024.0)) for _ in nets]
    plain, other = (lamb(net, max_grad_norm=0.01) for net in nets)
    theirs = offloaded(nets[1], other, scaler=scalers[1])
    for step in range(4):
        for net, optimizer, scaler in zip(nets, (plain, theirs), scalers, strict=True):
            scaled_step(scaler, optimizer, loss_of(net, step))
    assert_equal(*nets)


@pytest.mark.parametrize("scaler", [LossScaler(), torch.amp.GradScaler("cpu")], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("make", [lamb, adamw])
def test_a_scaler_that_was_not_passed(make: Make, scaler: Any) -> None:
    net = network()
    optimizer = offloaded(net, make(net))
    before = [param.clone() for param in net.parameters()]
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match="pass it to offload"):
        scaler.step(optimizer)
    assert_bitwise(list(net.parameters()), before)


def test_a_scaler_that_is_off() -> None:
    net = network()
    scaler = LossScaler(enabled=False)
    optimizer = offloaded(net, lamb(net), scaler=scaler)
    scaler.scale(loss_of(net, 0)).backward()
    scaler.step(optimizer)
    assert int(optimizer.state[net[0].weight]["step"]) == 1


# ---- groups, schedules, hooks, reports ------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_groups_and_schedules(kind: Kind, overlap: Overlap) -> None:
    nets = network(), network()
    plain, other = (in_groups(kind, net) for net in nets)
    theirs = offloaded(nets[1], other, overlap=overlap)
    for step in range(6):
        for net, optimizer in zip(nets, (plain, theirs), strict=True):
            if step == 3:
                optimizer.param_groups[0]["lr"] = 0.005
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        theirs.synchronize()
        assert [g["lr"] for g in theirs.param_groups] == [g["lr"] for g in plain.param_groups]
        assert [g["schedule_step"] for g in theirs.param_groups] == [step + 1] * 2
    assert_equal(*nets)
    assert sorted(theirs.telemetry().names) == sorted(plain.telemetry().names)
    assert theirs.explain().startswith(plain.explain())


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("make", [lamb, adamw])
def test_schedulers_of_torch(make: Make, overlap: Overlap, recwarn: pytest.WarningsRecorder) -> None:
    """OneCycleLR writes betas, too, and a tensor as lr is written in place."""
    nets = network(), network()
    plain, other = (make(net) for net in nets)
    theirs = offloaded(nets[1], other, overlap=overlap)
    both = [[StepLR(o, 2), OneCycleLR(o, 0.2, total_steps=8)] for o in (plain, theirs)]
    for step in range(6):
        for net, optimizer, schedulers in zip(nets, (plain, theirs), both, strict=True):
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
    theirs.synchronize()
    assert_equal(*nets)
    assert [str(w.message) for w in recwarn if "before `optimizer.step()`" in str(w.message)] == []


def test_a_tensor_as_learning_rate() -> None:
    nets = network(), network()
    plain, other = (lamb(net, lr=torch.tensor(0.1)) for net in nets)
    theirs = offloaded(nets[1], other)
    for step in range(3):
        for net, optimizer in zip(nets, (plain, theirs), strict=True):
            optimizer.param_groups[0]["lr"].fill_(0.1 / (step + 1))
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(*nets)


def test_hooks_of_the_optimizer_run_once() -> None:
    net = network()
    inner, said = lamb(net), []
    inner.register_step_pre_hook(lambda *_: said.append("before"))
    optimizer = offloaded(net, inner)
    optimizer.register_step_post_hook(lambda *_: said.append("after"))
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
    assert said == ["before", "after"] * 2


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("first", [False, True], ids=["plain-first", "offloaded-first"])
@pytest.mark.parametrize("make", [lamb, adamw])
def test_checkpoints_are_those_of_the_optimizer(make: Make, first: bool, overlap: Overlap) -> None:
    """A run continues from a checkpoint of the other kind; the model is loaded first or last."""
    whole, nets = network(), (network(), network())
    reference = make(whole)
    train(whole, reference, range(6))
    optimizers = [make(net) for net in nets]
    optimizers[not first] = offloaded(nets[not first], optimizers[not first], overlap=overlap)
    train(nets[0], optimizers[0], range(3))
    saved = saved_and_loaded({"model": nets[0].state_dict(), "optimizer": optimizers[0].state_dict()})
    if first:
        nets[1].load_state_dict(saved["model"])
    optimizers[1].load_state_dict(saved["optimizer"])
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


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("make", [lamb, adamw])
def test_a_checkpoint_loaded_between_backward_and_step_keeps_the_gradients(make: Make, overlap: Overlap) -> None:
    nets = network(), network()
    plain, other = (make(net) for net in nets)
    theirs = offloaded(nets[1], other, overlap=overlap)
    for net, optimizer in zip(nets, (plain, theirs), strict=True):
        train(net, optimizer, range(2))
        saved = saved_and_loaded(optimizer.state_dict())
        train(net, optimizer, range(2, 3))
        loss_of(net, 3).backward()
        optimizer.load_state_dict(saved)
        optimizer.step()
    theirs.synchronize()
    assert_equal(*nets)


def test_an_optimizer_that_has_state_already() -> None:
    whole, net = network(), network()
    reference, inner = Came(whole.named_parameters(), lr=0.1), Came(net.named_parameters(), lr=0.1)
    train(whole, reference, range(6))
    train(net, inner, range(3))
    optimizer = offloaded(net, inner)
    assert set(optimizer.state) == set(net.parameters())
    train(net, optimizer, range(3, 6))
    assert_equal(net, whole)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("make", [lamb, adamw])
def test_distributed_checkpoints(make: Make, overlap: Overlap) -> None:
    whole, nets = network(), (network(), network())
    reference = make(whole)
    train(whole, reference, range(6))
    optimizers = [offloaded(net, make(net), overlap=overlap) for net in nets]
    train(nets[0], optimizers[0], range(3))
    saved = saved_and_loaded(dcp.get_state_dict(nets[0], optimizers[0]))
    assert saved[1]["state"].keys() == dict(nets[0].named_parameters()).keys()
    dcp.set_state_dict(nets[1], optimizers[1], model_state_dict=saved[0], optim_state_dict=saved[1])
    train(nets[1], optimizers[1], range(3, 6))
    optimizers[1].synchronize()
    assert_equal(nets[1], whole)


# ---- written weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("rounding", ["nearest", "kahan", "master"])
def test_weights_that_a_program_writes_are_taken_over(rounding: str, overlap: Overlap) -> None:
    nets = network().bfloat16(), network().bfloat16()
    plain, other = (lamb(net, weight_rounding=rounding) for net in nets)
    theirs = offloaded(nets[1], other, overlap=overlap)
    for step in range(5):
        for net, optimizer in zip(nets, (plain, theirs), strict=True):
            if step == 2:
                theirs.synchronize()
                with torch.no_grad():
                    net[0].weight.mul_(0.5)
            if step == 3:
                theirs.synchronize()
                net[3].bias.data.fill_(0.25)
                theirs.read_weights()
            if step == 4:
                theirs.synchronize()
                net[3].weight.data = net[3].weight * 0.5
            loss_of(net, step).backward()
            if step == 4:  # between backward and step
                with torch.no_grad():
                    net[5].weight.clamp_(-0.01, 0.01)
            optimizer.step()
            optimizer.zero_grad()
    theirs.synchronize()
    assert_equal(*nets)
