"""Compares the reference with the scalar formulas; all other comparisons depend on it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support import scalar_formulas
from tests.support.case_tensors import Leaf
from tests.support.cases import CAME, LAMB, LARS, LRS, Case, Optimizer, set_gradients
from tests.support.covering_cases import covering
from tests.support.optimizer_runs import figures

EXACT = {torch.float32, torch.float64, torch.complex128}
PLAIN = [
    case
    for case in (*LAMB.cases(), *LARS.cases(), *CAME.cases())
    if case.size < 10_000
    and case.dtypes() <= EXACT
    and "state_dtype" not in case.options
    and not ("came" in case.id and ("stacked" in case.id or "two-groups" in case.id))  # whose slices are tensors
]
FEW = covering(PLAIN)
STEPS = 3
"""Two steps of each parameter, also if its first gradient is late or its second is missing."""


def flat(tensor: Tensor) -> list[float]:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values: list[float] = real.double().flatten().tolist()
    return values


def excluded(rule: Any, name: str, parameter: Tensor) -> bool:
    if rule is None:
        return False
    if rule == "ndim<2":
        return parameter.ndim < 2
    if callable(rule):
        return bool(rule(name, parameter))
    return any(re.search(pattern, name) for pattern in rule)


FORMULAS: dict[str, Any] = {
    "lamb": scalar_formulas.Options,
    "lars": scalar_formulas.LarsOptions,
    "came": scalar_formulas.CameOptions,
}


def lr_of(case: Case, step: int) -> float:
    """Return the learning rate of a step, from the schedule of the case if it has one."""
    return float(case.options["lr"](step) if "lr" in case.options else LRS[step])


def scalar_options(case: Case, parameters: Sequence[Parameter], lr: float) -> list[Any]:
    of = FORMULAS[case.kind.algorithm.name]
    known = {field.name for field in fields(of)}
    out = []
    for leaf, parameter in zip(case.leaves, parameters, strict=True):
        merged = {**case.usual(), **case.options, **case.groups[leaf.group], "lr": lr}
        options = {key: value for key, value in merged.items() if key in known}
        if excluded(case.options.get("exclude_from_weight_decay"), leaf.name, parameter):
            options["weight_decay"] = 0.0
        if excluded(case.options.get("exclude_from_layer_adaptation"), leaf.name, parameter):
            options["adapt"] = False
        out.append(of(**options))
    return out


def factor_of(rule: str, shape: Sequence[int]) -> Any:
    """Return which matrices CAME factors, None if a tensor has none."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
    factored = {
        "matrix": 2 * (rows + columns) < rows * columns,
        "last_two": len(shape) > 1,
        "linear": len(shape) == 2 or (len(shape) == 4 and shape[2:] == (1, 1)),
    }[rule]
    return ("last_two" if rule == "last_two" else "matrix") if factored else None


def witness(case: Case, parameters: Sequence[Parameter]) -> list[Any]:
    out: list[Any] = []
    for leaf, p in zip(case.leaves, parameters, strict=True):
        shape = (*p.shape, 2) if p.is_complex() else (*p.shape,)
        if case.kind.algorithm.name != "came":
            out.append(scalar_formulas.Tensor(flat(p), shape))
            continue
        rule = {**case.options, **case.groups[leaf.group]}.get("factor", "matrix")
        out.append(scalar_formulas.CameTensor(flat(p), shape, factor_of(rule, shape)))
    return out


def witness_step(
    case: Case, tensors: list[Any], parameters: Sequence[Parameter], gradients: Sequence[Tensor | None], lr: float
) -> list[list[Any]]:
    return scalar_formulas.step(
        tensors,
        [None if g is None else flat(g) for g in gradients],
        scalar_options(case, parameters, lr),
        max_grad_norm=case.options.get("max_grad_norm"),
        skip_nonfinite=case.options.get("skip_nonfinite", False),
    )


def witness_state(tensor: Any) -> dict[str, list[float]]:
    """Return the values of each tensor that a state may have."""
    state = {"exp_avg": tensor.m, "exp_avg_sq": tensor.v}
    if isinstance(tensor, scalar_formulas.Tensor):
        return {**state, "max_exp_avg_sq": tensor.v_max, "radius": tensor.radii}
    for name, matrices in (("sq", tensor.sq), ("res", tensor.res)):
        state[f"exp_avg_{name}_row"] = [a for matrix in matrices for a in matrix.row]
        state[f"exp_avg_{name}_col"] = [a for matrix in matrices for a in matrix.col]
    return state


def assert_equal_to(expected: list[float], actual: Tensor, rtol: float, what: str) -> None:
    want, got = torch.tensor(expected, dtype=torch.float64), torch.tensor(flat(actual), dtype=torch.float64)
    error = (got - want).norm()
    assert error <= rtol * want.norm(), f"{what}: {error / want.norm():.2e} relative"


def assert_told(case: Case, optimizer: Optimizer, expected: list[list[Any]], step: int) -> None:
    """Check that the telemetry of a step has the figures of the scalar formulas."""
    telemetry = optimizer.telemetry()
    told: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    columns = [column.tolist() for column in figures(telemetry).values()]
    for name, *row in zip(telemetry.names, *columns, strict=True):
        told[re.sub(r"\[\d+\]$", "", name)].append(tuple(row))
    for leaf, rows in zip(case.leaves, expected, strict=True):
        want = [pytest.approx(astuple(row), rel=1e-6) for row in rows]
        assert not want or told[leaf.name] == want, f"telemetry of {leaf.name}, step {step}"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=[pytest.mark.long] * (case.id not in FEW)) for case in PLAIN]
)
def test_reference_equals_the_paper_in_float64(case: Case) -> None:
    case = case.in_double()
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, "reference")
    expected = witness(case, parameters)
    for step in range(STEPS):
        set_gradients(parameters, case.gradients(step))
        case.set_lr(optimizer, step)
        optimizer.step()
        told = witness_step(case, expected, parameters, case.gradients(step), lr_of(case, step))
        assert_told(case, optimizer, told, step)
        for leaf, tensor, parameter in zip(case.leaves, expected, parameters, strict=True):
            what = f"{leaf.name} after step {step}"
            assert_equal_to(tensor.x, parameter, 3e-14, what)  # a step may leave a hundredth of a weight
            if tensor.t == 0:
                assert parameter not in optimizer.state, f"{what}: state without a gradient"
                continue
            state = dict(optimizer.state[parameter])
            assert state.pop("step") == tensor.t, what
            for name, values in state.items():
                assert_equal_to(witness_state(tensor)[name], values, 1e-14, f"{what}: {name}")


@pytest.mark.parametrize("agreeing", [0, 2, 8], ids=lambda count: f"{count}-of-4097")
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_the_cautious_share_has_a_floor(agreeing: int, name: str) -> None:
    """The mean of the mask counts as at least 1e-3: 2 of 4097 is below that, and 8 is above."""
    leaf = Leaf("weight", (4097,))
    case = Case("floor", {"cautious": True}, (leaf,), dtype=torch.float64)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, name)
    expected = witness(case, parameters)
    against = torch.full((4097,), -0.1, dtype=torch.float64)
    against[:agreeing] = 0.1
    for gradient in (torch.ones(4097, dtype=torch.float64), against):
        set_gradients(parameters, [gradient])
        optimizer.step()
        witness_step(case, expected, parameters, [gradient], LRS[0])
    assert_equal_to(expected[0].x, parameters[0], 1e-14, name)
