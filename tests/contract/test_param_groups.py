"""The contract of torch.optim.Optimizer, on which trainers and schedulers rely: parameters, their groups and names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from bighorn import Came
from tests.support.cases import Kind, serving
from tests.support.optimizer_runs import OWN, assert_bitwise, assert_same_everything, backward, figures, model
from tests.support.tables import for_every

FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda net: net.parameters(),
    "list": lambda net: list(net.parameters()),
    "dicts": lambda net: [{"params": [p]} for p in net.parameters()],
    "dict-of-one-tensor": lambda net: [{"params": p} for p in net.parameters()],
    "named": lambda net: net.named_parameters(),
    "named-dicts": lambda net: [{"params": [pair]} for pair in net.named_parameters()],
}


@for_every("form", FORMS)
def test_params_in_every_form(form: str, kind: Kind) -> None:
    results = []
    for make in (FORMS["list"], FORMS[form]):
        net = model()
        optimizer = kind(make(net), lr=0.1, weight_decay=0.1)
        backward(net)
        optimizer.step()
        results.append(list(net.parameters()))
    assert_bitwise(*results)


def test_groups_equal_optimizers_of_their_own(kind: Kind, backend: str) -> None:
    """Options of a group override the defaults; one that joins late takes a first step, as a new optimizer."""
    together, apart = model(), model()
    one = kind([{"params": together.first.parameters(), "lr": 0.1, "weight_decay": 0.3}], lr=0.02, backend=backend)
    two = kind(apart.first.parameters(), lr=0.1, weight_decay=0.3, backend=backend)
    three = kind(apart.last.parameters(), lr=0.02, backend=backend, **OWN[kind])
    for step in range(4):
        if step == 2:
            one.add_param_group({"params": list(together.last.parameters()), **OWN[kind]})
        for net in (together, apart):
            net.zero_grad()
            backward(net, step)
        for optimizer in (one, two, three)[: 3 if step >= 2 else 2]:
            optimizer.step()
    assert_bitwise(list(together.parameters()), list(apart.parameters()))


def test_parameters_of_one_shape_step_as_each_does_alone(kind: Kind, backend: str) -> None:
    """A plan derives properties of shape, dtype and group once for all parameters that share them."""
    torch.manual_seed(7)
    drawn, gradient = torch.randn(12, 16), torch.randn(12, 16)
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float32)
    together = [Parameter(drawn.to(dtype, copy=True)) for dtype in dtypes]
    together[1] = Parameter(drawn.t().contiguous().t())  # another memory order
    backend = serving(backend, torch.float64)
    apart = copy.deepcopy(together)
    for param in (*together, *apart):
        param.grad = torch.zeros_like(param).copy_(gradient)
    own = {**OWN[kind], "state_dtype": torch.bfloat16}
    groups = [{"params": together[:-1]}, {"params": together[-1:], **own}]
    one = kind(groups, lr=0.1, weight_decay=0.1, backend=backend)
    one.step()
    for index, (mine, alone) in enumerate(zip(together, apart, strict=True)):
        other = kind([alone], lr=0.1, weight_decay=0.1, backend=backend, **(own if index == 5 else {}))
        other.step()
        assert_same_everything([mine], one, [alone], other)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("group", [{"stacked": True}, {"grad_centralization": True}], ids=str)
def test_nothing_but_an_empty_parameter(
    group: dict[str, Any], shape: tuple[int, ...], max_grad_norm: float | None, kind: Kind, backend: str
) -> None:
    parameter = Parameter(torch.zeros(shape))
    optimizer = kind([{"params": [parameter], **group}], lr=0.1, max_grad_norm=max_grad_norm, backend=backend)
    for step in range(2):
        parameter.grad = torch.zeros(shape)
        optimizer.step()
        assert optimizer.state[parameter]["step"] == step + 1
    rows = shape[0] if "stacked" in group else 1
    *_, last = figures(optimizer.telemetry()).values()
    assert last.tolist() == [1.0] * rows


def test_came_takes_learning_rates_from_its_groups() -> None:
    """The constructor once required an lr although every group had one."""
    groups: list[dict[str, Any]] = [{"params": [Parameter(torch.ones(2))], "lr": 0.1}, {"params": []}]
    optimizer = Came(groups[:1])
    optimizer.load_state_dict(optimizer.state_dict())
    for give in (lambda: optimizer.add_param_group(groups[1]), lambda: Came(groups)):
        with pytest.raises(ValueError, match=r"^lr is missing: give a learning rate"):
            give()
