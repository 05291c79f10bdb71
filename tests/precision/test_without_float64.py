"""Devices that have no float64, as Apple's GPUs: the backends in plain torch add up in float32 there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn.kernels import arithmetic
from bighorn.kernels.foreach import came as foreach_came
from bighorn.kernels.foreach import lamb as foreach_lamb
from bighorn.kernels.foreach import pieces
from bighorn.kernels.reference import stepper
from tests.support.cases import Kind


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lamb, {}),
        (Lamb, {"adam": True, "betas": (0.9, 0.9999)}),
        (Came, {}),
        (Came, {"bias_correction": True}),
        (Came, {"decay_rate": 0.8}),
        (Lars, {"trust_coefficient": 1.0, "denominator": "joint", "nesterov": True}),
    ],
    ids=str,
    indirect=["kind"],
)
def test_sums_and_powers_in_float32(kind: Kind, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """1 - beta is computed in Python; as a difference of tensors it put foreach 8.8e-6 off after three steps."""

    def trained(backend: str) -> Tensor:
        param = Parameter(torch.linspace(-1, 1, 40 * 30).view(40, 30))
        optimizer = kind([param], lr=0.01, backend=backend, **options)
        for step in range(3):
            param.grad = torch.linspace(-2, 3, 40 * 30).view(30, 40).t().mul(step + 1).sin()
            optimizer.step()
        return param.detach().double()

    exact = trained("reference")
    for module in (arithmetic, foreach_came, foreach_lamb, pieces, stepper):
        monkeypatch.setattr(module, "wide", lambda _: torch.float32)
    for backend in ("foreach", "reference"):
        assert (trained(backend) - exact).norm() / exact.norm() < 1e-7
