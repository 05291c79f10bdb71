"""16-bit weights: every 16-bit float, and the loss over thousands of steps; changes of precision."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn._kernels import codec, rounding
from bighorn._kernels.arithmetic import count_step
from bighorn._kernels.rounding import AUX_STATE, LOW, Rounding
from bighorn._optim.state import StateTensorSpec
from tests.support.cases import Kind
from tests.support.optimizer_runs import assert_same_everything
from tests.support.tables import for_every


def floats(dtype: torch.dtype) -> Tensor:
    """Return all finite floats of a 16-bit dtype, including -0."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return every[every.isfinite()]


def bits_for(shape: tuple[int, ...], t: int = 1, seed: int = 0) -> Tensor:
    index = torch.arange(math.prod(shape)).view(shape)
    return rounding.random_bits(rounding.rng_key(seed, 0), torch.tensor(float(t)), index)


# ---- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("way", rounding.ROUNDING_MODES)
def test_every_16_bit_float_is_stored_as_it_is(way: Rounding, dtype: torch.dtype) -> None:
    values = floats(dtype)
    for bits in (0, rounding.WORD):
        stored = rounding.store_weight(values.float(), dtype, way, torch.full(values.shape, bits))
        assert stored.pop("x").equal(values)
        assert rounding.load_weight(values, stored).equal(values.float())


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_stochastic_rounding_is_unbiased(dtype: torch.dtype) -> None:
    """Of all bits that it uses, the share that takes the upper neighbour is the distance from the lower one."""
    lower = floats(dtype).sort().values[1:-1:499].double()
    upper = torch.nextafter(lower.to(dtype), torch.tensor(torch.inf, dtype=dtype)).double()
    dropped = rounding.DROPPED[dtype]
    bits = torch.arange(2**dropped) << (32 - dropped)
    for share in (2.0**-dropped, 0.25, 0.5, 0.77, 1 - 2.0**-dropped):
        for below, above in zip(lower, upper, strict=True):
            value = (below + share * (above - below)).float()
            stored = rounding.stochastic(value.expand(len(bits)), dtype, bits.clone()).double()
            assert ((stored == below) | (stored == above)).all()
            assert abs((stored == above).double().mean() - share) <= 2.0**-dropped


def test_random_bits_are_what_was_asked_for() -> None:
    """Bits are reproducible, differ by seed, parameter, step and position, and each bit is evenly distributed."""
    shape = (200_000,)
    drawn = bits_for(shape)
    assert drawn.equal(bits_for(shape))
    others = [bits_for(shape, seed=2**40), bits_for(shape, t=2), bits_for(shape, seed=1)]
    others.append(rounding.random_bits(rounding.rng_key(0, 1), torch.tensor(1.0), torch.arange(*shape)))
    others.append(rounding.random_bits(rounding.rng_key(0, 0), torch.tensor(1.0), torch.arange(*shape) + 2**32))
    for a, b in itertools.combinations([drawn, *others, drawn.roll(1)], 2):
        assert abs((a == b).double().mean().item()) < 1e-3
        correlation = torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()
        assert abs(correlation) < 4.5 / math.sqrt(*shape)
    for bit in range(32):
        share = (drawn >> bit & 1).double().mean().item()
        assert abs(share - 0.5) < 4.5 * 0.5 / math.sqrt(*shape), bit
    assert drawn.min() >= 0
    assert drawn.max() <= rounding.WORD


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_8_bits_of_compensation_keep_half_a_256th_of_an_ulp(dtype: torch.dtype) -> None:
    """Only float16 values next to the smallest normal number keep less; the weight is within half an ulp."""
    torch.manual_seed(0)
    bits, least = (7, -126) if dtype == torch.bfloat16 else (10, -14)
    values = torch.randn(200_000) * torch.logspace(-9, 2, 200_000)
    values = values[(values.abs() / 2.0**least).log2().abs() > 1e-3]
    kept = rounding.store_weight(values, dtype, "kahan8", None)
    weights = kept.pop("x")
    ulps = 2.0 ** (values.abs().log2().floor().clamp(min=least) - bits)
    assert ((weights.float() - values).abs() <= ulps * 0.502).all()
    assert ((rounding.load_weight(weights, kept) - values).abs() <= ulps / 256 * 0.54).all()
    in_16 = {"compensation": rounding.recoded(kept["compensation"], torch.int16, dtype)}
    assert rounding.load_weight(weights, in_16).equal(rounding.load_weight(weights, kept))
    assert rounding.recoded(in_16["compensation"], torch.int8, dtype).equal(kept["compensation"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_tiny_updates_over_thousands_of_steps(dtype: torch.dtype) -> None:
    """Compared with a sum in float64, rounding to nearest loses all updates, and the other modes keep them."""
    steps, update, count = 3_750, -8e-7, 512
    start = torch.linspace(0.51, 1.0, count).to(dtype)  # below 0.5, a dtype keeps updates of half the size
    exact = start.double() + steps * update
    results: dict[str, Tensor] = {}
    for way in rounding.ROUNDING_MODES:
        x, kept = start.clone(), {name: torch.zeros(count, dtype=of) for name, of in rounding.AUX_STATE[way].items()}
        for step in range(steps):
            bits = bits_for((count,), t=step + 1) if way == "stochastic" else None
            kept = rounding.store_weight(rounding.load_weight(x, kept) + update, dtype, way, bits)
            x = kept.pop("x")
        results[way] = rounding.load_weight(x, kept).double()
    for way in ("nearest", "kahan8"):  # the update is less than half of what either keeps
        assert results[way].equal(start.double())
    for way in ("kahan", "master"):
        # Each addition in float32 rounds to half of 2**-24 at these sizes.
        assert (results[way] - exact).abs().max() <= steps * 2**-25
        torch.testing.assert_close(results[way], results["master"], rtol=0, atol=steps * 2**-25)
    # Each step moves by an ulp with probability update / ulp.
    noise = math.sqrt(steps * abs(update) * torch.finfo(dtype).eps / 2)
    error = results["stochastic"] - exact
    assert error.abs().max() <= 5 * noise
    assert abs(error.mean().item()) <= 4.5 * noise / math.sqrt(count)


@pytest.mark.parametrize("way", ["kahan", "master"])
def test_a_parameter_that_somebody_else_writes(way: Rounding, kind: Kind) -> None:
    """A written value is kept exactly with masters, to half an ulp with a compensation; other values do not change."""
    torch.manual_seed(6)
    parameter = Parameter(torch.randn(8, 40).bfloat16())
    optimizer = kind([parameter], lr=1e-4, weight_rounding=way)
    for _ in range(5):
        parameter.grad = torch.randn(8, 40).bfloat16()
        optimizer.step()
    written, before = torch.randn(4, 40).bfloat16() * 1e-3, parameter.detach().clone()
    kept = {name: optimizer.state[parameter][name].clone() for name in rounding.AUX_STATE[way]}
    with torch.no_grad():
        parameter[:4] = written
    whole = rounding.load_weight(parameter.detach(), kept)
    ulp = 2.0 ** (written.float().abs().log2().floor() - 7)
    assert ((whole[:4] - written).abs() <= (0 if way == "master" else ulp / 2)).all()
    assert whole[4:].equal(rounding.load_weight(before, kept)[4:])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (parameter[:4].float() - written).abs().max() < 0.02


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"], indirect=True)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_parameter_that_somebody_else_sets_to_0(zero: float, backend: str, kind: Kind) -> None:
    """The weight is 0, also for the trust ratio: the bits below 0's would be a NaN, and the bits above have a norm."""
    torch.manual_seed(6)
    parameter = Parameter(torch.randn(8, 40).bfloat16())
    optimizer = kind([parameter], lr=1e-4, weight_rounding="kahan", backend=backend)
    parameter.grad = torch.randn(8, 40).bfloat16()
    optimizer.step()
    kept = {"compensation": optimizer.state[parameter]["compensation"]}
    assert (kept["compensation"] < 0).any()
    with torch.no_grad():
        parameter.fill_(zero)
    assert rounding.load_weight(parameter.detach(), kept).count_nonzero() == 0
    optimizer.step()
    if not isinstance(optimizer, Came):
        assert optimizer.telemetry().weight_norm.tolist() == [0]
    assert parameter.isfinite().all()


# ---- a change of precision --------------------------------------------------------------------------------------

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-states": {"state_dtype": "bfloat16"},
    "int8-states": {"state_dtype": "int8"},
    "int4-states": {"state_dtype": "int4"},
    "int8-small-too": {"state_dtype": "int8", "min_8bit_size": 1},
    "kahan": {"weight_rounding": "kahan"},
    "kahan8": {"weight_rounding": "kahan8"},
    "master-int8": {"weight_rounding": "master", "state_dtype": "int8"},
}
SHAPES = ((64, 70), (15, 301), (20, 9), (40,))


def trained(kind: Kind, options: dict[str, Any], steps: int = 3) -> tuple[list[Parameter], Any]:
    torch.manual_seed(8)
    parameters = [Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES]
    optimizer = kind(parameters, lr=0.01, weight_decay=0.1, **options)
    step(parameters, optimizer, steps)
    return parameters, optimizer


def step(parameters: list[Parameter], optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)[..., :].bfloat16()
        optimizer.step()


@for_every(("before", "after"), [*itertools.permutations(PRECISIONS, 2)])
def test_another_precision_from_now_on(before: str, after: str, kind: Kind) -> None:
    """The option changes in the group or in a checkpoint's group; moments stay the same up to their precision."""
    parameters, optimizer = trained(kind, PRECISIONS[before])
    new = {"state_dtype": None, "min_8bit_size": 4096, "weight_rounding": "nearest", **PRECISIONS[after]}
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0] |= new
    others = [copy.deepcopy(p) for p in parameters]
    other = kind(others, lr=0.01)
    other.load_state_dict(state)
    spec = kind(others, lr=0.01, **PRECISIONS[after])
    for ours, theirs in zip(parameters, others, strict=True):
        old, now = optimizer.state[ours], other.state[theirs]
        kept: Mapping[str, StateTensorSpec] = spec.algorithm.state_spec(spec.param_groups[0], theirs)
        declared = {"step": torch.zeros(()), **{name: each.like(theirs) for name, each in kept.items()}}
        assert {name: (value.dtype, value.shape) for name, value in now.items()} == {
            name: (value.dtype, value.shape) for name, value in declared.items()
        }
        for name in {"exp_avg", "exp_avg_sq"} & now.keys():
            a, b = (codec.dequantize(kind.algorithm.forms, name, each, theirs.shape).float() for each in (old, now))
            coarse = name == "exp_avg" and "int4" in (before[:4], after[:4])
            torch.testing.assert_close(b, a, rtol=2**-7, atol=float(a.abs().max()) / (7 if coarse else 100))
    optimizer.param_groups[0].update(new)
    for each, tensors in ((optimizer, parameters), (other, others)):
        torch.manual_seed(9)
        step(tensors, each, 2)
    for ours, theirs in zip(parameters, others, strict=True):
        assert ours.equal(theirs)
        assert all(value.equal(other.state[theirs][name]) for name, value in optimizer.state[ours].items())


def test_the_same_bits_for_a_name_wherever_its_parameter_stands(kind: Kind) -> None:
    """A rank with some of the parameters therefore draws the same bits for them as a rank with all of them."""
    torch.manual_seed(1)
    values, gradient = torch.randn(30, 20).bfloat16(), torch.randn(30, 20).bfloat16()
    results = []
    for names in (("a", "b"), ("b", "a"), ("b",)):
        named = [(name, Parameter(values.clone())) for name in names]
        optimizer = kind(named, lr=1e-3, weight_rounding="stochastic")
        for _ in range(3):
            for _, parameter in named:
                parameter.grad = gradient.clone()
            optimizer.step()
        results.append(dict(named))
    assert results[0]["b"].equal(results[1]["b"])
    assert results[0]["b"].equal(results[2]["b"])
    assert not results[0]["a"].equal(results[0]["b"])


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
def test_random_bits_beyond_the_last_count(kind: Kind, backend: str) -> None:
    """From step 2^24 on, a float32 count stayed the same: all steps drew the same bits, and 83% never moved."""
    weight = Parameter(torch.ones(4096).bfloat16())
    lr = 1.0 if kind is Lars else 1e-3  # times LARS's trust coefficient
    optimizer = kind([weight], lr=lr, weight_rounding="stochastic", backend=backend)
    moved, counts = torch.zeros(4096, dtype=torch.bool), []
    for step in range(40):
        weight.grad = torch.ones(4096).bfloat16()
        if step == 1:
            optimizer.state[weight]["step"].fill_(2.0**24 - 2)
        before = weight.detach().clone()
        optimizer.step()
        if step >= 1:
            counts.append(float(optimizer.state[weight]["step"]))
            moved |= weight != before
    assert counts[:5] == [2.0**24 - 1, 2.0**24, 2.0**24 + 2, 2.0**24 + 4, 2.0**24 + 6]
    assert sorted(set(counts)) == counts
    assert moved.float().mean() > 0.9


def test_counts_grow_by_one_up_to_the_last() -> None:
    for start in (0.0, 2.0**22, 2.0**23 - 2, 2.0**23 + 1, 11184808.0, 2.0**24 - 5):
        count = torch.tensor(start)
        for i in range(1, 6):
            count_step([count], None)
            assert count == start + i
    for start in (2.0**24, 2.0**24 + 6, 2.0**25 - 2, 2.0**25, 2.0**30):
        count = torch.tensor(start)
        count_step([count], torch.tensor(False))
        assert count == start
        count_step([count], torch.tensor(True))
        assert count == torch.nextafter(torch.tensor(start), torch.tensor(torch.inf))


@pytest.mark.parametrize("backend", ["foreach", "cpu"])
def test_blocks_of_a_column_whose_one_element_dim_has_any_stride(backend: str) -> None:
    """A transposed row is contiguous with strides (1, n); blocks run along its rows of one element."""

    def scales(backend: str) -> Tensor:
        param = Parameter(torch.linspace(1, 2, 5).view(1, 5).t())
        assert param.stride() == (1, 5)
        optimizer = Lamb([param], lr=0.01, state_dtype="int8", min_8bit_size=1, backend=backend)
        param.grad = torch.linspace(-2, 1, 5).view(5, 1)
        optimizer.step()
        found: Tensor = optimizer.state[param]["exp_avg_scale"]
        return found

    torch.testing.assert_close(scales(backend), scales("reference"))


@pytest.mark.parametrize("way", ["stochastic", "kahan", "kahan8", "master"])
@pytest.mark.parametrize("casts_later", [False, True])
def test_weights_of_32_bits_are_left_as_they_are(way: Rounding, casts_later: bool, kind: Kind, backend: str) -> None:
    """LoRA has float32 weights beside bfloat16 ones, and trainers cast a model after they have made the optimizer."""

    def trained(*names: str, **options: Any) -> tuple[dict[str, Parameter], Any]:
        params = {name: Parameter(torch.linspace(-1, 1, 1200).view(40, 30)) for name in names}

        def cast() -> None:
            if "half" in params:
                params["half"].data = params["half"].data.bfloat16()

        if not casts_later:
            cast()
        optimizer = kind([*params.items()], lr=1e-3, backend=backend, **options)
        cast()
        for step in range(3):
            for param in params.values():
                param.grad = torch.linspace(-1, step + 1, 1200).view(40, 30).to(param.dtype)
            optimizer.step()
        return params, optimizer

    (plain, nearest), (alone, rounded) = trained("full"), trained("half", weight_rounding=way)
    params, optimizer = trained("full", "half", weight_rounding=way)
    full, half = params["full"], params["half"]
    assert_same_everything([full], optimizer, [plain["full"]], nearest)
    assert_same_everything([half], optimizer, [alone["half"]], rounded)
    assert set(AUX_STATE[way]) <= set(optimizer.state[half])
    lines = optimizer.explain().splitlines()
    assert sum(f"weight_rounding={way!r}" in line for line in lines) == 1
    assert sum("no weight_rounding needed" in line for line in lines) == 1
    again = kind([("full", full), ("half", half)], lr=1e-3, backend=backend, weight_rounding=way)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[full].keys() == optimizer.state[full].keys()


@pytest.mark.parametrize("state_dtype", ["int8", "int4"])
def test_elements_whose_gradients_stop_come_to_rest(state_dtype: Any, kind: Kind, backend: str) -> None:
    """To the nearest code their first moment stayed, their second one faded, and LAMB's weights exploded."""
    if backend == "cpu" and kind is Lars:
        pytest.skip("the backend has no LARS with moments in blocks")
    param = Parameter(torch.linspace(-1, 1, 2048).view(8, 256))
    optimizer = kind([param], lr=1e-3, weight_decay=0.0, state_dtype=state_dtype, min_8bit_size=1, backend=backend)
    for step in range(250):
        param.grad = torch.cos(torch.arange(2048.0) * (step + 1)).view(8, 256)
        if step >= 5:
            param.grad[:, 128:] = 0
        if step == 225:
            before = param.detach().clone()
        optimizer.step()
    moved = (param != before).float().mean(dim=0)
    assert bool((moved[:128] > 0).all())
    assert not bool(moved[128:].any())


def test_a_momentum_that_could_overflow_float16_is_refused() -> None:
    """One element of u can be clip_threshold times the root of their number, and infinite ones made NaN of weights."""
    param = Parameter(torch.ones(64, 64))
    optimizer = Came([param], lr=1e-3, clip_threshold=1000.0, state_dtype=torch.float16)
    optimizer.param_groups[0]["clip_threshold"] = 1024.0
    param.grad = torch.ones(64, 64)
    with pytest.raises(ValueError, match=r"float16.*65504.*clip_threshold=1024.*6\.55e\+04 in 4096"):
        optimizer.step()
    with pytest.raises(ValueError, match="bfloat16"):
        Came([param], lr=1e-3, clip_threshold=1e9, state_dtype=torch.float16)
    assert torch.equal(param, torch.ones(64, 64))


def test_a_layer_whose_gradients_stop_comes_to_rest_in_bfloat16(backend: str) -> None:
    """To the nearest bfloat16, 0.9 times the least numbers are these numbers, and the trust ratio made full steps."""
    param = Parameter(torch.linspace(-1, 1, 4096).view(16, 256))
    optimizer = Lamb([param], lr=1e-3, weight_decay=0.0, state_dtype=torch.bfloat16, backend=backend)
    for step in range(800):
        param.grad = torch.full_like(param, 1e-5) if step < 5 else torch.zeros_like(param)
        if step == 790:
            before = param.detach().clone()
        optimizer.step()
    assert torch.equal(param, before)
    assert bool(optimizer.state[param]["exp_avg"].any())
