"""CAME's rule: compares the reference with the scalar formulas, and reference and foreach with came-pytorch."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn.kernels.foreach import came as foreach
from bighorn.kernels.reference import came as reference
from tests.support import scalar_formulas
from tests.support.came_kernel_cases import (
    DEFAULTS,
    EDGES,
    IN_TURN,
    MAIN,
    STEPS,
    VECTORS,
    Case,
    Leaf,
    Make,
    bucket_of,
    largest,
)


def flat(a: Tensor) -> list[float]:
    values: list[float] = a.double().flatten().tolist()
    return values


def assert_moved_alike(ours: Tensor, theirs: Tensor, start: Tensor, bound: float, what: str) -> None:
    """Compare relative to the largest movement; each step rounds a parameter by half an ulp, even of a small step."""
    assert ours.isfinite().all(), what
    error, movement = largest(ours.double() - theirs.double()), largest(theirs.double() - start.double())
    stored = STEPS * torch.finfo(ours.dtype).eps / 2 * largest(start) if movement < 0.05 * largest(start) else 0.0
    assert error <= bound * movement + stored, f"{what}: {error:.2e}, {error / max(movement, 1e-300):.2e} of {movement}"


@pytest.mark.parametrize("case", IN_TURN)
def test_reference_equals_the_scalar_witness(case: Case) -> None:
    tensors = case.tensors(torch.float64)
    starts = [x.clone() for x in tensors]
    bucket, o = bucket_of(tensors, case.options), case.options
    kernel = reference.Came([bucket])
    witnesses = [scalar_formulas.CameTensor(flat(x), tuple(x.shape), o.factor) for x in tensors]
    known = {field.name for field in fields(scalar_formulas.CameOptions)}
    options = scalar_formulas.CameOptions(
        **{name: value for name, value in vars(o).items() if name in known} | {"lr": float(o.lr)}
    )
    for step in range(STEPS):
        bucket.grads = case.gradients(torch.float64)
        kernel.step()
        for i, (leaf, witness, g) in enumerate(zip(case.leaves, witnesses, bucket.grads, strict=True)):
            what = f"{leaf.name}, step {step}"
            figures = scalar_formulas.came_step(witness, flat(g), options)
            expected = torch.tensor(witness.x, dtype=torch.float64).view(leaf.shape)
            assert_moved_alike(tensors[i], expected, starts[i], 1e-14, what)
            told = (figures.update_rms, figures.clip, figures.confidence)
            assert bucket.metrics[i].tolist() == pytest.approx(told, rel=1e-6), what
            state = {name: column[i] for name, column in bucket.state.items()}
            for name, values in witness_state(witness).items():
                exact = torch.tensor(values, dtype=torch.float64).view_as(state[name])
                # Statistics are sums of positive terms; the terms of the average may cancel.
                atol = 1e-14 * largest(exact) if name == "exp_avg" else 0.0
                torch.testing.assert_close(state[name], exact, rtol=1e-13, atol=atol, msg=f"{what}: {name}")
            assert bucket.steps[i] == step + 1


def witness_state(witness: scalar_formulas.CameTensor) -> dict[str, list[float]]:
    state = {"exp_avg": witness.m}
    if witness.factor is None:
        return {**state, "exp_avg_sq": witness.v}
    if witness.sq:  # empty tensors have no averages
        for name, matrices in (("exp_avg_sq", witness.sq), ("exp_avg_res", witness.res)):
            state[f"{name}_row"] = [a for matrix in matrices for a in matrix.row]
            state[f"{name}_col"] = [a for matrix in matrices for a in matrix.col]
    return state


PUBLISHED = [
    Case("main", replace(DEFAULTS, factor="last_two"), MAIN),
    Case("edges", replace(DEFAULTS, factor="last_two"), EDGES),
    Case("vectors", replace(DEFAULTS, factor=None), tuple(leaf for leaf in VECTORS if len(leaf.shape) == 1)),
    Case(
        "betas",
        replace(
            DEFAULTS, factor="last_two", betas=(0.8, 0.9, 0.99), eps=(1e-8, 1e-6), clip_threshold=0.5, weight_decay=0.01
        ),
        MAIN,
    ),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.id)
@pytest.mark.parametrize("make", [reference.Came, foreach.Came], ids=["reference", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_published_rule_is_came_pytorchs(case: Case, make: Make, dtype: torch.dtype) -> None:
    peer = pytest.importorskip("came_pytorch")
    tensors, o = case.tensors(dtype), case.options
    starts = [x.clone() for x in tensors]
    theirs = [Parameter(x.clone()) for x in tensors]
    optimizer = peer.CAME(
        [p for p in theirs if p.numel()],
        lr=o.lr,
        eps=o.eps,
        clip_threshold=o.clip_threshold,
        betas=o.betas,
        weight_decay=o.weight_decay,
    )
    bucket = bucket_of(tensors, o)
    kernel = make([bucket])
    for _ in range(STEPS):
        bucket.grads = case.gradients(dtype)
        for parameter, g in zip(theirs, bucket.grads, strict=True):
            parameter.grad = g.clone()
        optimizer.step()
        kernel.step()
    bound = {torch.float64: 2e-15, torch.float32: 7e-5 if case.id == "edges" else 6e-6}[dtype]
    for leaf, ours, parameter, start in zip(case.leaves, tensors, theirs, starts, strict=True):
        assert_moved_alike(ours, parameter.detach(), start, bound, leaf.name)


def test_the_published_rule_is_not_ours_on_convolutions() -> None:
    """The comparison above detects this difference."""
    leaf = Leaf("conv", (4, 3, 3, 5))
    moved = []
    for factor in ("matrix", "last_two"):
        torch.manual_seed(0)
        case = Case("conv", replace(DEFAULTS, factor=factor), (leaf,))
        bucket = bucket_of(case.tensors(torch.float64), case.options)
        bucket.grads = case.gradients(torch.float64)
        reference.Came([bucket]).step()
        moved.append(bucket.params[0])
    with pytest.raises(AssertionError, match="conv"):
        assert_moved_alike(moved[0], moved[1], torch.zeros(leaf.shape), 1e-3, "conv")
