"""Steps in which different parameters lack a gradient: the plan stays, and no other parameter is written."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lars
from bighorn.optim import plan_builder
from tests.support.cases import Kind, Optimizer, serving

SHAPES = [(40, 30), (7,), (1,), (0,), (12, 5, 3, 3), (300, 200), (64, 64), (5, 33)]

OPTIONS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "plain": ({}, torch.float32),
    "int8": ({"state_dtype": "int8", "min_8bit_size": 1}, torch.float32),
    "kahan": ({"weight_rounding": "kahan"}, torch.bfloat16),
    "stochastic": ({"weight_rounding": "stochastic"}, torch.bfloat16),
    "double": ({}, torch.float64),
}


def parameters(dtype: torch.dtype) -> list[Parameter]:
    torch.manual_seed(3)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def states(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_without_some_gradients_is_that_of_the_others_alone(
    options: str, kind: Kind, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, dtype = OPTIONS[options]
    if kind is Lars and options == "int8" and backend == "cpu":
        backend = "auto"  # the C library has no momentum of LARS in blocks
    given = {"lr": 0.01, "weight_decay": 0.1, "backend": serving(backend, dtype), **given}
    together, alone = parameters(dtype), parameters(dtype)
    optimizer = kind([(f"p{i}", p) for i, p in enumerate(together)], **given)
    others = [kind([(f"p{i}", p)], **given) for i, p in enumerate(alone)]
    built: list[int] = []
    build = plan_builder.build

    def counting(parts: list[Any], *arguments: Any) -> Any:
        built.append(len(parts))
        return build(parts, *arguments)

    monkeypatch.setattr(plan_builder, "build", counting)
    chosen = random.Random(5)
    for step in range(8):
        has_grad = [step == 0 or chosen.random() < 0.6 for _ in together]
        for p, q, has in zip(together, alone, has_grad, strict=True):
            p.grad = torch.randn_like(p) if has else None
            q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        for other in others:
            other.step()
        assert built.count(len(together)) == 1
        names = [f"p{i}" for i, has in enumerate(has_grad) if has]
        assert list(optimizer.telemetry().names) == names
        figures = [other.telemetry() for other, has in zip(others, has_grad, strict=True) if has]
        norm = "update_rms" if kind is Came else "weight_norm"
        expected = torch.cat([getattr(each, norm) for each in figures]) if figures else torch.zeros(0)
        torch.testing.assert_close(getattr(optimizer.telemetry(), norm), expected, rtol=1e-6, atol=0)
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    for mine, its in zip(states(optimizer), [each for other in others for each in states(other)], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)


def test_one_plan_serves_whichever_gradients_were_missing_when_it_was_built(
    kind: Kind, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters(torch.float32)
    optimizer = kind(params, lr=0.01, backend=backend)
    for missing in (params[0], params[1]):
        for p in params:
            p.grad = None if p is missing else torch.randn_like(p)
        optimizer.step()
    monkeypatch.setattr(plan_builder, "build", None)
    for missing in params:
        for p in params:
            p.grad = None if p is missing else torch.randn_like(p)
        optimizer.step()


def test_a_stack_of_no_slices_counts_only_steps_with_a_gradient(kind: Kind, backend: str) -> None:
    params = [Parameter(torch.zeros(0, 0)), Parameter(torch.zeros(0, 0))]
    optimizer = kind([{"params": params, "stacked": True}], lr=0.01, backend=backend)
    for missing in (None, params[1]):
        for p in params:
            p.grad = None if p is missing else torch.zeros(0, 0)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 1]


def test_a_gradient_that_appears_later_joins_the_plan(kind: Kind, backend: str) -> None:
    """The state begins with the first gradient, as in torch.optim."""
    params = parameters(torch.float32)
    optimizer = kind(params, lr=0.01, backend=backend)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p) if i <= step else None
        optimizer.step()
    counts = [optimizer.state[p]["step"].item() if p in optimizer.state else None for p in params]
    assert counts == [3, 2, 1, *[None] * (len(params) - 3)]


def test_a_gradient_of_another_kind_than_expected_makes_another_plan(kind: Kind, backend: str) -> None:
    params = [Parameter(torch.ones(4, 6)), Parameter(torch.ones(3))]
    optimizer = kind(params, lr=0.01, backend=backend)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    params[0].grad = None
    optimizer.step()
    params[0].grad = torch.ones(6, 4).t()
    before = params[0].detach().clone()
    optimizer.step()
    assert not params[0].equal(before)


def test_stacked_layers_without_a_gradient_stay(kind: Kind, backend: str) -> None:
    stack, other = Parameter(torch.randn(3, 4, 5)), Parameter(torch.randn(4, 5))
    groups: list[dict[str, Any]] = [
        {"params": [("stack", stack)], "stacked": True},
        {"params": [("other", other)]},
    ]
    optimizer = kind(groups, lr=0.01, weight_decay=0.1, backend=backend)
    for p in (stack, other):
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = stack.detach().clone()
    stack.grad = None
    optimizer.step()
    assert stack.equal(before)
    assert optimizer.state[stack]["step"] == 1
    assert optimizer.state[other]["step"] == 2
    assert list(optimizer.telemetry().names) == ["other"]


@pytest.mark.parametrize("option", [{"max_grad_norm": 0.5}, {"skip_nonfinite": True}])
def test_a_norm_over_all_gradients_leaves_out_those_that_are_missing(
    option: dict[str, Any], kind: Kind, backend: str
) -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)[:5]
    optimizer, twin = (kind(each, lr=0.01, backend=backend, **option) for each in (params, twins))
    for each in (params, twins):
        torch.manual_seed(1)
        for p in each:
            p.grad = torch.randn_like(p)
    optimizer.step()
    for p, q in zip(params, twins, strict=False):
        with torch.no_grad():
            q.copy_(p)
        optimizer_state = optimizer.state[p]
        twin.state[q] = {name: value.clone() for name, value in optimizer_state.items()}
    for p in params[5:]:
        p.grad = None
    optimizer.step()
    twin.step()
    for p, q in zip(params, twins, strict=False):
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
