"""Float32 masters of 16-bit weights equal `weight_rounding="master"`, also in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.cases import Kind, needs_grad_dtype
from tests.support.offloading import Twins, loss_of, network, offloaded, train
from tests.support.optimizer_runs import assert_bitwise, saved_and_loaded

LOW = (torch.bfloat16, torch.float16)


def make(kind: Kind, net: nn.Module, **options: Any) -> Any:
    return kind(net.named_parameters(), lr=0.003, weight_decay=0.1, **options)


@needs_grad_dtype
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_they_are_the_optimizers_own(kind: Kind, dtype: torch.dtype) -> None:
    nets = network().to(dtype), network().to(dtype)
    plain = make(kind, nets[0], weight_rounding="master")
    theirs = offloaded(nets[1], make(kind, nets[1]), masters=True)
    for step in range(6):
        for net, optimizer in zip(nets, (plain, theirs), strict=True):
            if step == 3:
                theirs.synchronize()
                with torch.no_grad():
                    net[3].weight[:, :10].mul_(0.5)
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    theirs.synchronize()
    assert_bitwise(list(nets[1].parameters()), list(nets[0].parameters()))
    ours, its = theirs.state_dict(), plain.state_dict()
    assert ours["state"].keys() == its["state"].keys()
    for number, state in its["state"].items():
        assert ours["state"][number].keys() == state.keys()
        assert_bitwise([ours["state"][number][name] for name in state], list(state.values()))


@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_those_of_an_optimizer_of_torch(max_grad_norm: float | None) -> None:
    """A float32 twin is stepped with the same gradients."""
    net, twin = network().bfloat16(), network().bfloat16().float()
    inner = torch.optim.AdamW(net.parameters(), lr=0.003)
    theirs = offloaded(net, inner, masters=True, max_grad_norm=max_grad_norm)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.003)
    for step in range(5):
        grads = torch.autograd.grad(loss_of(net, step), list(net.parameters()))
        for param, its, grad in zip(net.parameters(), twin.parameters(), grads, strict=True):
            param.grad, its.grad = grad.clone(), grad.float()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), max_grad_norm)
        for optimizer in (theirs, plain):
            optimizer.step()
            optimizer.zero_grad()
        theirs.synchronize()
    masters = [state["master"] for _, state in sorted(theirs.state_dict()["state"].items())]
    assert_bitwise(masters, list(twin.parameters()))
    assert_bitwise(list(net.parameters()), [param.bfloat16() for param in twin.parameters()])


@pytest.mark.parametrize("model_first", [False, True])
def test_checkpoints(kind: Kind, model_first: bool) -> None:
    whole, nets = network().bfloat16(), (network().bfloat16(), network().bfloat16())
    train(whole, offloaded(whole, make(kind, whole), masters=True), range(6))
    optimizers = [offloaded(net, make(kind, net), masters=True) for net in nets]
    train(nets[0], optimizers[0], range(3))
    model, optimizer = saved_and_loaded((nets[0].state_dict(), optimizers[0].state_dict()))
    if model_first:
        nets[1].load_state_dict(model)
    optimizers[1].load_state_dict(optimizer)
    if not model_first:
        nets[1].load_state_dict(model)
    train(nets[1], optimizers[1], range(3, 6))
    assert_bitwise(list(nets[1].parameters()), list(whole.parameters()))


def test_masters_follow_the_names(kind: Kind) -> None:
    """They once were loaded by position: other sizes were an error, and equal ones lost their low bits."""
    nets = network().bfloat16(), network().bfloat16()
    optimizers = []
    for net, turns in zip(nets, (False, True), strict=True):
        named = [*net.named_parameters()]
        optimizers.append(offloaded(net, kind(named[::-1] if turns else named, lr=0.1), masters=True))
    train(nets[0], optimizers[0], range(3))
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    masters = [[state["master"] for _, state in sorted(each.state_dict()["state"].items())] for each in optimizers]
    assert_bitwise(masters[0], masters[1][::-1])
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, range(3, 6))
    assert_bitwise(list(nets[1].parameters()), list(nets[0].parameters()))
    assert not any("loaded_master" in state for state in optimizers[1].optimizer.state.values())


def test_weights_of_other_dtypes_need_none() -> None:
    twins = Twins(lambda net: torch.optim.SGD(net.parameters(), lr=0.1), masters=True)
    twins.train(range(3))
    twins.assert_equal()
