"""The table of cases, and the tests of all backends, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came
from bighorn._kernels.cpu.tensors import ROUNDING_MODES
from bighorn._kernels.rounding import Rounding
from tests.backends import test_backends, test_triton
from tests.support.case_tensors import Layout, arranged
from tests.support.cases import CASES, Case, Kind, set_gradients
from tests.support.gpu_steps import GPU, OPTIONS, STATUS, gradients, needs_cuda, parameters, same, trained
from tests.support.optimizer_runs import BY_ID

if STATUS.device == "cpu":  # one skip in place of 1,300
    pytest.skip(f"no GPU that Triton serves: {STATUS.detail}", allow_module_level=True)

pytestmark = GPU
BACKENDS = ("triton", "foreach", "reference")
LAYOUTS: tuple[Layout, ...] = ("plain", "misaligned")


@pytest.mark.parametrize(
    ("backend", "case"),
    [pytest.param(b, case, id=f"{b}-{case.id}") for b in BACKENDS for case in CASES if case.runs_on(b)],
)
def test_a_step_equals_the_float64_reference(backend: str, case: Case) -> None:
    test_backends.check_steps(backend, case)


@pytest.mark.parametrize("stacked", [False, True])
def test_trust_ratio_table(stacked: bool) -> None:
    test_backends.test_trust_ratio_table_in_every_backend("triton", stacked)


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("extreme", test_backends.EXTREMES)
def test_norms_neither_overflow_nor_vanish(extreme: str, size: int, kind: Kind) -> None:
    test_backends.test_norms_neither_overflow_nor_vanish(extreme, size, kind, "triton")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "case",
    ["skip", "came-skip", "lars-skip", "lars-float32-states-int8-everything", "came-float32-states-int8-everything"],
)
def test_skip_nonfinite(case: str, bad: float, first: bool) -> None:
    test_backends.test_skip_nonfinite_changes_nothing_and_counts("triton", BY_ID[case], bad, first)


@pytest.mark.parametrize("way", ROUNDING_MODES)
@pytest.mark.parametrize("state_dtype", [torch.int8, torch.uint8, torch.bfloat16], ids=str)
def test_few_bits_are_those_of_the_reference(state_dtype: torch.dtype, way: Rounding) -> None:
    """Codes and random bits are equal, although the device uses fused multiply-adds."""
    test_triton.test_a_step_in_few_bits_equals_the_reference(True, state_dtype, way)


@pytest.mark.parametrize("layout", [kind for kind in test_triton.KINDS if "int" in kind])
def test_codes_of_came_are_those_of_the_reference(layout: str) -> None:
    test_triton.test_a_came_step_equals_the_reference(layout)


# ---- with a GPU only ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "transposed", "misaligned"])
def test_gradients_in_another_order_are_not_misread(layout: Layout, kind: Kind) -> None:
    """The parameter keeps its memory order; the whole table of layouts runs above."""
    results = []
    for backend in ("triton", "reference"):
        (param,) = parameters(0, ((300, 500),))
        (g,) = gradients(0, ((300, 500),))
        param.grad = arranged(g, layout)
        kind([param], **{**OPTIONS, "backend": backend}).step()
        results.append(param.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("array", ["param", "grad", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_misaligned_array_changes_nothing_but_rounding(array: str, dtype: torch.dtype, kind: Kind) -> None:
    """The address is not a multiple of 16 bytes, which is common for gradients of FSDP2 and DDP."""
    shapes, results = ((300, 500), (40_001,), (64, 3, 7, 7)), []
    for layout in LAYOUTS:
        layouts: dict[str, Layout] = {array: layout}
        values = [p.detach().to(dtype) for p in parameters(0, shapes)]
        params = [Parameter(arranged(value, layouts.get("param", "plain"))) for value in values]
        optimizer = kind(params, **OPTIONS)
        for step in range(3):
            for p, g in zip(params, gradients(step, shapes), strict=True):
                p.grad = arranged(g.to(dtype), layouts.get("grad", "plain"))
            optimizer.step()
            for state in optimizer.state.values() if step == 0 else ():
                if array in state:
                    state[array] = arranged(state[array], layout)
        results.append(params)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    for plain, misaligned in zip(*results, strict=True):
        torch.testing.assert_close(plain.detach(), misaligned.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((128_256, 256), {}),
        ((1_000_000, 16), {}),
        ((64, 512, 2048), {"factor": "last_two"}),
        ((64, 512, 2048), {"stacked": True}),
    ],
    ids=["embedding", "tall-and-narrow", "experts", "stacked-experts"],
)
def test_shapes_of_large_models(shape: tuple[int, ...], options: dict[str, object], kind: Kind) -> None:
    if "factor" in options and kind is not Came:
        pytest.skip(f"{kind.__name__} factors nothing")
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        (param,) = (Parameter(p.detach().to(dtype)) for p in parameters(0, (shape,)))
        optimizer = kind([{"params": [param], **options}], **{**OPTIONS, "backend": backend})
        for step in range(2):
            param.grad = gradients(step, (shape,))[0].to(dtype)
            optimizer.step()
        results.append(param.detach())
        param.grad = None
        del param, optimizer
    ours, exact = results
    apart = ours - exact
    assert apart.norm() <= 2e-7 * exact.norm()  # 8.4e-8 on an H100
    assert apart.abs().max() <= 5e-6  # 2.9e-6


def test_many_tiny_tensors(kind: Kind) -> None:
    shapes = tuple((1 + i % 7, 1 + i % 5) if i % 2 else (1 + i,) for i in range(200))
    results = []
    for backend in ("triton", "reference"):
        params = parameters(0, shapes)
        optimizer = kind(params, **{**OPTIONS, "backend": backend, "max_grad_norm": 1.0})
        for step in range(3):
            set_gradients(params, gradients(step, shapes))
            optimizer.step()
        results.append([p.detach() for p in params])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


@needs_cuda
def test_deterministic_algorithms_change_nothing(kind: Kind) -> None:
    """Torch then fills uninitialized memory with NaN."""
    plain = trained(kind, max_grad_norm=1.0)
    torch.use_deterministic_algorithms(True)
    try:
        assert same(plain, trained(kind, max_grad_norm=1.0))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_same_bits_from_run_to_run(kind: Kind) -> None:
    runs = [trained(kind, max_grad_norm=1.0) for _ in range(3)]
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


def test_parameters_on_several_devices(kind: Kind) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    runs = []
    for places in ((0, 0), (0, 1)):
        params = [Parameter(p.detach().to(f"{STATUS.device}:{places[i % 2]}")) for i, p in enumerate(parameters())]
        optimizer = kind(params, **OPTIONS, max_grad_norm=1.0)
        for step in range(2):
            set_gradients(params, [g.to(p.device) for p, g in zip(params, gradients(step), strict=True)])
            optimizer.step()
        runs.append([p.detach().cpu() for p in params])
    for one, two in zip(*runs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)  # the sum for the clip has another order
