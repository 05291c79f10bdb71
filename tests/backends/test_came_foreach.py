"""CAME's kernels in plain torch: compares foreach with the reference, and tests both in low precision."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from torch import Tensor

from bighorn.kernels import Bucket, CameOptions, codec
from bighorn.kernels.foreach import came as foreach
from bighorn.kernels.foreach import lists
from bighorn.kernels.reference import came as reference
from tests.support.came_kernel_cases import CASES, DEFAULTS, LOW, Case, Factor, Make, bucket_of, largest

ID = attrgetter("id")


@pytest.fixture
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step every tensor in a separate group, like large ones; the table of all backends steps several together."""
    monkeypatch.setattr(lists, "CACHED_BYTES", 1)


def copy_into(twin: Bucket[CameOptions], bucket: Bucket[CameOptions]) -> None:
    for targets, sources in (
        (twin.params, bucket.params),
        *((twin.state[name], bucket.state[name]) for name in bucket.state),
    ):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def assert_stored_alike(ours: Tensor, theirs: Tensor, scale: float, slack: float, what: str) -> None:
    """Check equality up to rounding and slack; a low-precision value may be on the other side of a tie."""
    assert ours.dtype == theirs.dtype, what
    if ours.dtype == torch.int8:
        apart = (ours.int() - theirs.int()).abs()
        assert largest(apart) <= 1, what
        assert apart.sum() <= max(1, 0.02 * apart.numel()), what
        return
    error = (ours.double() - theirs.double()).abs()
    bound = {torch.float64: 2e-14, torch.float32: 6e-6}.get(ours.dtype, torch.finfo(ours.dtype).eps) + slack
    assert (error <= bound * (theirs.double().abs() + scale)).all(), f"{what}: {largest(error):.1e} of {scale:.1e}"


DTYPES: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype | None]] = {
    "float64": (torch.float64, torch.float64, None),
    "float32": (torch.float32, torch.float32, None),
    "float32-average-bfloat16": (torch.float32, torch.float32, torch.bfloat16),
    "float32-average-float16": (torch.float32, torch.bfloat16, torch.float16),
    "float32-average-int8": (torch.float32, torch.float32, torch.int8),
    "float64-average-int8": (torch.float64, torch.float64, torch.int8),
    "bfloat16": (torch.bfloat16, torch.bfloat16, None),
    "float16-average-float16": (torch.float16, torch.float32, torch.float16),
    "bfloat16-average-int8": (torch.bfloat16, torch.bfloat16, torch.int8),
}

SLACK = {None: 0.0, torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.int8: 0.05}
"""The change of results if one value of the average is on the other side of a tie."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if case.id.endswith(("published", "-everything"))], ids=ID)
@pytest.mark.usefixtures("_groups")
def test_foreach_equals_the_reference(case: Case, dtype: str) -> None:
    of_param, of_grad, average = DTYPES[dtype]
    slack = SLACK[average]
    twin = bucket_of(case.tensors(of_param), case.options, average)
    bucket = bucket_of([x.clone() for x in twin.params], case.options, average)
    kernels = foreach.Came([bucket]), reference.Came([twin])
    for step in range(3):
        before = [x.clone() for x in twin.params]
        bucket.grads = case.gradients(of_grad)
        twin.grads = [g.clone() for g in bucket.grads]
        scale: float | Tensor = (1.0, 0.25, torch.tensor(0.5, dtype=torch.float64))[step]
        apply_mask = torch.tensor(True) if step == 2 else None
        for kernel in kernels:
            kernel.step(scale, apply_mask)
        assert torch.equal(torch.stack(bucket.steps), torch.stack(twin.steps))
        assert_stored_alike(bucket.metrics, twin.metrics, 1e-30, slack, "metrics")
        for i, leaf in enumerate(case.leaves):
            what = f"{leaf.name}, step {step}"
            for name in twin.state:
                ours, theirs = bucket.state[name][i], twin.state[name][i]
                follows = slack if name.startswith("exp_avg_res") else 0.0
                assert_stored_alike(ours, theirs, 0.1 * largest(theirs), follows, f"{what}: {name}")
            movement = largest(twin.params[i] - before[i])
            error = largest(bucket.params[i] - twin.params[i])
            bound = {torch.float64: 2e-14, torch.float32: 6e-6}.get(of_param, 0.0) + slack
            stored = torch.finfo(of_param).eps * largest(before[i])
            assert error <= bound * movement + stored, f"{what}: {error:.1e} of {movement:.1e}"
        copy_into(bucket, twin)


@pytest.mark.parametrize("make", [reference.Came, foreach.Came], ids=["reference", "foreach"])
@pytest.mark.parametrize("average", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if "everything" in case.id], ids=ID)
@pytest.mark.usefixtures("_groups")
def test_nothing_is_written_without_commit(case: Case, average: torch.dtype | None, make: Make) -> None:
    bucket = bucket_of(case.tensors(torch.float32), case.options, average)
    kernel = make([bucket])
    bucket.grads = case.gradients(torch.float32)
    kernel.step()
    everything = [
        *bucket.params,
        *(t for column in bucket.state.values() for t in column),
        *bucket.steps,
        bucket.metrics,
    ]
    before = [tensor.clone() for tensor in everything]
    bucket.grads = [g * torch.inf for g in case.gradients(torch.float32)]
    kernel.step(1.0, torch.tensor(False))
    for tensor, old in zip(everything, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("make", [reference.Came, foreach.Came], ids=["reference", "foreach"])
def test_gradients_are_only_read_and_their_squares_summed(make: Make) -> None:
    case = CASES[0]
    bucket = bucket_of(case.tensors(torch.float32), case.options)
    bucket.grads = case.gradients(torch.float32)
    before = [g.clone() for g in bucket.grads]
    kernel = make([bucket])
    kernel.prepare()
    expected = sum(float(g.double().square().sum()) for g in bucket.grads)
    assert float(kernel.square_sum()) == pytest.approx(expected, rel=1e-12)
    kernel.step()
    assert all(torch.equal(g, old) for g, old in zip(bucket.grads, before, strict=True))


# ---- low precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [reference.Came, foreach.Came], ids=["reference", "foreach"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("average", [None, *LOW, torch.int8], ids=str)
@pytest.mark.parametrize("factor", ["matrix", "last_two", None])
def test_tiny_gradients_neither_stall_nor_spoil(
    make: Make, dtype: torch.dtype, average: torch.dtype | None, factor: Factor | None
) -> None:
    """In the parameter's dtype, an eps of 1e-30 would be 0, and 1 - 0.999 of a change would round to nothing."""
    options = replace(DEFAULTS, factor=factor, lr=1e-3)
    bucket = bucket_of([torch.randn(8, 12).to(dtype), torch.randn(8, 12).to(dtype)], options, average)
    start = bucket.params[0].clone()
    kernel = make([bucket])
    steps, mean = 300, 0.0
    for _ in range(steps):
        bucket.grads = [(torch.randn(8, 12) * 1e-5).to(dtype), torch.zeros(8, 12, dtype=dtype)]
        mean = 0.999 * mean + 0.001 * float(bucket.grads[0].double().square().mean())
        kernel.step()
    tensors = [*bucket.params, *(tensor for column in bucket.state.values() for tensor in column)]
    assert all(tensor.isfinite().all() for tensor in tensors)
    square = "exp_avg_sq" if factor is None else "exp_avg_sq_row"
    assert float(bucket.state[square][0].double().mean()) == pytest.approx(mean, rel=1e-5)
    assert largest(bucket.params[0] - start) > 0


def test_the_residual_is_that_of_the_average_as_stored() -> None:
    """A backend may therefore read m back; the state after one step shows which m the residual used."""
    bucket = bucket_of([torch.randn(6, 5)], replace(DEFAULTS, clip_threshold=1e9), torch.int8)
    g = torch.randn(6, 5)
    bucket.grads = [g]
    reference.Came([bucket]).step()
    state = {name: column[0] for name, column in bucket.state.items()}
    row, col = state["exp_avg_sq_row"].double(), state["exp_avg_sq_col"].double()
    u = g.double() * (row / row.mean()).rsqrt().unsqueeze(1) * col.rsqrt()
    m = codec.decode(state["exp_avg"], state["exp_avg_scale"]).double()
    as_stored = ((u - m) ** 2).mean(dim=1) * 1e-4
    load_weight = ((u - 0.1 * u) ** 2).mean(dim=1) * 1e-4
    torch.testing.assert_close(state["exp_avg_res_row"].double(), as_stored, rtol=1e-5, atol=0)
    assert largest(load_weight / as_stored - 1) > 1e-4
