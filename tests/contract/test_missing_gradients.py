"""Steps in which different parameters lack a gradient: the plan stays, and no other parameter is written."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lars
from bighorn._optim import plan_builder
from tests.support.case_tensors import arranged
from tests.support.cases import HAS_GRAD_DTYPE, Kind, Optimizer, allow_gradients_of, serving
from tests.support.optimizer_runs import OWN, assert_same_everything

SHAPES = [(40, 30), (7,), (1,), (0,), (0, 128), (12, 5, 3, 3), (300, 200), (64, 64), (5, 33)]
STACKED = [(3, 4, 5), (0, 4)]

OPTIONS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "plain": ({}, torch.float32),
    "int8": ({"state_dtype": "int8", "min_8bit_size": 1}, torch.float32),
    "kahan": ({"weight_rounding": "kahan"}, torch.bfloat16),
    "stochastic": ({"weight_rounding": "stochastic"}, torch.bfloat16),
    "double": ({}, torch.float64),
}


def parameters(dtype: torch.dtype, shapes: list[Any] = SHAPES) -> list[Parameter]:
    torch.manual_seed(3)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def alone(params: list[Parameter], kind: Kind, **options: Any) -> list[Optimizer]:
    """Return an optimizer for each parameter, the last of which are stacks with options of their own."""
    groups: list[dict[str, Any]] = [{"params": [(f"p{i}", param)]} for i, param in enumerate(params)]
    for group in groups[len(SHAPES) :]:
        group |= {"stacked": True, **OWN[kind]}
    return [kind([group], **options) for group in groups]


def in_another_way(param: Parameter, grad: Tensor, way: int) -> Tensor:
    """Return a gradient in another memory order or dtype, of the same values."""
    if way % 4 == 1 and grad.dim() > 1:
        return arranged(grad, "transposed")
    if way % 4 < 2 or not HAS_GRAD_DTYPE:
        return grad.clone()
    allow_gradients_of(param, None)
    return grad.to((torch.float64, torch.bfloat16)[way % 2], copy=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_without_some_gradients_is_that_of_the_others_alone(
    options: str, kind: Kind, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plan serves them all, whichever were missing when it was built, and gradients of other kinds.

    The first parameter begins late, as in torch.optim.
    """
    given, dtype = OPTIONS[options]
    if kind is Lars and options == "int8" and backend == "cpu":
        backend = "auto"  # the C library has no momentum of LARS in blocks
    given = {"lr": 0.01, "weight_decay": 0.1, "backend": serving(backend, dtype), **given}
    ours, theirs = (parameters(dtype, [*SHAPES, *STACKED]) for _ in range(2))
    others = alone(theirs, kind, **given)
    groups = [{**other.param_groups[0], "params": [p]} for other, p in zip(others, ours, strict=True)]
    optimizer = kind(groups, **given)
    optimizer.step()
    assert not optimizer.state
    built: list[int] = []
    build = plan_builder.build

    def counting(parts: list[Any], *arguments: Any) -> Any:
        built.append(len(parts))
        return build(parts, *arguments)

    monkeypatch.setattr(plan_builder, "build", counting)
    chosen = random.Random(5)
    for step in range(12):
        has_grad = [step == 0 or (step != 5 and chosen.random() < 0.6) for _ in ours]
        has_grad[0] = step > 2
        for i, (p, q, has) in enumerate(zip(ours, theirs, has_grad, strict=True)):
            q.grad = torch.randn(p.shape).bfloat16().to(dtype) if has else None
            way = step // 2 + i if step > 5 and step % 2 else 0
            p.grad = None if q.grad is None else in_another_way(p, q.grad, way)
            p.data = p.data.clone() if step == 4 else p.data  # with or without a gradient
        built.clear()
        optimizer.step()
        assert built == ([len(ours) - (step == 0)] if step in (0, 3) else [])
        for other in others:
            other.step()
        figures = [other.telemetry() for other, has in zip(others, has_grad, strict=True) if has]
        assert optimizer.telemetry().names == tuple(name for each in figures for name in each.names)
        norm = "update_rms" if kind is Came else "weight_norm"
        expected = torch.cat([getattr(each, norm) for each in figures]) if figures else torch.zeros(0)
        torch.testing.assert_close(getattr(optimizer.telemetry(), norm), expected, rtol=1e-6, atol=0)
    for p, q, other in zip(ours, theirs, others, strict=True):
        assert_same_everything([p], optimizer, [q], other)


@pytest.mark.parametrize("option", [{"max_grad_norm": 0.5}, {"skip_nonfinite": True}])
def test_a_norm_over_all_gradients_leaves_out_those_that_are_missing(
    option: dict[str, Any], kind: Kind, backend: str
) -> None:
    params = parameters(torch.float32)
    optimizer = kind(params, lr=0.01, backend=backend, **option)
    optimizer.step()
    assert not optimizer.state
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    others, other = copy.deepcopy((params, optimizer))
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        p.grad = torch.randn_like(p) if i < 5 else None
        q.grad = p.grad
    fresh = kind(others[:5], lr=0.01, backend=backend, **option)
    fresh.state.update({q: other.state[q] for q in others[:5]})
    optimizer.step()
    fresh.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


CHANGES: dict[str, Callable[[Parameter], object]] = {
    "freed": lambda p: p.untyped_storage().resize_(0),
    "another shape": lambda p: setattr(p, "data", torch.ones(2, 2)),
    "another dtype": lambda p: setattr(p, "data", p.data.to(torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_without_a_gradient_keeps_no_other_from_its_step(change: str, kind: Kind, backend: str) -> None:
    left, stepped = Parameter(torch.ones(3, 4)), Parameter(torch.ones(5, 4))
    optimizer = kind([left, stepped], lr=0.01, backend=backend)
    for p in (left, stepped):
        p.grad = torch.ones_like(p)
    optimizer.step()
    left.grad = None
    CHANGES[change](left)
    for count in (2, 3):
        before = stepped.detach().clone()
        optimizer.step()
        assert not stepped.equal(before)
        assert optimizer.state[stepped]["step"] == count
    assert optimizer.state[left]["step"] == 1


def test_nothing_is_copied_into_a_parameter_without_a_gradient(kind: Kind, backend: str) -> None:
    """Kernels work on a dense copy of a parameter with gaps, and autograd counts each write to the parameter."""
    gaps, other = Parameter(torch.ones(4, 8)[:, ::2]), Parameter(torch.ones(4, 4))
    optimizer = kind([gaps, other], lr=0.01, backend=backend)
    for p in (gaps, other):
        p.grad = torch.ones_like(p)
    optimizer.step()
    gaps.grad, version = None, gaps._version
    optimizer.step()
    assert gaps._version == version
