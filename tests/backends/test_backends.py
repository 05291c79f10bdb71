"""Compares every backend with the float64 reference on the table of cases, one step at a time from equal state."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn import _kernels as kernels
from bighorn._kernels import codec, rounding
from bighorn._kernels.codec import Dither
from bighorn._kernels.foreach import lists
from bighorn._kernels.reference import came as came_reference
from bighorn._kernels.reference import lamb as reference
from bighorn._kernels.reference import lars as lars_reference
from bighorn._kernels.triton.device import interpreted
from bighorn._optim.state import AUX_STATE_NAMES
from tests.support import scalar_formulas
from tests.support.buckets import bucket
from tests.support.case_tensors import BLOCKS, ZOO, double, ordinal
from tests.support.cases import CASES, Case, Kind, Optimizer, set_gradients
from tests.support.optimizer_runs import BY_ID, assert_bitwise, figures, runs
from tests.support.tables import for_every

LOW = (torch.bfloat16, torch.float16)
STEPS = 2
"""The first step, and one from the state that it created; test_step.py and test_formulas.py take more."""

# Relative to (the step, the parameter, a moment). The specification gives the first two float32 figures.
TOLERANCE = {torch.float32: (2e-6, 2e-7, 1e-6), torch.float64: (2e-14, 5e-16, 2e-15)}

LOOSE: dict[Kind, float] = {Lamb: 1.0, Came: 4.0, Lars: 1.0}
"""CAME's step is a product of five rounded factors; their rounding shows if the step cancels x, or if x was 0."""

ROUNDING_OF_A_MOMENT = 5e-7
"""The rounding error of a moment, relative to its values before and after a step; codes within it are correct."""

ROUNDINGS_OF_A_RATIO = 12
"""The roundings of m / sqrt(v); in the largest of a block, gradient and decay may nearly cancel."""

TIE = 2**-6
"""The relative error of results after a momentum was rounded the other way at a tie: a code is at most 1/127 of the
largest in its block, an ulp of bfloat16 at most 2**-7 of the value, and the residual's square doubles either."""


def real(tensor: Tensor) -> Tensor:
    """Return a flat float view in row-major order; a complex number is two floats."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()


def size(*tensors: Tensor) -> float:
    """Return the sum of the operands' 2-norms. Errors are relative to it, since a sum of two numbers may be near 0."""
    return sum(float(tensor.double().norm()) for tensor in tensors)


def assert_rounded(ours: Tensor, exact: Tensor, before: Tensor, what: str, loose: float = 1.0) -> bool:
    """Check that `ours` is `exact` rounded once to 16 bits, except for rare ties; return whether there was one."""
    away = (ordinal(ours) - ordinal(exact.to(ours.dtype))).abs()
    apart = bool(away.any())
    # Near a sum of zero, float32's rounding of the terms is many ulps of the result.
    away[(ours.double() - exact).abs() <= loose * 2e-7 * (exact.abs() + before.abs())] = 0
    odd = int((away > 0).sum())
    # bfloat16 has 128 mantissas that many elements share, so ties occur together.
    assert odd <= max(1, 0.05 * away.numel()), f"{what}: {odd} of {away.numel()} rounded wrongly"
    assert odd == 0 or away.max() <= 1, f"{what}: {away.max()} ulps"
    return apart


Bounds = dict[int, tuple[Tensor, Tensor]]
"""The lowest and the highest codes that a moment may have, keyed by the address of its codes."""


@contextmanager
def rounding_watched() -> Iterator[Bounds]:
    """Collect the codes that the reference's moments could have within float32's rounding of their sums."""
    bounds: Bounds = {}

    def rounded(
        forms: codec.Forms, name: str, values: Tensor, like: State, dither: Dither = codec.NEAREST
    ) -> dict[str, Tensor]:
        new, form = codec.quantize(forms, name, values, like, dither), codec.form_of(forms, name, like)
        if form is not None and form.dtype not in LOW:
            largest = torch.full_like(new[name], 0x77 if form.int4 else torch.iinfo(form.dtype).max)
            top = codec.decode(largest, new[f"{name}_scale"], form).view(values.shape)
            old = codec.dequantize(forms, name, like, values.shape)
            if form.relative:
                root = codec.dequantize(forms, form.relative, like).sqrt().view(values.shape)
                values, old = (torch.where(root == 0, 0.0, each / root) for each in (values, old))
            slack = (
                ROUNDING_OF_A_MOMENT
                * (ROUNDINGS_OF_A_RATIO if form.relative else 1)
                * (values.abs() + old.abs()).copysign(values)
            )
            least = (
                -top
                if form.dtype.is_signed or form.int4
                else torch.where(values > 0, torch.finfo(torch.float32).tiny, 0)
            )
            ends = []
            for way in (-1, 1):
                end = (values + way * slack).clamp(least, top)
                # The largest value of a block is fixed, since other codes are fractions of it; but its sign is
                # arbitrary if it is almost 0.
                end = torch.where((values.float().abs() < top) | (values.abs() <= slack.abs()), end, values)
                # The specification first rounds to 2^-16ths of a code.
                shift = (torch.as_tensor(dither).expand(values.shape) + way).clamp(0, 2**16 - 1)
                leading = new[f"{name}_scale"].dim() - 1
                ends.append(one_by_one(name, codec.encode(end, form, shift, leading=leading)[0]))
            bounds[like[name].data_ptr()] = torch.minimum(*ends), torch.maximum(*ends)
        return new

    with ExitStack() as patches:
        for module in (reference, came_reference, lars_reference):
            patches.enter_context(mock.patch.object(module, "quantize", rounded))
        yield bounds


def one_by_one(name: str, codes: Tensor) -> Tensor:
    """Return codes with one element each, also if a byte holds two."""
    return codec.unpack_int4(codes) if name == "exp_avg" and codes.dtype == torch.uint8 else codes


def bounds_of(name: str, codes: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Return the flat bounds of a tensor of codes; the slices of a stacked parameter were rounded one by one."""
    low, high = bounds[codes.data_ptr()]
    if low.numel() == one_by_one(name, codes).numel():
        return low.flatten(), high.flatten()
    slices = [bounds_of(name, part, bounds) for part in codes]
    return torch.cat([low for low, _ in slices]), torch.cat([high for _, high in slices])


def assert_same_codes(ours: Tensor, exact: Tensor, bounds: Bounds, what: str, name: str = "") -> bool:
    """Check that codes are equal up to float32's rounding of their values; return whether any differ."""
    ours, true = one_by_one(name, ours), one_by_one(name, real(exact))
    if true.numel():
        low, high = bounds_of(name, exact, bounds)
        wrong = int(((ours < low) | (ours > high)).sum())
        assert wrong == 0, f"{what}: {wrong} of {ours.numel()} codes are wrong"
        away = (ours.int() - true.int()).abs()
        # The sign of a value that is almost 0 and alone in its block is arbitrary.
        away[
            (true.abs() == (codec.TOP if exact.dtype == torch.int8 else 7))
            & ((ours == 0) | (ours.int() == -true.int()))
        ] = 0
        assert away.max() <= 1, f"{what}: {away.max()} codes"
    return not ours.equal(true)


def assert_norm(ours: Tensor, exact: Tensor, bound: float, what: str) -> None:
    error = (ours.double() - exact.double()).norm().item()
    bound += torch.finfo(torch.float32).tiny  # subnormal numbers have few digits
    assert error <= bound, f"{what}: error {error:.2e} above {bound:.2e}"


State = Mapping[str, Tensor]


def assert_same_state(
    ours: State,
    exact: State,
    before: State,
    bounds: Bounds,
    what: str,
    roundings: float = 1.0,
    decayed: bool = False,
) -> bool:
    """Compare states; return whether a rounding tie of a low-precision moment made them and the parameters differ.

    `decayed` is whether moments have weight decay, which may cancel a gradient to nothing.
    """
    assert ours.keys() == exact.keys(), what
    assert ours["step"].equal(exact["step"]), f"{what}: step {ours['step']}, not {exact['step']}"
    apart = False
    # The momentum precedes the residual that is computed from it, and the second moment precedes ratios to it.
    for key in sorted(ours.keys() - {"step"}, key=lambda key: (key != "exp_avg_sq", key)):
        mine, true, old = real(ours[key]), real(exact[key]), real(before.get(key, torch.zeros_like(exact[key])))
        if mine.dtype in LOW:
            terms = old.abs() + true.abs().amax() if decayed and true.numel() else old
            apart |= assert_rounded(mine, true, terms, f"{what} {key}")
        elif mine.dtype in (torch.int8, torch.uint8):
            apart |= assert_same_codes(mine, exact[key], bounds, f"{what} {key}", key)
        else:
            relative = key == "exp_avg_scale" and "exp_avg_sq_scale" in ours and ours["exp_avg"].dtype == torch.uint8
            exact_to = TOLERANCE[mine.dtype][2] * (ROUNDINGS_OF_A_RATIO if relative else 1)
            bound = TIE if apart and (relative or key.startswith("exp_avg_res")) else roundings * exact_to
            assert_norm(mine, true, bound * size(true, old), f"{what} {key}")
    return apart


def assert_same_parameter(
    ours: Tensor, exact: Tensor, before: Tensor, *, apart: bool, what: str, loose: float = 1.0, roundings: float = 1.0
) -> None:
    mine, true, old = real(ours), real(exact), real(before)
    moved, bulk = size(true - old), size(true, old)
    info = torch.finfo(mine.dtype)
    # A first step of 1e-6 ends among float16's subnormal numbers, which round by half of the smallest one.
    stored = roundings * info.eps / 2 * (bulk + info.smallest_normal * math.sqrt(mine.numel()))
    if apart:
        assert_norm(mine, true, TIE * moved + stored, what)
    elif mine.dtype in LOW:
        assert_rounded(mine, true, old, what, loose)
    else:
        step_bound, bound, _ = TOLERANCE[mine.dtype]
        assert_norm(mine, true, loose * bound * bulk, f"{what} against the parameter")
        # Storing x rounds it by half an ulp, which exceeds the bound if the step is tiny relative to x.
        assert_norm(mine, true, step_bound * moved + stored, f"{what} against the step")


def load_weight(parameter: Tensor, state: State) -> Tensor:
    """Return the value that a parameter represents together with its aux state; without it, the parameter itself."""
    kept = {name: value for name, value in state.items() if name in AUX_STATE_NAMES}
    return rounding.load_weight(parameter.detach(), kept) if kept else parameter.detach()


def assert_weights(
    case: Case, ours: Tensor, state: State, exact: Tensor, before: Tensor, *, apart: bool, what: str, roundings: float
) -> None:
    """Check a parameter as its rounding mode requires."""
    whole, loose = load_weight(ours, state), roundings * LOOSE[case.kind]
    if case.options.get("weight_rounding") == "stochastic" and not apart:
        mine, true, old = real(whole), real(exact), real(before)
        away = (ordinal(mine) - ordinal(true.to(mine.dtype))).abs()
        away[(mine.double() - true).abs() <= loose * 2e-7 * (true.abs() + old.abs())] = 0
        assert (away <= 1).all(), f"{what}: stored {away.max()} ulps away"
        return
    if case.options.get("weight_rounding") == "kahan8" and not apart:
        mine, true, old = real(whole).double(), real(exact), real(before)
        info = torch.finfo(ours.dtype)
        allowed = info.eps / 480 * (true.abs() + info.smallest_normal) + loose * 4e-6 * (true - old).abs()
        assert ((mine - true).abs() <= allowed).all(), f"{what}: more is lost than half of what 8 bits keep"
        return
    if whole.dtype != ours.dtype:
        assert real(ours).equal(real(whole).to(ours.dtype)), f"{what}: not the rounding of what it stands for"
    assert_same_parameter(whole, exact, before, apart=apart, what=what, loose=loose, roundings=roundings)


def copy_into(
    twin: Optimizer, twins: Sequence[Parameter], optimizer: Optimizer, parameters: Sequence[Parameter]
) -> None:
    """Copy the parameters and the state of the optimizer under test to its float64 twin."""
    for exact, parameter in zip(twins, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        exact.data.copy_(load_weight(parameter, state))
        for key, value in state.items():
            if key not in AUX_STATE_NAMES:
                twin.state[exact][key].copy_(value)


def copied(state: State) -> State:
    return {key: value.clone() for key, value in state.items()}


@pytest.mark.parametrize("beta2", [0.999, 0.9999, 0.9999999])
def test_bias_corrections_keep_their_digits(beta2: float, backend: str) -> None:
    """With one gradient, r is g / (|g| + eps) at every step."""
    dtype, rtol = (torch.float64, 4e-15) if backend in ("reference", "foreach") else (torch.float32, 2e-7)
    param, lr, decay = Parameter(torch.tensor([2.0, -3.0], dtype=dtype)), 0.125, 0.1
    optimizer = Lamb([param], lr=lr, betas=(0.95, beta2), eps=0.5, weight_decay=decay, adam=True, backend=backend)
    expected, g = [2.0, -3.0], [1.5, -0.25]
    for step in range(1, 6):
        param.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        expected = [x * (1 - lr * decay) - lr * a / (abs(a) + 0.5) for x, a in zip(expected, g, strict=True)]
        torch.testing.assert_close(param.tolist(), expected, rtol=rtol * step, atol=0)


@pytest.mark.parametrize(("backend", "case"), runs(CASES), indirect=["backend"])
def test_a_step_equals_the_float64_reference(backend: str, case: Case) -> None:
    check_steps(backend, case)


@for_every("name", ("paper-v5", "everything", "came-published", "came-last-two", "came-everything", "lars-everything"))
def test_foreach_in_groups_of_one_tensor(name: str) -> None:
    """The table steps several tensors together, as it does small ones."""
    with mock.patch.object(lists, "CACHED_BYTES", 1):
        check_steps("foreach", BY_ID[name])


def check_steps(backend: str, case: Case, roundings: float = 1.0, steps: int = STEPS) -> None:
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    twins, twin = twins_of(case, parameters)
    for step in range(steps):
        gradients = case.gradients(step)
        for each in (optimizer, twin):
            case.set_lr(each, step)
        check_step(case, parameters, optimizer, twins, twin, gradients, f"step {step}", roundings)
        for gradient, untouched in zip(gradients, case.gradients(step), strict=True):
            assert gradient is None or (untouched is not None and gradient.equal(untouched)), "a gradient was written"


def twins_of(case: Case, parameters: Sequence[Parameter]) -> tuple[list[Parameter], Optimizer]:
    """Return float64 copies of the parameters, and the reference backend's optimizer of them."""
    twins = [Parameter(torch.empty(p.shape, dtype=double(p.dtype)).copy_(p.detach())) for p in parameters]
    return twins, case.in_double().optimizer(twins, "reference")


def check_step(
    case: Case,
    parameters: Sequence[Parameter],
    optimizer: Optimizer,
    twins: Sequence[Parameter],
    twin: Optimizer,
    gradients: Sequence[Tensor | None],
    what: str,
    roundings: float = 1.0,
) -> None:
    """Check that one step from the present state of the optimizer under test equals the float64 twin's.

    `roundings` is how often an element may be rounded; the table of cases allows one rounding.
    """
    copy_into(twin, twins, optimizer, parameters)
    before = [exact.detach().clone() for exact in twins]
    states = [copied(twin.state[exact]) if exact in twin.state else {} for exact in twins]
    idle = [
        (p, p.detach().clone(), copied(optimizer.state.get(p, {})))
        for p, gradient in zip(parameters, gradients, strict=True)
        if gradient is None
    ]
    set_gradients(twins, [None if g is None else g.to(double(g.dtype), copy=True) for g in gradients])
    set_gradients(parameters, gradients)
    optimizer.step()
    with rounding_watched() as bounds:
        twin.step()
    for parameter, value, held in idle:
        assert parameter.equal(value), f"{what}: a parameter without a gradient was written"
        assert all(tensor.equal(held[key]) for key, tensor in optimizer.state.get(parameter, {}).items()), what
    for leaf, parameter, exact, old, state in zip(case.leaves, parameters, twins, before, states, strict=True):
        if parameter.grad is None:
            continue
        where = f"{leaf.name}, {what}"
        assert (parameter in optimizer.state) == (exact in twin.state), where
        apart = False
        if parameter in optimizer.state:
            mine = {key: value for key, value in optimizer.state[parameter].items() if key not in AUX_STATE_NAMES}
            decayed = case.kind is Lars
            apart = assert_same_state(mine, twin.state[exact], state, bounds, where, roundings, decayed)
        kept = optimizer.state.get(parameter, {})
        assert_weights(case, parameter, kept, exact, old, apart=apart, what=where, roundings=roundings)
    ours, truth = optimizer.telemetry(), twin.telemetry()
    assert ours.names == truth.names
    rtol = TIE if any("state_dtype" in options for options in (case.options, *case.groups)) else roundings * 1e-5
    torch.testing.assert_close(figures(ours), figures(truth), rtol=rtol, atol=0)


def test_cames_residual_is_that_of_the_average_as_stored() -> None:
    """A backend may therefore read m back; the state after one step shows which m the residual used."""
    param, g = Parameter(torch.randn(6, 5)), torch.randn(6, 5)
    param.grad = g
    few_bits: dict[str, Any] = {"state_dtype": "int8", "min_8bit_size": 1, "factor": "last_two"}
    optimizer = Came([param], lr=0.1, clip_threshold=1e9, backend="reference", **few_bits)
    optimizer.step()
    state = optimizer.state[param]
    row, col = state["exp_avg_sq_row"].double(), state["exp_avg_sq_col"].double()
    u = g.double() * (row / row.mean()).rsqrt().unsqueeze(1) * col.rsqrt()
    m = codec.decode(state["exp_avg"], state["exp_avg_scale"]).double()
    as_stored, as_computed = (((u - each) ** 2).mean(dim=1) * 1e-4 for each in (m, 0.1 * u))
    torch.testing.assert_close(state["exp_avg_res_row"].double(), as_stored, rtol=1e-5, atol=0)
    assert (as_computed / as_stored - 1).abs().max() > 1e-4


NORMS = (0.0, 0.25, 1.0, 3.0, math.nan)
BOUNDS = (None, (0.5, 2.0), (0.0, 1.0), (0.01, 10.0))
EDGES = list(itertools.product(NORMS, NORMS, BOUNDS, BOUNDS))


def test_trust_ratio_table() -> None:
    for weight_norm, update_norm, weight_bounds, ratio_bounds in [*EDGES, (math.inf, 1.0, (0.0, 10.0), None)]:
        ratio = reference.trust_ratio(torch.tensor(weight_norm), torch.tensor(update_norm), weight_bounds, ratio_bounds)
        expected = scalar_formulas.trust_ratio(weight_norm, update_norm, weight_bounds, ratio_bounds)
        edge = (weight_norm, update_norm, weight_bounds, ratio_bounds)
        assert ratio.item() == pytest.approx(expected, rel=1e-6, nan_ok=True), edge


@pytest.mark.parametrize("decay_mode", ["ratio", "decoupled", "l2"])
def test_a_weight_that_is_not_finite_stays_out_of_the_moments(decay_mode: Any, backend: str) -> None:
    """With decay in the gradient, only the moments of the weight become NaN."""
    x, g = torch.linspace(-1, 1, 64 * 24).view(64, 24), torch.linspace(2, 3, 64 * 24).view(64, 24)
    x[3, 4], x[7, 5] = math.nan, math.inf
    for weight_decay in (0.0, 0.1):
        param = Parameter(x.clone())
        set_gradients([param], [g])
        optimizer = Lamb([param], lr=0.1, weight_decay=weight_decay, decay_mode=decay_mode, backend=backend)
        optimizer.step()
        bad = 2 if decay_mode == "l2" and weight_decay else 0
        for name in ("exp_avg", "exp_avg_sq"):
            assert int((~optimizer.state[param][name].isfinite()).sum()) == bad, name


def test_moments_at_the_end_of_their_range(backend: str) -> None:
    """A second moment that has overflowed makes the update 0, as in torch's Adam, not NaN."""
    param = Parameter(torch.ones(64, 24))
    set_gradients([param], [torch.full((64, 24), 3.4e38)])
    optimizer = Lamb([param], lr=0.1, weight_decay=0.0, state_dtype="bfloat16", backend=backend)
    optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].isinf().all()
    assert param.equal(torch.ones(64, 24))


@pytest.mark.parametrize("stacked", [False, True], ids=["whole", "stacked"])
def test_trust_ratio_table_in_every_backend(backend: str, stacked: bool) -> None:
    """The tensors have 16 equal elements; their norms and the norms of their updates are the table's."""
    if interpreted() and not stacked:
        pytest.skip("ten seconds in the interpreter, which runs the same kernels for stacked tensors")
    both = zip(BOUNDS, BOUNDS[::-1], strict=True) if interpreted() else itertools.product(BOUNDS, BOUNDS)
    for weight_bounds, ratio_bounds in both:
        # The update of a NaN weight is not 0: u = r + weight_decay * x.
        pairs = [(w, u) for w, u in itertools.product(NORMS, NORMS) if not (math.isnan(w) and u == 0)]
        x = torch.tensor([[w / 4] * 16 for w, _ in pairs])
        # With these options u = g / (g + 1), so g = u / (1 - u).
        g = torch.tensor([[(u / 4) / (1 - u / 4)] * 16 for _, u in pairs])
        parameters = [Parameter(x.clone())] if stacked else [Parameter(row.clone()) for row in x]
        set_gradients(parameters, [g] if stacked else list(g))
        groups = [{"params": parameters, "stacked": stacked}]
        optimizer = Lamb(
            groups,
            lr=0.5,
            betas=(0, 0),
            eps=1.0,
            bias_correction=False,
            weight_norm_bounds=weight_bounds,
            trust_ratio_bounds=ratio_bounds,
            backend=backend,
        )
        optimizer.step()
        expected = [scalar_formulas.trust_ratio(w, u, weight_bounds, ratio_bounds) for w, u in pairs]
        assert optimizer.telemetry().trust_ratio.tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)
        after = torch.cat([p.detach().view(-1, 16) for p in parameters])[:, 0].tolist()
        moved = [w / 4 - 0.5 * q * u / 4 for (w, u), q in zip(pairs, expected, strict=True)]
        assert after == pytest.approx(moved, rel=1e-5, abs=1e-7, nan_ok=True)


EXTREMES: dict[str, tuple[float, float, dict[str, Any]]] = {
    "large-weights": (1e20, 1.0, {}),
    "small-weights": (1e-24, 1.0, {}),
    "large-gradients-clipped": (1.0, 1e20, {"max_grad_norm": 1.0}),
    "large-gradients": (1.0, 1e19, {}),
    "large-gradients-finite": (1.0, 1e12, {"skip_nonfinite": True}),  # gradients above a norm of 2^53 are skipped
    "small-gradients-clipped": (1.0, 1e-23, {"max_grad_norm": 1e-24, "weight_decay": 0.0}),
}


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_norms_neither_overflow_nor_vanish(extreme: str, size: int, kind: Kind, backend: str) -> None:
    """The values are in float32's range, but their squares, or the sums of squares, are not."""
    weight, gradient, options = EXTREMES[extreme]
    x, g = weight * torch.randn(size), gradient * (torch.rand(size) - 0.3)
    results = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        parameter = Parameter(x.to(dtype, copy=True))
        parameter.grad = g.to(dtype)
        optimizer = kind([parameter], **{"lr": 0.1, "weight_decay": 0.1, "backend": name, **options})
        optimizer.step()
        results.append((parameter, optimizer.state[parameter]["exp_avg"], optimizer.telemetry()))
    (ours, moment, telemetry), (exact, true, truth) = results
    assert telemetry.skipped == 0
    assert_same_parameter(ours, exact, x, apart=False, what="x")
    assert_norm(moment, true, 1e-6 * float(true.norm()), "exp_avg")
    torch.testing.assert_close(figures(telemetry), figures(truth), rtol=1e-5, atol=0)


def test_sums_of_squares_have_the_digits_of_float64(backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        of = bucket("lamb", (300, 257), (9001,), (3, 0), dtype=dtype)
        kernel = kernels.kernel(backend, "lamb")([of])
        kernel.prepare()
        expected = sum(float(g.double().square().sum()) for g in of.grads)
        assert float(kernel.square_sum()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [1e10, 1e12, 1e15])
@pytest.mark.parametrize("width", [1, 7], ids=["an-element", "a-row"])
@pytest.mark.parametrize("shape", [(8, 7), (64, 96)], ids=str)
def test_rows_of_zeros_beside_large_gradients(shape: tuple[int, int], width: int, size: float, backend: str) -> None:
    """A row of zeros is 1e-42 of the mean of rows; a division by 0 once made the zeros, and then all weights, NaN."""
    torch.manual_seed(6)
    x, g = torch.randn(shape), torch.zeros(shape)
    g[1, :width] = size * (0.5 + torch.rand(width))
    results = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        parameter = Parameter(x.to(dtype, copy=True))
        optimizer = Came([parameter], lr=0.1, backend=name)
        for _ in range(2):
            parameter.grad = g.to(dtype)
            optimizer.step()
        results.append((parameter, optimizer.state[parameter], optimizer.telemetry()))
    (ours, state, telemetry), (exact, true, truth) = results
    assert_same_parameter(ours, exact, x, apart=False, what="x", loose=LOOSE[Came])
    for key, value in true.items():
        assert_norm(state[key], value, 1e-6 * float(value.norm()), key)
    torch.testing.assert_close(figures(telemetry), figures(truth), rtol=1e-5, atol=0)


@for_every(("value", "state_dtype"), itertools.product((math.inf, 2e-37, 2e-38), ("int8", "int4")))
@pytest.mark.parametrize("kind", [Lamb, Lars], ids=["lamb", "lars"])
def test_blocks_at_the_ends_of_float32(backend: str, kind: Any, value: float, state_dtype: str) -> None:
    """A nonfinite block has a scale of NaN and codes of 0; the inverse of a tiny scale would be infinite."""
    if kind is Lars and backend == "cpu":
        pytest.skip("the C library keeps no momentum of LARS in blocks")
    states = []
    for name in (backend, "reference"):
        parameter = Parameter(torch.zeros(2, 512))
        parameter.grad = torch.linspace(0.5, 1, 1024).view(2, 512)
        parameter.grad[1, 256:] *= value
        optimizer = kind([parameter], lr=0.1, backend=name, state_dtype=state_dtype, min_8bit_size=0)
        optimizer.step()
        states.append(optimizer.state[parameter])
    ours, exact = states
    torch.testing.assert_close(ours["exp_avg_scale"], exact["exp_avg_scale"], rtol=1e-6, atol=1e-44, equal_nan=True)
    assert exact["exp_avg_scale"].isfinite().sum() == (3 if math.isinf(value) else 4)
    codes = [codec.unpack_int4(each["exp_avg"]) if state_dtype == "int4" else each["exp_avg"] for each in states]
    assert (codes[0].int() - codes[1].int()).abs().max() <= 1


def test_a_second_moment_that_is_not_0_has_a_code(backend: str) -> None:
    parameter = Parameter(torch.zeros(2, 256))
    parameter.grad = torch.full((2, 256), 1e-6)
    parameter.grad[:, 0], parameter.grad[:, -1] = 1.0, 0.0
    optimizer = Lamb([parameter], lr=0.1, backend=backend, state_dtype="int8", min_8bit_size=0)
    optimizer.step()
    codes = optimizer.state[parameter]["exp_avg_sq"]
    assert (codes == 0).equal(parameter.grad == 0)


@pytest.mark.parametrize(
    ("bad", "first"),
    [(math.nan, True), (-math.inf, False)],
    ids=["nan-first-step", "-inf-later-step"],
)
@pytest.mark.parametrize(
    ("backend", "case"),
    runs(
        BY_ID[name]
        for name in (
            *("skip", "came-skip", "lars-skip", "came-float32-states-int8-everything"),
            "lars-float32-states-int8-everything",
            *("bfloat16-weights-kahan-states-int8-everything", "came-bfloat16-weights-kahan-states-int8-everything"),
        )
    ),
    indirect=["backend"],
)
def test_skip_nonfinite_changes_nothing_and_counts(backend: str, case: Case, bad: float, first: bool) -> None:
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    if not first:
        set_gradients(parameters, case.gradients(0))
        optimizer.step()
    before = [p.detach().clone() for p in parameters]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} if p in optimizer.state else {} for p in parameters]
    gradients = case.gradients(1)
    assert gradients[1] is not None
    gradients[1].view(-1)[-1] = bad
    set_gradients(parameters, gradients)
    optimizer.step()
    assert optimizer.telemetry().skipped == 1
    for parameter, old, state in zip(parameters, before, states, strict=True):
        assert parameter.equal(old)
        for key, value in optimizer.state.get(parameter, {}).items():
            assert value.equal(state.get(key, torch.zeros_like(value))), key

    # The next step equals the step of an optimizer without the bad gradient.
    set_gradients(parameters, case.gradients(2))
    optimizer.step()
    assert optimizer.telemetry().skipped == 1
    others = case.parameters()
    other = case.optimizer(others, backend)
    for step in (2,) if first else (0, 2):
        set_gradients(others, case.gradients(step))
        other.step()
    assert all(a.equal(b) for a, b in zip(parameters, others, strict=True))


@for_every(("bad", "state_dtype"), itertools.product((math.nan, math.inf), (None, torch.bfloat16, "int8")))
def test_without_skip_nonfinite_only_the_bad_parameter_suffers(
    kind: Kind, backend: str, bad: float, state_dtype: Any
) -> None:
    case = Case("nonfinite", {"state_dtype": state_dtype, "min_8bit_size": 1}, ZOO[:2]).of(kind)
    if not case.runs_on(backend):
        return
    parameters = case.parameters()
    gradients = case.gradients(0)
    assert gradients[0] is not None
    gradients[0][0, 0] = bad
    set_gradients(parameters, gradients)
    optimizer = case.optimizer(parameters, backend)
    optimizer.step()
    assert not parameters[0].isfinite().all()
    assert parameters[1].isfinite().all()
    first, second = torch.stack(list(figures(optimizer.telemetry()).values()), dim=1).isfinite().all(dim=1)
    assert second
    assert not first


IN_FLOAT64 = Case("float64", {}, BLOCKS, ({},), torch.float64)
"""A case that the C library does not support; foreach steps it."""


def test_the_cpu_backend_says_what_it_does_not_do_and_auto_hands_it_to_foreach() -> None:
    results = []
    for backend in ("cpu", "auto", "foreach"):
        parameters = IN_FLOAT64.parameters()
        before = [p.detach().clone() for p in parameters]
        set_gradients(parameters, IN_FLOAT64.gradients(0))
        if backend == "cpu":
            with pytest.raises((ValueError, RuntimeError), match=r"(?s)cpu.*its dtype is torch.float64"):
                IN_FLOAT64.optimizer(parameters, backend).step()
            assert_bitwise(parameters, before)
            continue
        optimizer = IN_FLOAT64.optimizer(parameters, backend)
        optimizer.step()
        text = optimizer.explain()
        assert "foreach" in text
        assert ("not cpu: its dtype is torch.float64" in text) == (backend == "auto"), text
        results.append(parameters)
    assert_bitwise(*results)


def test_auto_picks_a_backend_for_the_options_of_each_group() -> None:
    """The C library has no cautious step, and would take a plain one."""
    results = []
    for backend in ("auto", "foreach"):
        torch.manual_seed(0)
        params = [Parameter(torch.randn(4, 4)) for _ in range(2)]
        groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "cautious": True}]
        optimizer = Lamb(groups, lr=0.1, backend=backend)
        for _ in range(3):
            set_gradients(params, [torch.randn(4, 4) for _ in params])
            optimizer.step()
        results.append(params[1])
    assert results[0].equal(results[1])


@pytest.mark.parametrize(
    ("backend", "case"),
    runs(BY_ID[name] for name in ("mixed-paper-v5", "came-mixed-published", "lars-mixed-paper")),
    indirect=["backend"],
)
def test_an_explicit_backend_is_the_one_that_runs(case: Case, backend: str) -> None:
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    set_gradients(parameters, case.gradients(0))
    optimizer.step()
    text = optimizer.explain()
    assert set(re.findall(r"^group \d+: (\w+)", text, re.MULTILINE)) == {backend}, text
