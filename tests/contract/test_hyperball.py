"""Hyperball: where the norm that a matrix keeps comes from, and matrices that have none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter

from bighorn import ConvertedStateWarning, Lamb
from tests.support.error_checks import same, snapshot
from tests.support.ranks import ranks
from tests.support.tables import for_every

ZERO = "is zero, and hyperball=True would keep its norm of 0: initialize it"


def step(optimizer: torch.optim.Optimizer, *params: Parameter) -> None:
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()


def pair(zero: torch.Tensor, **group: Any) -> tuple[list[Parameter], Lamb]:
    """Return a matrix, a parameter with zeros, and their optimizer."""
    params = [Parameter(torch.randn(3, 3)), Parameter(zero)]
    groups: list[dict[str, Any]] = [{"params": [("a", params[0])]}, {"params": [("b", params[1])], **group}]
    return params, Lamb(groups, lr=0.1, hyperball=True)


def one_slice_of_zeros() -> torch.Tensor:
    return torch.cat([torch.ones(1, 3, 4), torch.zeros(1, 3, 4)])


@for_every(
    ("zero", "group", "label"),
    [(torch.zeros(3, 4), {}, "b"), (one_slice_of_zeros(), {"stacked": True}, r"b\[1\]")],
)
def test_a_matrix_of_zeros_is_refused_at_its_first_step(zero: torch.Tensor, group: Any, label: str) -> None:
    params, optimizer = pair(zero.clone(), **group)
    before = snapshot(params, optimizer)
    with pytest.raises(ValueError, match=f"^{label} {ZERO}"):
        step(optimizer, *params)
    assert same(snapshot(params, optimizer), before)
    params[1].grad = None  # a parameter without a gradient is not in the way
    step(optimizer, params[0])
    with torch.no_grad():
        params[1].add_(1)
    step(optimizer, *params)
    norms = optimizer.telemetry().weight_norm[1:]
    torch.testing.assert_close(optimizer.state[params[1]]["radius"].view(-1), norms)


def test_zeros_where_hyperball_begins_later_are_refused() -> None:
    matrix = Parameter(torch.randn(3, 4))
    optimizer = Lamb([("a", matrix)], lr=0.1)
    step(optimizer, matrix)
    with torch.no_grad():
        matrix.zero_()
    optimizer.param_groups[0]["hyperball"] = True
    with pytest.raises(ValueError, match=f"^a {ZERO}"):
        step(optimizer, matrix)


@for_every("zero", ["whole", "on this rank"])
@ranks(2)
def test_the_zeros_of_all_ranks_make_a_matrix_of_zeros(zero: str) -> None:
    net = nn.Linear(4, 6, bias=False)
    with torch.no_grad():
        net.weight[: 6 if zero == "whole" else 3] = 0
    fully_shard(net)
    net.weight.grad = torch.ones_like(net.weight)
    optimizer = Lamb(net.named_parameters(), lr=0.1, hyperball=True)
    if zero == "whole":
        with pytest.raises(ValueError, match=f"^weight {ZERO}"):
            optimizer.step()
        assert not optimizer.state
    else:
        optimizer.step()


@for_every("saved", ["torch's AdamW", "a Lamb without the ball", "the same run"])
def test_a_run_goes_on_with_hyperball(saved: str) -> None:
    """Its norm is the one at the first step with Hyperball; the error once told users to drop their moments."""
    matrix = Parameter(torch.randn(3, 4))
    kind = torch.optim.AdamW if saved.startswith("torch") else Lamb
    before = kind([matrix], lr=0.1, weight_decay=0.0)
    step(before, matrix)
    optimizer = Lamb([matrix], lr=0.1, hyperball=True)
    if kind is Lamb and saved == "the same run":
        assert isinstance(before, Lamb)
        optimizer = before
        optimizer.param_groups[0]["hyperball"] = True
    elif kind is Lamb:
        content = copy.deepcopy(before.state_dict())
        del content["param_groups"][0]["hyperball"]
        optimizer.load_state_dict(content)
    else:
        with pytest.warns(ConvertedStateWarning, match="hyperball=True stays, where torch's AdamW has False"):
            optimizer.load_state_dict(before.state_dict())
    norm = matrix.detach().norm()
    step(optimizer, matrix)
    state = optimizer.state[matrix]
    assert state["step"] == 2
    for kept in (state["radius"], matrix.detach().norm()):
        torch.testing.assert_close(kept, norm)


def test_the_ball_is_measured_anew_when_hyperball_is_switched_on_again(backend: str) -> None:
    """The weights once shrank to the norm of the time before."""
    matrix = Parameter(torch.randn(3, 4))
    optimizer = Lamb([matrix], lr=0.1, hyperball=True, backend=backend)
    step(optimizer, matrix)
    optimizer.param_groups[0]["hyperball"] = False
    step(optimizer, matrix)
    with torch.no_grad():
        matrix.mul_(3.0)
    norm = matrix.detach().norm()
    optimizer.param_groups[0]["hyperball"] = True
    step(optimizer, matrix)
    torch.testing.assert_close(matrix.detach().norm(), norm)


@for_every("options", [{"hyperball": True}, {}, {"bias_correction": "lr"}, {"trust_ratio_bounds": (0.0, 10.0)}])
def test_moments_that_fade_away_leave_weights_finite(options: Any, backend: str) -> None:
    """Where ||u|| is denormal, lr times the ratio was infinite, and rows of u that are 0 made NaN of weights."""
    matrix = Parameter(torch.randn(6, 8))
    optimizer = Lamb([matrix], lr=0.02, betas=(0.1, 0.999), backend=backend, **options)
    matrix.grad = torch.randn(6, 8)
    matrix.grad[0] = 0
    optimizer.step()
    matrix.grad = torch.zeros(6, 8)
    for _ in range(60):
        before = matrix.detach().clone()
        optimizer.step()
        assert bool(matrix.isfinite().all())
    assert optimizer.state[matrix]["exp_avg"].abs().max() < 1e-37
    assert torch.equal(matrix, before)  # nothing moves any more


@for_every("state_dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_first_step_writes_nothing_without_eps(state_dtype: torch.dtype, backend: str) -> None:
    """r is 0 / 0 then, and plain torch once multiplied it by 0."""
    matrix = Parameter(torch.ones(3, 4))
    optimizer = Lamb([matrix], lr=0.1, eps=0.0, skip_nonfinite=True, backend=backend, state_dtype=state_dtype)
    matrix.grad = torch.full((3, 4), torch.nan)
    optimizer.step()
    assert optimizer.telemetry().skipped == 1
    assert torch.equal(matrix, torch.ones(3, 4))
