"""Events between two steps, with each kind of storage: an optimizer continues like a new one with its state.

A plan that misses an event would read old memory, values or options.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lars
from tests.support.case_tensors import Layout, arranged
from tests.support.cases import Kind, Optimizer, serving
from tests.support.optimizer_runs import assert_same_everything

pytestmark = pytest.mark.long

SHAPES = ((6, 5, 3, 3), (24, 24), (24, 24), (17,))


Arrange = Callable[[list[Tensor]], list[Tensor]]


def laid_out(layout: Layout) -> Arrange:
    return lambda tensors: [arranged(tensor, layout) for tensor in tensors]


def in_one_buffer(tensors: list[Tensor]) -> list[Tensor]:
    parts = torch.split(torch.cat([tensor.flatten() for tensor in tensors]), [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


APART, TRANSPOSED, GAPS = laid_out("plain"), laid_out("transposed"), laid_out("strided")


class Storage(NamedTuple):
    """How parameters lie in memory, their dtype, and options of the optimizer and of its first group."""

    arrange: Arrange = APART
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = {}  # noqa: RUF012
    of_group: dict[str, Any] = {}  # noqa: RUF012


STORAGES = {
    "plain": Storage(),
    "buffer": Storage(in_one_buffer),
    "transposed": Storage(TRANSPOSED),
    "gaps": Storage(GAPS),
    "float64": Storage(dtype=torch.float64),
    "complex": Storage(dtype=torch.complex64),
    "stacked": Storage(of_group={"stacked": True}),
    "centred": Storage(TRANSPOSED, of_group={"grad_centralization": True}),
    "int8": Storage(options={"state_dtype": "int8", "min_8bit_size": 0}),
    "int4": Storage(options={"state_dtype": "int4", "min_8bit_size": 0}),
    "master": Storage(APART, torch.bfloat16, {"weight_rounding": "master"}),
    "kahan": Storage(in_one_buffer, torch.bfloat16, {"weight_rounding": "kahan", "state_dtype": "bfloat16"}),
    "stochastic": Storage(TRANSPOSED, torch.bfloat16, {"weight_rounding": "stochastic"}),
}


Event = Callable[[Optimizer, list[Parameter]], None]


def moves(arrange: Arrange) -> Event:
    def event(_: Optimizer, params: list[Parameter]) -> None:
        for param, values in zip(params, arrange([param.data for param in params]), strict=True):
            param.data = values

    return event


def turned_in_place(_: Optimizer, params: list[Parameter]) -> None:
    params[1].data = params[1].data.t()


def changed(_: Optimizer, params: list[Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(2)


def exchanged(_: Optimizer, params: list[Parameter]) -> None:
    others = [Parameter(param.detach().clone()) for param in params]
    for param, other in zip(params, others, strict=True):
        torch.utils.swap_tensors(param, other)  # type: ignore[no-untyped-call]


def shared(_: Optimizer, params: list[Parameter]) -> None:
    for param in params:
        param.share_memory_()  # type: ignore[no-untyped-call]


def replaced_state(optimizer: Optimizer, params: list[Parameter]) -> None:
    for param in params:
        optimizer.state[param].update({name: value.clone() for name, value in optimizer.state[param].items()})


def changed_state(optimizer: Optimizer, params: list[Parameter]) -> None:
    for param in params:
        optimizer.state[param]["step"].add_(3)


def exchanged_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    """A user swaps two layers; a plan once kept the old pairs, since the states are in the same order."""
    states = [optimizer.state.pop(param) for param in params]
    optimizer.state.update(zip([params[0], params[2], params[1], *params[3:]], states, strict=True))


def loaded(optimizer: Optimizer, _: list[Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def another_option(optimizer: Optimizer, _: list[Parameter]) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.3


def a_rate_in_a_tensor(optimizer: Optimizer, _: list[Parameter]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.02)


def another_group(optimizer: Optimizer, _: list[Parameter]) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def another_place(optimizer: Optimizer, _: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def taken_out(optimizer: Optimizer, params: list[Parameter]) -> None:
    gone = optimizer.param_groups[0]["params"].pop()
    optimizer.state.pop(gone)
    params[:] = [param for param in params if param is not gone]


def frozen(_: Optimizer, params: list[Parameter]) -> None:
    params[1].requires_grad_(False)


EVENTS: dict[str, Event] = {
    "moved": moves(APART),
    "moved into one buffer": moves(in_one_buffer),
    "moved and transposed": moves(TRANSPOSED),
    "moved apart": moves(GAPS),
    "moved by one element": moves(laid_out("misaligned")),
    **{
        event.__name__.replace("_", " "): event
        for event in (
            *(turned_in_place, changed, exchanged, shared, replaced_state, changed_state, exchanged_states, loaded),
            *(another_option, a_rate_in_a_tensor, another_group, another_place, taken_out, frozen),
        )
    },
}


def step(optimizer: Optimizer, params: list[Parameter], number: int) -> None:
    """Step with gradients in new memory; in step 1, one is missing."""
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, dtype=param.dtype, generator=torch.Generator().manual_seed(10 * number + i))
        param.grad = grad if param.requires_grad and (number, i) != (1, 0) else None
    optimizer.step()


def twin(param: Parameter) -> Parameter:
    """Return a parameter of the same values and strides in other memory."""
    values = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
    return Parameter(values.copy_(param.detach()), requires_grad=param.requires_grad)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("event", EVENTS)
def test_an_event(event: str, storage: str, kind: Kind, backend: str) -> None:
    arrange, dtype, options, of_group = STORAGES[storage]
    if kind is Lars and backend == "cpu" and "state_dtype" in options:
        pytest.skip("the C library keeps no momentum of LARS in blocks")
    if (event, storage) == ("another group", "stacked"):
        pytest.skip("CAME's state of a stacked parameter has the shapes of its slices")
    torch.manual_seed(3)
    params = [Parameter(values) for values in arrange([torch.randn(shape, dtype=dtype) for shape in SHAPES])]
    groups: list[dict[str, Any]] = [{"params": params[:3], "weight_decay": 0.1, **of_group}, {"params": params[3:]}]
    options = {"lr": 0.01, "backend": serving(backend, dtype), **options}
    optimizer = kind(groups, **options)
    for number in range(3):
        step(optimizer, params, number)
    EVENTS[event](optimizer, params)
    twins = {param: twin(param) for param in params}
    own = [{**group, "params": [twins[param] for param in group["params"]]} for group in optimizer.param_groups]
    fresh = kind(own, **options)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3, 5):
        step(optimizer, params, number)
        step(fresh, list(twins.values()), number)
    assert_same_everything(params, optimizer, list(twins.values()), fresh)


def test_a_square_matrix_turned_in_place(kind: Kind, backend: str) -> None:
    """Its address and shape stay, and few of the cases above notice: `make test` may leave all of them out."""
    test_an_event("turned in place", "plain", kind, backend)
