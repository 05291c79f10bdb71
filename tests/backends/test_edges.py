"""At the ends of float32's range every backend does what the reference does, and keeps what float32 can keep."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn._kernels.triton.device import interpreted
from tests.support.cases import Kind, leaves_out
from tests.support.optimizer_runs import figures
from tests.support.tables import for_every

SIZES = (1.0, 0.0, 1.2e-38, 1e20, 3e38, math.inf)
"""1.2e-38 is about float32's least normal number; the square of 1e20 overflows."""

OPTIONS: list[tuple[Kind, dict[str, Any]]] = [
    (Lamb, {}),
    (Lamb, {"eps": 0.0, "weight_decay": 0.0}),
    (Lamb, {"decay_mode": "l2"}),
    (Lamb, {"decay_mode": "decoupled", "bias_correction": "lr"}),
    (Lamb, {"adam": True}),
    (Lamb, {"cautious": True}),
    (Lamb, {"second_moment": "amsgrad"}),
    (Lamb, {"second_moment": "adagrad"}),
    (Lamb, {"max_grad_norm": 1.0}),
    (Lamb, {"skip_nonfinite": True, "max_grad_norm": 1.0}),
    (Came, {}),
    (Came, {"decay_rate": 0.8, "bias_correction": True}),
    (Came, {"scale_parameter": True}),
    (Came, {"cautious": True}),
    (Came, {"max_grad_norm": 1.0}),
    (Lars, {}),
    (Lars, {"denominator": "joint", "nesterov": True}),
    (Lars, {"denominator": "joint", "weight_decay": 0.0}),
    (Lars, {"trust_clip": True, "lr_in_momentum": False}),
    (Lars, {"max_grad_norm": 1.0}),
]


def stepped(
    kind: Kind, options: dict[str, Any], backend: str, x: Tensor, g: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameter and its state after two steps, and the metrics of the last."""
    param = Parameter(x.to(dtype, copy=True))
    optimizer = kind([param], **{"lr": 0.1, "weight_decay": 0.1, "backend": backend, **options})
    for _ in range(2):
        param.grad = g.to(dtype)
        optimizer.step()
    return {"x": param.detach(), **optimizer.state.get(param, {})}, figures(optimizer.telemetry())


def with_one(size: float, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random numbers, the fourth of which is another one."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values.view(-1)[3] = size
    return values


@for_every(("kind", "options"), OPTIONS)
def test_one_element_at_the_end_of_the_range(kind: Kind, options: dict[str, Any], backend: str) -> None:
    """NaN and infinity count as one: a weight or a moment is lost with either."""
    if backend == "reference" or leaves_out(backend, options):
        return
    sizes = ((1e20, 1e20), (1.2e-38, math.inf)) if interpreted() else itertools.product(SIZES, SIZES)
    for weight, gradient in sizes:
        for shape in ((64,), (8, 8))[: 2 if kind is Came else 1]:
            x, g = with_one(weight, shape, 1), with_one(gradient, shape, 2)
            (ours, _), (exact, _) = (stepped(kind, options, name, x, g) for name in (backend, "reference"))
            for name, value in exact.items():
                where = f"{name} of shape {shape} with a weight of {weight} and a gradient of {gradient}"
                finite = value.isfinite()
                assert ours[name].isfinite().equal(finite), where
                mine, true = ours[name][finite].double(), value[finite].double()
                assert ((mine - true).abs() <= 1e-4 * true.abs() + 1e-6).all(), where


RIGHT: dict[str, tuple[Kind, float, dict[str, Any]]] = {
    "the square of a gradient overflows, not a thousandth of it": (Lamb, 1e20, {}),
    "the same without adaptation": (Lamb, 1e20, {"adam": True}),
    "a factor makes huge gradients small": (Came, 1e38, {"max_grad_norm": 1.0}),
    "the product of momentum and gradient vanishes": (Lamb, 1e-25, {"cautious": True, "eps": 1.0, "weight_decay": 0.0}),
    "the same in CAME": (Came, 1e-25, {"cautious": True, "eps": (1e-6, 1e-16), "lr": 1e21, "weight_decay": 0.0}),
}


@for_every(("kind", "size", "options"), RIGHT.values(), ids=RIGHT)
def test_gradients_far_from_1_give_the_steps_of_float64(
    kind: Kind, size: float, options: dict[str, Any], backend: str
) -> None:
    if leaves_out(backend, options):
        return
    x, g = torch.randn(64), size * torch.randn(64)
    ours, measured = stepped(kind, options, backend, x, g)
    exact, truth = stepped(kind, options, "reference", x, g, torch.float64)
    torch.testing.assert_close(ours["x"].double(), exact["x"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(measured, truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("denominator", ["sum", "joint"])
def test_a_weight_that_is_not_finite_stays_out_of_the_momentum_of_lars(denominator: Any, backend: str) -> None:
    """With decay in the gradient, only the momentum of the weight becomes NaN."""
    x, g = torch.linspace(-1, 1, 64 * 24).view(64, 24), torch.linspace(2, 3, 64 * 24).view(64, 24)
    x[3, 4], x[7, 5] = math.nan, math.inf
    for weight_decay, bad in ((0.0, 0), (0.1, 2)):
        param = Parameter(x.clone())
        param.grad = g.clone()
        group = {"params": [param], "adapt": False}
        optimizer = Lars([group], lr=0.1, weight_decay=weight_decay, denominator=denominator, backend=backend)
        optimizer.step()
        assert int((~optimizer.state[param]["exp_avg"].isfinite()).sum()) == bad
        assert int((~param.isfinite()).sum()) == 2
