"""After repeated overflows the loss scaler stops the run and names the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from bighorn import LossScaler
from tests.support.loss_scaling import B, G, backward, optimizers, scales_of


@pytest.mark.parametrize("limit", [1, 3])
@optimizers
def test_too_many_overflows_in_a_row(make: Callable[..., Optimizer], limit: int) -> None:
    """The next step raises, names the parameters, and changes nothing. A good step resets the count."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = make(model.named_parameters())
    scaler = LossScaler(max_consecutive_overflows=limit)

    def step(bad: tuple[str, ...]) -> None:
        optimizer.zero_grad()
        backward(scaler.scale(model(torch.ones(4, 2)).sum()))
        for name in bad:
            grad = model.get_parameter(name).grad
            assert grad is not None
            grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()

    for bad in [("0.bias",)] * (limit - 1) + [(), ("1.weight",)] * (limit > 1) + [("0.weight", "1.bias")] * (limit - 1):
        step(bad)
    if limit == 1:
        step(("0.weight", "1.bias"))
    before = [param.detach().clone() for param in model.parameters()]
    calls: list[Callable[[], None]] = [lambda: step(()), lambda: scaler.unscale_(optimizer)]
    for call in calls:
        state = scaler.state_dict()
        with pytest.raises(
            FloatingPointError, match=rf"(?s)^{limit} steps.*scale is .*gradients of 0\.weight, 1\.bias\. "
        ):
            call()
        assert scaler.state_dict() == state
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        assert grad.abs().max() > 50  # still scaled
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))

    scaler.update(2.0)  # a new scale resets the count
    step(())
    assert scaler.get_scale() == 2.0


def test_many_overflowed_parameters_are_counted() -> None:
    params = [Parameter(torch.ones(1)) for _ in range(9)]
    optimizer = torch.optim.SGD(params)
    scaler = LossScaler(max_consecutive_overflows=1)
    backward(scaler.scale(torch.stack(list(params)).sum() * torch.inf))
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(FloatingPointError, match=r"\.params\[4\] and 4 more\. "):
        scaler.step(optimizer)


def test_overflows_of_a_checkpoint_count() -> None:
    """The policy continues after overflows of a checkpoint, and they alone do not stop the run."""
    scaler = LossScaler(max_consecutive_overflows=3)
    assert len(scales_of(scaler, [B, B, B])) == 3
    again = LossScaler(max_consecutive_overflows=3)
    again.load_state_dict(scaler.state_dict())
    assert scales_of(copy.deepcopy(again), [G, B, B, B])
    with pytest.raises(FloatingPointError, match="4 steps"):
        scales_of(again, [B, B])
