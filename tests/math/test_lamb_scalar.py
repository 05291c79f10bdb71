"""Compares LAMB and LARS of the reference with the scalar formulas; all other comparisons depend on it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support import scalar_formulas
from tests.support.case_tensors import Leaf
from tests.support.cases import LAMB, LARS, LRS, Case, Optimizer, set_gradients, set_lr
from tests.support.covering_cases import covering
from tests.support.optimizer_runs import figures
from tests.support.tables import for_every

EXACT = {torch.float32, torch.float64, torch.complex128}
PLAIN = [
    case
    for case in (*LAMB.cases(), *LARS.cases())
    if case.size < 10_000 and case.dtypes() <= EXACT and "state_dtype" not in case.options
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


def scalar_options(
    case: Case, parameters: Sequence[Parameter], lr: float
) -> list[scalar_formulas.Options | scalar_formulas.LarsOptions]:
    of: Any = {"lamb": scalar_formulas.Options, "lars": scalar_formulas.LarsOptions}[case.kind.algorithm.name]
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


def witness(parameters: Sequence[Parameter]) -> list[scalar_formulas.Tensor]:
    shape = {True: (2,), False: ()}
    return [scalar_formulas.Tensor(flat(p), (*p.shape, *shape[p.is_complex()])) for p in parameters]


def witness_step(
    case: Case,
    tensors: list[scalar_formulas.Tensor],
    parameters: Sequence[Parameter],
    gradients: Sequence[Tensor | None],
    lr: float,
) -> list[list[scalar_formulas.Ratio]]:
    return scalar_formulas.step(
        tensors,
        [None if g is None else flat(g) for g in gradients],
        scalar_options(case, parameters, lr),
        max_grad_norm=case.options.get("max_grad_norm"),
        skip_nonfinite=case.options.get("skip_nonfinite", False),
    )


def assert_equal_to(expected: list[float], actual: Tensor, rtol: float, what: str) -> None:
    want, got = torch.tensor(expected, dtype=torch.float64), torch.tensor(flat(actual), dtype=torch.float64)
    error = (got - want).norm()
    assert error <= rtol * want.norm(), f"{what}: {error / want.norm():.2e} relative"


def assert_told(case: Case, optimizer: Optimizer, ratios: list[list[scalar_formulas.Ratio]], step: int) -> None:
    """Check that the telemetry of a step has the norms and the ratios of the scalar formulas."""
    telemetry = optimizer.telemetry()
    told: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    columns = [column.tolist() for column in figures(telemetry).values()]
    for name, *row in zip(telemetry.names, *columns, strict=True):
        told[re.sub(r"\[\d+\]$", "", name)].append(tuple(row))
    for leaf, rows in zip(case.leaves, ratios, strict=True):
        want = [pytest.approx((r.weight_norm, r.update_norm, r.trust_ratio), rel=1e-6) for r in rows]
        assert not want or told[leaf.name] == want, f"telemetry of {leaf.name}, step {step}"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=[pytest.mark.long] * (case.id not in FEW)) for case in PLAIN]
)
def test_reference_equals_the_paper_in_float64(case: Case) -> None:
    case = case.in_double()
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, "reference")
    expected = witness(parameters)
    for step, lr in enumerate(LRS[:STEPS]):
        set_gradients(parameters, case.gradients(step))
        set_lr(optimizer, lr)
        optimizer.step()
        assert_told(case, optimizer, witness_step(case, expected, parameters, case.gradients(step), lr), step)
        for leaf, tensor, parameter in zip(case.leaves, expected, parameters, strict=True):
            what = f"{leaf.name} after step {step}"
            assert_equal_to(tensor.x, parameter, 1e-14, what)
            if tensor.t == 0:
                assert parameter not in optimizer.state, f"{what}: state without a gradient"
                continue
            state = optimizer.state[parameter]
            assert state["step"] == tensor.t, what
            assert_equal_to(tensor.m, state["exp_avg"], 1e-14, f"{what}: exp_avg")
            if "exp_avg_sq" in state:
                assert_equal_to(tensor.v, state["exp_avg_sq"], 1e-14, f"{what}: exp_avg_sq")
            if "max_exp_avg_sq" in state:
                assert_equal_to(tensor.v_max, state["max_exp_avg_sq"], 1e-14, f"{what}: max_exp_avg_sq")


ORDINARY = [
    c for c in PLAIN if c.dtype is torch.float32 and "float32" not in c.id and c.options.get("betas") != (0.0, 0.0)
]
FEW = covering(ORDINARY)


@pytest.mark.long
@for_every("case", [case for case in ORDINARY if case.id in FEW], ids=lambda case: case.id)
def test_reference_in_float32_stays_within_rounding_after_ten_steps(case: Case) -> None:
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, "reference", lr=0.01)
    expected = witness(parameters)
    for step in range(10):
        set_gradients(parameters, case.gradients(step))
        optimizer.step()
        witness_step(case, expected, parameters, case.gradients(step), 0.01)
    for leaf, tensor, parameter in zip(case.leaves, expected, parameters, strict=True):
        want = torch.tensor(tensor.x, dtype=torch.float64)
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        error = (torch.tensor(flat(parameter), dtype=torch.float64) - want).abs().amax() if want.numel() else 0.0
        assert error <= 7e-7 * scale, leaf.name


@pytest.mark.parametrize("agreeing", [0, 2, 8], ids=lambda count: f"{count}-of-4097")
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_the_cautious_share_has_a_floor(agreeing: int, name: str) -> None:
    """The mean of the mask counts as at least 1e-3: 2 of 4097 is below that, and 8 is above."""
    leaf = Leaf("weight", (4097,))
    case = Case("floor", {"cautious": True}, (leaf,), dtype=torch.float64)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, name)
    expected = witness(parameters)
    against = torch.full((4097,), -0.1, dtype=torch.float64)
    against[:agreeing] = 0.1
    for gradient in (torch.ones(4097, dtype=torch.float64), against):
        set_gradients(parameters, [gradient])
        optimizer.step()
        witness_step(case, expected, parameters, [gradient], LRS[0])
    assert_equal_to(expected[0].x, parameters[0], 1e-14, name)
