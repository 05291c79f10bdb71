"""Parameters, gradients and state that move, change their layout or are replaced between steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came
from tests.support.cases import Kind, serving
from tests.support.optimizer_runs import assert_bitwise, assert_same_everything, backward, model


def test_parameters_that_move_onto_each_other_are_refused(kind: Kind, backend: str) -> None:
    first, second = (Parameter(torch.randn(9, 9)) for _ in range(2))
    optimizer = kind([first, second], lr=0.1, weight_decay=0.1, backend=backend)
    first.grad, second.grad = torch.randn(9, 9), torch.randn(9, 9)
    optimizer.step()
    kept, before = second.data, copy.deepcopy((first.detach(), optimizer.state_dict()["state"]))
    second.data = first.data[:]
    with pytest.raises(ValueError, match=r"share memory: pass only one"):
        optimizer.step()
    torch.testing.assert_close((first.detach(), optimizer.state_dict()["state"]), before, rtol=0, atol=0)
    second.data = kept
    optimizer.step()


@pytest.mark.parametrize("way", ["moved", "loaded"])
@pytest.mark.parametrize("shape", [(520, 512, 1, 1), (520, 1, 23, 23), (64, 48, 10, 10)], ids=str)
def test_another_memory_format(shape: tuple[int, ...], way: str, kind: Kind, backend: str) -> None:
    """Strides of dims of size 1 differ without effect. Large tensors are processed in pieces."""
    results = []
    for name in (backend, "reference"):
        torch.manual_seed(6)
        parameter = Parameter(torch.randn(shape))
        # Came's first step is 11 times as long as Lamb's, and so is its rounding error.
        lr = 0.01 if kind is Came else 0.1
        optimizer = kind([parameter], lr=lr, weight_decay=0.1, backend=name)
        for step in range(3):
            if step == 1 and name == backend:
                state = copy.deepcopy(optimizer.state_dict())
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
                if way == "loaded":
                    optimizer = kind([parameter], lr=lr, backend=name)
                    optimizer.load_state_dict(state)
            parameter.grad = torch.randn(shape)
            optimizer.step()
        results.append((parameter.detach(), dict(optimizer.state[parameter])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_what_else_lies_in_the_state_changes_nothing(kind: Kind, backend: str) -> None:
    """The cases are tensors within and beyond the workspace, and small norms, which are computed twice."""
    runs = []
    for added in (False, True):
        torch.manual_seed(7)
        large = torch.randn((600, 512) if kind is Came else 2_200_000)
        parameters = [Parameter(large), Parameter(torch.full((8,), 1e-20)), Parameter(torch.ones(8))]
        optimizer = kind(parameters, lr=0.1, weight_decay=0.1, backend=backend)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
                if step and added and parameter is not parameters[2]:
                    state: dict[str, Any] = optimizer.state[parameter]
                    state.update(max_exp_avg_sq=torch.full_like(state["exp_avg"], 9.0), ema=torch.zeros(3), note=None)
            optimizer.step()
        runs.append((parameters, optimizer))
    assert_bitwise(runs[0][0], runs[1][0])
    assert {"ema", "note"} <= runs[1][1].state[runs[1][0][0]].keys()


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("shape", ["shorter-view", "transposed-view"])
def test_a_parameter_that_changes_shape(shape: str, stepped: bool, kind: Kind, backend: str) -> None:
    """Before the first step, its state has the new shape; after it, the step is refused."""
    parameter = Parameter(torch.randn(6, 4))
    optimizer = kind([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    if stepped:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    whole = parameter.detach()
    before = whole.clone()
    parameter.data = whole[:2] if shape == "shorter-view" else whole.t()
    parameter.grad = torch.ones_like(parameter)
    if stepped:
        with pytest.raises((ValueError, RuntimeError), match="shape"):
            optimizer.step()
        assert whole.equal(before)
    else:
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
        assert not whole[:2].equal(before[:2])
        assert shape != "shorter-view" or whole[2:].equal(before[2:]), "wrote beyond the view"
    assert optimizer.state[parameter]["step"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_module_cast_to_another_dtype_keeps_its_moments(dtype: torch.dtype, kind: Kind, backend: str) -> None:
    net = model()
    backend = serving(backend, dtype)
    optimizer = kind(net.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    backward(net)
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    net.to(dtype)
    other = copy.deepcopy(net)
    fresh = kind(other.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, moment in zip(net.parameters(), moments, strict=True):
        assert optimizer.state[p]["exp_avg"].equal(moment)
    for network, each in ((net, optimizer), (other, fresh)):
        each.zero_grad()
        backward(network, 1)
        each.step()
    assert_same_everything(list(net.parameters()), optimizer, list(other.parameters()), fresh)
    if dtype is torch.bfloat16:
        assert all(optimizer.state[p]["exp_avg"].dtype is torch.float32 for p in net.parameters())


def test_explain_says_what_makes_a_step_slower(kind: Kind, backend: str) -> None:
    plain, gaps, turned = (
        Parameter(torch.randn(9, 9)),
        Parameter(torch.randn(9, 18)[:, :9]),
        Parameter(torch.randn(9, 9)),
    )
    plain.grad, turned.grad = torch.randn(9, 9), torch.randn(9, 9).t()
    optimizer = kind([plain, gaps, turned], lr=0.1, backend=backend)
    first, second, third = optimizer.explain().splitlines()
    assert "slower" not in first
    way = "copied at each step"
    assert f"slower, {way}: its memory has gaps" in second
    assert "slower: its gradient is copied at each step" in third
    gaps.data, turned.grad = gaps.data.contiguous(), torch.empty_like(turned)
    assert "slower" not in optimizer.explain()
