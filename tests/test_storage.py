"""Parameters, gradients and state that move, change their form or are replaced between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lamb
from cases import ZOO, Case, Leaf, arranged
from contract import advance, assert_bitwise, assert_same_everything, backward, copies, model


def continues_from(optimizer: Lamb, parameter: Parameter, backend: str) -> tuple[Parameter, Lamb]:
    """A plain contiguous copy of the parameter, and an optimizer for it that has the same state but no history."""
    other = Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))
    fresh = Lamb([other], lr=0.1, weight_decay=0.1, backend=backend)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, fresh


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "other-storage": lambda data: data.clone(),
    "other-values": lambda data: data * 2,
    "transposed-view-at-the-same-address": lambda data: data.t(),
    "transposed-copy": lambda data: arranged(data, "transposed"),
    "strided-copy": lambda data: arranged(data, "strided"),
    "misaligned-copy": lambda data: arranged(data, "misaligned"),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_parameter_is_noticed(move: str, backend: str) -> None:
    torch.manual_seed(9)
    parameter = Parameter(torch.randn(9, 9))
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    for _ in range(2):
        parameter.grad = torch.randn(9, 9)
        optimizer.step()
    parameter.data = MOVES[move](parameter.data)
    other, fresh = continues_from(optimizer, parameter, backend)
    for _ in range(2):
        gradient = torch.randn(9, 9)
        parameter.grad, other.grad = gradient, gradient.clone()
        optimizer.step()
        fresh.step()
    torch.testing.assert_close(parameter.detach(), other.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["moved", "loaded"])
@pytest.mark.parametrize("shape", [(520, 512, 1, 1), (520, 1, 23, 23), (64, 48, 10, 10)], ids=str)
def test_another_memory_format(shape: tuple[int, ...], way: str, backend: str) -> None:
    """Strides of dims of size 1 say nothing, yet they differ. Tensors as large as these are worked on in pieces."""
    results = []
    for name in (backend, "reference"):
        torch.manual_seed(6)
        parameter = Parameter(torch.randn(shape))
        optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=name)
        for step in range(3):
            if step == 1 and name == backend:
                state = copy.deepcopy(optimizer.state_dict())
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
                if way == "loaded":
                    optimizer = Lamb([parameter], backend=name)
                    optimizer.load_state_dict(state)
            parameter.grad = torch.randn(shape)
            optimizer.step()
        results.append((parameter.detach(), dict(optimizer.state[parameter])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_a_parameter_that_moves_to_another_group(backend: str) -> None:
    parameters = [Parameter(torch.ones(3)) for _ in range(3)]
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "lr": 0.0}]
    optimizer = Lamb(groups, adam=True, backend=backend)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))
    optimizer.step()
    assert [float(p.detach()[0]) for p in parameters] == pytest.approx([0.0, 0.5, 1.0], abs=1e-5)


EXTRAS: dict[str, Callable[[dict[str, Any]], None]] = {
    "leftover": lambda state: state.update(max_exp_avg_sq=torch.full_like(state["exp_avg_sq"], 9.0)),
    "another-tensor": lambda state: state.update(ema=torch.zeros(3)),
    "no-tensor": lambda state: state.update(note=None),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_else_lies_in_the_state_changes_nothing(extra: str, backend: str) -> None:
    """Neither where all is kept in the scratch, nor beyond it, nor where a small norm is taken again."""
    runs = []
    for added in (False, True):
        torch.manual_seed(7)
        parameters = [Parameter(torch.randn(2_200_000)), Parameter(torch.full((8,), 1e-20)), Parameter(torch.ones(8))]
        optimizer = Lamb(parameters, lr=0.1, weight_decay=0.1, backend=backend)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
                if step and added and parameter is not parameters[2]:
                    EXTRAS[extra](optimizer.state[parameter])
            optimizer.step()
        runs.append((parameters, optimizer))
    assert_bitwise(runs[0][0], runs[1][0])
    if extra != "leftover":
        assert len(runs[1][1].state[runs[1][0][0]]) == len(runs[0][1].state[runs[0][0][0]]) + 1


@pytest.mark.parametrize(
    ("before", "after"), [("amsgrad", "adam"), ("amsgrad", "adagrad"), ("adam", "amsgrad"), ("adagrad", "adam")]
)
def test_another_second_moment_from_now_on(before: str, after: str, backend: str) -> None:
    """The state of before is gone on with, as far as it is of use; some parameters have none yet."""
    case = Case("switched", {}, (*ZOO, Leaf("later", (6, 4), grad="late")))
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend, second_moment=before)
    advance(case, parameters, optimizer, range(1))
    others = copies(parameters)
    state = copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        each.pop("max_exp_avg_sq", None)
        if after == "amsgrad":
            each["max_exp_avg_sq"] = each["exp_avg_sq"].clone()
    state["param_groups"][0]["second_moment"] = after
    other = case.optimizer(others, backend, second_moment=after)
    other.load_state_dict(state)
    optimizer.param_groups[0]["second_moment"] = after
    advance(case, parameters, optimizer, range(1, 3))
    advance(case, others, other, range(1, 3))
    assert_bitwise(parameters, others)


@pytest.mark.parametrize("shape", ["shorter-view", "transposed-view"])
def test_a_parameter_that_changed_shape_before_its_first_step(shape: str, backend: str) -> None:
    parameter = Parameter(torch.randn(6, 4))
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    whole = parameter.detach()
    before = whole.clone()
    parameter.data = whole[:2] if shape == "shorter-view" else whole.t()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    if shape == "shorter-view":
        assert whole[2:].equal(before[2:]), "wrote beyond the view"
    assert not whole[:2].equal(before[:2])


@pytest.mark.parametrize("shape", ["shorter-view", "transposed-view"])
def test_a_parameter_that_changed_shape_after_a_step_is_refused(shape: str, backend: str) -> None:
    parameter = Parameter(torch.randn(6, 4))
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    whole = parameter.detach()
    before = whole.clone()
    parameter.data = whole[:2] if shape == "shorter-view" else whole.t()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        optimizer.step()
    assert whole.equal(before)
    assert optimizer.state[parameter]["step"] == 1


def test_a_module_cast_to_bfloat16_keeps_its_float32_moments(backend: str) -> None:
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    backward(net)
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    net.to(torch.bfloat16)
    other = copy.deepcopy(net)
    fresh = Lamb(other.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, moment in zip(net.parameters(), moments, strict=True):
        assert optimizer.state[p]["exp_avg"].equal(moment)
    for network, each in ((net, optimizer), (other, fresh)):
        each.zero_grad()
        backward(network, 1)
        each.step()
    assert_same_everything(list(net.parameters()), optimizer, list(other.parameters()), fresh)
    assert all(optimizer.state[p]["exp_avg"].dtype is torch.float32 for p in net.parameters())


@pytest.mark.parametrize("name", ["auto", "foreach", "reference"])
def test_a_module_cast_to_float64(name: str) -> None:
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.1, weight_decay=0.1, backend=name)
    backward(net)
    optimizer.step()
    net.double()
    single = copy.deepcopy(net).float()
    other = Lamb(single.parameters(), lr=0.1, weight_decay=0.1, backend="reference")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, each in ((net, optimizer), (single, other)):
        each.zero_grad()
        backward(network, 1)
        each.step()
    for a, b in zip(net.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-4, atol=1e-6)
        assert optimizer.state[a]["step"] == 2


def test_state_replaced_by_the_caller_is_noticed(backend: str) -> None:
    parameter = Parameter(torch.ones(50))
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    parameter.grad = torch.linspace(-1, 1, 50)
    optimizer.step()
    optimizer.state[parameter]["exp_avg"] = torch.linspace(2, 3, 50)
    optimizer.state[parameter]["exp_avg_sq"] = torch.linspace(4, 5, 50)
    other, fresh = continues_from(optimizer, parameter, backend)
    other.grad = torch.linspace(-1, 1, 50)
    optimizer.step()
    fresh.step()
    assert_same_everything([parameter], optimizer, [other], fresh)


def test_a_parameter_taken_out_of_its_group_stays(backend: str) -> None:
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.1, backend=backend)
    backward(net)
    optimizer.step()
    taken = optimizer.param_groups[0]["params"].pop(0)
    before = taken.detach().clone()
    optimizer.step()
    assert taken.equal(before)
    optimizer.param_groups[0]["params"] = [taken]
    rest = net.last.weight.detach().clone()
    optimizer.step()
    assert not taken.equal(before)
    assert net.last.weight.equal(rest)
