"""CAME of matrices that are transposed in memory: kernels step the transpose, with the same results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came
from tests.support.case_tensors import arranged
from tests.support.cases import serving

pytestmark = pytest.mark.long

Turn = Callable[[Tensor], Tensor]

OPTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "matrix": ((40, 24), {}),
    "wide": ((3, 70), {"factor": "linear", "bias_correction": True}),
    "long-rows": ((70, 17_000), {"betas": (0.8, 0.9, 0.99)}),
    "last-two": ((3, 40, 24), {"factor": "last_two", "scale_parameter": True}),
    "small": ((2, 5, 3, 4), {"factor": "last_two", "decay_rate": 0.8}),
    "stacked": ((3, 40, 24), {"stacked": True, "clip_threshold": 0.5}),
    "bfloat16": ((40, 24), {"dtype": torch.bfloat16, "weight_rounding": "master", "state_dtype": "bfloat16"}),
    "kahan": ((40, 24), {"dtype": torch.bfloat16, "weight_rounding": "kahan"}),
    "float64": ((40, 24), {"dtype": torch.float64, "maximize": True}),
}
"""Shapes, and options with which kernels step the transpose."""

IN_ORDER: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "stochastic": ((40, 24), {"dtype": torch.bfloat16, "weight_rounding": "stochastic"}),
    "int8": ((40, 300), {"state_dtype": "int8"}),
    "centred": ((40, 24), {"grad_centralization": True}),
    "centred-float64": ((40, 24), {"grad_centralization": True, "dtype": torch.float64}),
}
"""Shapes, and options that depend on rows or on the order of elements, so kernels step the matrix itself."""


def turned(values: Tensor) -> Tensor:
    """Return a copy whose matrices are transposed in memory."""
    return contiguous(values.mT).mT


def contiguous(values: Tensor) -> Tensor:
    return arranged(values, "plain")


def optimizer_of(name: str, layout: Turn, backend: str) -> tuple[Came, list[Parameter]]:
    """Return an optimizer of a matrix in a layout and of a contiguous one, and both matrices."""
    shape, given = {**OPTIONS, **IN_ORDER}[name]
    options = dict(given)
    dtype = options.pop("dtype", torch.float32)
    own: dict[str, Any] = {key: options.pop(key) for key in ("stacked", "grad_centralization") if key in options}
    generator = torch.Generator().manual_seed(1)
    first, second = (Parameter(torch.randn(shape, generator=generator).to(dtype)) for _ in range(2))
    first.data = layout(first.data)
    groups: list[dict[str, Any]] = [{"params": [first, second], **own}]
    backend = serving(backend, dtype)
    return Came(groups, lr=0.01, weight_decay=0.1, backend=backend, **options), [first, second]


def advance(optimizer: Came, params: list[Parameter], steps: range) -> None:
    """Step with gradients of both layouts in turn, some of them missing, and with parameters that move."""
    for step in steps:
        for i, param in enumerate(params):
            drawn = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + i)).to(param.dtype)
            param.grad = None if step == 2 + i else (contiguous, turned)[step % 2](drawn)
            param.data = param.data.clone() if step > 3 else param.data
        optimizer.step()


def assert_same(optimizers: tuple[Came, Came], params: list[tuple[Parameter, Parameter]], ulps: int) -> None:
    """Assert that two optimizers have the same parameters and state, to `ulps` of each tensor's largest element.

    16-bit floats must be neighbours.
    """
    for pair in params:
        first, second = (
            dict(each.state[param], x=param.detach()) for each, param in zip(optimizers, pair, strict=True)
        )
        assert first.keys() == second.keys()
        for name in first.keys() - {"compensation"}:  # a part of x
            assert first[name].shape == second[name].shape
            tolerance = 0.0
            if first[name].is_floating_point():
                info = torch.finfo(first[name].dtype)
                most = min(ulps, 1) if info.bits == 16 else ulps
                tolerance = info.eps * most * float(second[name].abs().max())
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("name", [*OPTIONS, *IN_ORDER])
@pytest.mark.parametrize("layouts", [(turned, contiguous), (contiguous, turned)], ids=["to", "from"])
def test_a_checkpoint_continues_alike_in_the_other_layout(name: str, layouts: tuple[Turn, Turn], backend: str) -> None:
    optimizer, params = optimizer_of(name, layouts[0], backend)
    advance(optimizer, params, range(4))
    other, others = optimizer_of(name, layouts[1], backend)
    for param, same in zip(params, others, strict=True):
        same.data.copy_(param.data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((optimizer, params), (other, others)):
        advance(each, its, range(4, 6))
        first, second = (each.state[param]["exp_avg"].stride() for param in its)
        assert first == (its[0].stride() if name in OPTIONS else second)
    assert_same((optimizer, other), list(zip(params, others, strict=True)), 0 if name in IN_ORDER else 16)


def test_no_matrix_is_slower_for_being_transposed(backend: str) -> None:
    param = Parameter(turned(torch.randn(40, 24)))
    optimizer = Came([param], lr=0.01, backend=backend)
    param.grad = torch.empty_like(param)
    assert "slower" not in optimizer.explain()
    param.grad = contiguous(param.grad)
    assert "slower: its gradient is copied at each step" in optimizer.explain()
