"""`grad_centralization` on every backend equals a step with gradients that were centred before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lamb
from tests.support.cases import Kind, set_gradients

SHAPES = (600, 9), (40, 33), (5, 6, 7), (3, 5000), (2, 70_100), (4, 3, 3, 3), (0, 3), (3, 0)
"""Rows that are short, long, in two dims and more, and empty."""


def centred(grad: Tensor, stacked: bool, least: int) -> Tensor:
    """Return a gradient without the means of its rows, in float64, from a loop over the rows."""
    grad = grad.double().clone(memory_format=torch.contiguous_format)
    slices = list(grad) if stacked else [grad]
    for each in slices:
        for row in each if each.dim() >= least else ():
            row -= row.sum() / max(row.numel(), 1)
    return grad


def gradients(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    grads = [torch.randn(shape) + torch.linspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1)) for shape in SHAPES]
    grads[1] = grads[1].t().contiguous().t()
    grads[5] = grads[5].to(memory_format=torch.channels_last)
    return [grad.to(dtype) for grad in grads]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 5.0}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("centralization", [True, "conv"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_equals_that_of_gradients_centred_before(
    kind: Kind, backend: str, dtype: torch.dtype, stacked: bool, centralization: Any, options: dict[str, Any]
) -> None:
    """Clipping uses the norm of the gradients before they are centred."""
    torch.manual_seed(2)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    exact = [Parameter(p.detach().double()) for p in params]
    group = {"params": params, "stacked": stacked, "grad_centralization": centralization}
    optimizer = kind([group], lr=0.01, weight_decay=0.1, backend=backend, **options)
    true = kind(
        [{"params": exact, "stacked": stacked}],
        lr=0.01,
        weight_decay=0.1,
        backend="reference",
        **{name: value for name, value in options.items() if name != "max_grad_norm"},
    )
    for _ in range(2):
        grads = gradients(dtype)
        norm = torch.cat([grad.double().flatten() for grad in grads]).norm()
        scale = min(1.0, options.get("max_grad_norm", float("inf")) / norm)
        set_gradients(params, grads)
        set_gradients(exact, [scale * centred(g, stacked, 3 if centralization == "conv" else 2) for g in grads])
        optimizer.step()
        true.step()
    # LAMB's first step divides a centred gradient of about 0 by about its own size.
    close = 2e-5 if dtype == torch.float32 else 2**-6
    for shape, p, q in zip(SHAPES, params, exact, strict=True):
        apart = (p.double() - q.detach()).abs() > close * (q.detach().abs() + 0.1)
        assert apart.sum() <= 1e-4 * apart.numel(), shape
    assert all(grad.equal(p.grad) for grad, p in zip(grads, params, strict=True) if p.grad is not None)


def test_a_row_of_equal_elements_leaves_the_moments(backend: str) -> None:
    param = Parameter(torch.ones(4, 9))
    optimizer = Lamb([{"params": [param], "grad_centralization": True}], lr=0.1, weight_decay=0.0, backend=backend)
    set_gradients([param], [torch.linspace(0.25, 1, 4)[:, None].expand(4, 9)])
    optimizer.step()
    assert not optimizer.state[param]["exp_avg"].any()
    assert param.equal(torch.ones(4, 9))


def test_the_memory_format_changes_no_bit_of_a_centred_gradient(backend: str) -> None:
    moments = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        param = Parameter(torch.ones(6, 40, 5, 5).to(memory_format=memory_format))
        param.grad = torch.randn(6, 40, 5, 5, generator=torch.Generator().manual_seed(2))
        optimizer = Lamb([{"params": [param], "grad_centralization": True}], lr=0.1, backend=backend)
        optimizer.step()
        moments.append(optimizer.state[param]["exp_avg"])
    assert moments[0].equal(moments[1])
