"""Helpers of the tests of the loss scaler: steps with known gradients, and every kind of optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from bighorn import Came, Lamb, LossScaler

G, B = False, True  # a good step, a bad step


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def train_on(scaler: torch.amp.GradScaler, optimizer: Optimizer, param: Tensor, overflow: bool, factor: float) -> None:
    """Take one step with a gradient of `factor` in each element, before scaling."""
    optimizer.zero_grad()
    backward(scaler.scale((param * factor).sum()))
    if overflow:
        assert param.grad is not None
        param.grad.view(-1)[1] = torch.inf
    scaler.step(optimizer)
    scaler.update()


def scales_of(scaler: LossScaler, steps: list[bool]) -> list[float]:
    param = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scales = []
    for overflow in steps:
        train_on(scaler, optimizer, param, overflow, 1.0)
        scales.append(scaler.get_scale())
    return scales


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Lamb": lambda params: Lamb(params, lr=0.1, weight_decay=0.1),
    "Came": lambda params: Came(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}

optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)

ROUGH = [step in (1, 4, 5) for step in range(12)]
