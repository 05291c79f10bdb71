"""Float32 masters of 16-bit weights equal `weight_rounding="master"`, with every overlap and in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.cases import Kind, needs_grad_dtype
from tests.support.offloading import OVERLAPS, Overlap, loss_of, network, offloaded, train
from tests.support.optimizer_runs import assert_bitwise, saved_and_loaded

LOW = (torch.bfloat16, torch.float16)


def make(kind: Kind, net: nn.Module, **options: Any) -> Any:
    return kind(net.named_parameters(), lr=0.003, weight_decay=0.1, **options)


@needs_grad_dtype
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_they_are_the_optimizers_own(kind: Kind, overlap: Overlap, dtype: torch.dtype) -> None:
    nets = network().to(dtype), network().to(dtype)
    plain = make(kind, nets[0], weight_rounding="master")
    theirs = offloaded(nets[1], make(kind, nets[1]), overlap=overlap, masters=True)
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


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_those_of_an_optimizer_of_torch(overlap: Overlap) -> None:
    """A float32 twin is stepped with the same gradients."""
    net, twin = network().bfloat16(), network().bfloat16().float()
    theirs = offloaded(net, torch.optim.AdamW(net.parameters(), lr=0.003), overlap=overlap, masters=True)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.003)
    for step in range(5):
        grads = torch.autograd.grad(loss_of(net, step), list(net.parameters()))
        for param, its, grad in zip(net.parameters(), twin.parameters(), grads, strict=True):
            param.grad, its.grad = grad.clone(), grad.float()
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


def test_weights_of_other_dtypes_need_none() -> None:
    nets = network(), network()
    plain, other = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
    theirs = offloaded(nets[1], other, masters=True)
    for net, optimizer in zip(nets, (plain, theirs), strict=True):
        train(net, optimizer, range(3))
    assert_bitwise(list(nets[1].parameters()), list(nets[0].parameters()))


def test_refusals(kind: Kind) -> None:
    net = network().bfloat16()
    with pytest.raises(TypeError, match="masters must be True or False, not 'float32'"):
        offloaded(net, make(kind, net), masters="float32")
    with pytest.raises(ValueError, match="both say how 16-bit weights are kept: leave weight_rounding out"):
        offloaded(net, make(kind, net, weight_rounding="kahan"), masters=True)
    optimizer = make(kind, net)
    train(net, optimizer, range(1))
    with pytest.raises(ValueError, match="is for an optimizer without state"):
        offloaded(net, optimizer, masters=True)
