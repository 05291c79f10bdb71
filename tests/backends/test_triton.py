"""The Triton backend without a GPU: test_interpreter.py runs this file, and test_triton_compile.py compiles it."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lamb, kernels
from bighorn.kernels import Bucket, LambOptions, codec, rounding
from bighorn.kernels.cpu.tensors import ROUNDING_MODES
from bighorn.kernels.triton import columns as of_tables
from bighorn.kernels.triton import device, lamb, launch_group, tables, trial
from bighorn.kernels.triton.lamb import LambLaunchGroup
from tests.support.cases import set_gradients
from tests.support.processes import LIMIT
from tests.support.triton_interpreter import compiled, interpreted, only_the_first_and_the_last

pytest.importorskip("triton")

OPTIONS = replace(trial.OPTIONS, eps=1e-6, weight_decay=0.1)


# ---- interpreted ------------------------------------------------------------------------------------------------


def bucket(
    *shapes: int | tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Bucket[LambOptions]:
    """Return rows with gradients and a nonzero state, in blocks if it is int8 or uint8.

    With uint8, the first moment has 4 bits.
    """
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype) for shape in shapes]
    state = {name: [torch.rand(shape).to(state_dtype) for shape in shapes] for name in ("exp_avg", "exp_avg_sq")}
    blocks = state_dtype in (torch.int8, torch.uint8)
    for name, square in (("exp_avg", False), ("exp_avg_sq", True)) if blocks else ():
        form = codec.MOMENT_FORMS[name][torch.uint8 if square and state_dtype == torch.int8 else state_dtype]
        coded = [codec.encode(torch.rand(shape) - (0 if square else 0.5), form) for shape in shapes]
        state |= {name: [codes for codes, _ in coded], f"{name}_scale": [scales for _, scales in coded]}
    for name, kept in rounding.AUX_STATE[options.get("weight_rounding", "nearest")].items():
        state[name] = [torch.zeros(x.shape, dtype=kept) for x in params]
    steps = [torch.tensor(3.0) for _ in shapes]
    grads: list[Tensor | None] = [torch.randn(shape).to(dtype) for shape in shapes]
    norms, numbers, firsts = torch.zeros(len(shapes), 3), list(range(len(shapes))), [2**32 - 7 for _ in shapes]
    options = {"blocks": blocks, "int4": state_dtype == torch.uint8, **options}
    return Bucket(
        replace(OPTIONS, **options), params, state, steps, steps, norms, grads, param_ids=numbers, row_offsets=firsts
    )


def everything(of: Bucket[LambOptions]) -> list[Tensor]:
    return [*of.params, *itertools.chain.from_iterable(of.state.values()), *of.steps, of.metrics]


def stepped(of: Bucket[LambOptions], *arguments: Any, kernel: Any = lamb.Lamb) -> list[Tensor]:
    stepper = kernel([of])
    stepper.prepare()
    stepper.step(*arguments)
    return everything(of)


@interpreted
def test_numbers_may_be_tensors() -> None:
    """Kernels read a learning rate, a scale and an apply mask on the device, without a copy to the host."""
    plain = stepped(bucket(5, 3000, lr=0.25), 0.5)
    given = stepped(bucket(5, 3000, lr=torch.tensor(0.25)), torch.tensor(0.5), torch.tensor(True))
    assert all(a.equal(b) for a, b in zip(plain, given, strict=True))


@interpreted
@pytest.mark.parametrize("adapt", [True, False])
def test_nothing_is_written_without_commit(adapt: bool) -> None:
    before = everything(bucket(5, 0, 9000, adapt=adapt))
    after = stepped(bucket(5, 0, 9000, adapt=adapt), torch.tensor(float("nan")), torch.tensor(False))
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))


@interpreted
@pytest.mark.parametrize("way", ROUNDING_MODES)
@pytest.mark.parametrize("state_dtype", [torch.int8, torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adapt", [True, False])
def test_a_step_in_few_bits_equals_the_reference(adapt: bool, state_dtype: torch.dtype, way: rounding.Rounding) -> None:
    """Rows are whole blocks, more than a block or less than one; both backends draw the same random bits."""
    shapes = (3, 512), (5, 260), (6, 20), (2, 3, 100 if state_dtype == torch.uint8 else 101)
    ours, exact = (
        bucket(*shapes, dtype=torch.bfloat16, state_dtype=state_dtype, weight_rounding=way, adapt=adapt) for _ in "12"
    )
    stepped(ours)
    kernels.kernel("reference", "lamb")([exact]).step()
    # A device uses fused multiply-adds in exp_avg, and rounds some bfloat16 moments the other way: 16 of 1,536 on an
    # H100, where a trust ratio, and with it all of x, changed by 1.03e-4.
    fused = state_dtype == torch.bfloat16 and not device.interpreted()
    torch.testing.assert_close(ours.metrics, exact.metrics, rtol=2e-4 if fused else 1e-4, atol=0)
    for name, columns in columns_of(ours).items():
        for mine, true in zip(columns, columns_of(exact)[name], strict=True):
            apart = (mine.double() - true.double()).abs()
            near = 5e-4 * true.double().abs().max() if fused and name == "x" else 1e-5 * true.double().abs()
            assert (apart > near).double().mean() < (0.02 if fused else 0.005), name
            limit = 1 if mine.dtype in (torch.int8, torch.uint8) else 0.01 * true.double().abs().max() + 1e-6
            assert apart.max() <= limit, name


def columns_of(of: Bucket[LambOptions]) -> dict[str, list[Tensor]]:
    """Return the state, and the values of parameters with their aux state."""
    kept = {name: of.state[name] for name in rounding.AUX_STATE[of.options.weight_rounding]}
    beside = [{name: tensors[i] for name, tensors in kept.items()} for i in range(len(of.params))]
    weights = [rounding.load_weight(x, each) if kept else x for x, each in zip(of.params, beside, strict=True)]
    state = {name: tensors for name, tensors in of.state.items() if name not in kept}
    if of.options.int4:
        state["exp_avg"] = [codec.unpack_int4(each).to(torch.int8) for each in state["exp_avg"]]
    return {"x": weights, **state}


@interpreted
def test_slices_of_a_stacked_parameter_draw_the_bits_of_this_step() -> None:
    """The program of one slice counts the step for all, before the second pass."""
    made = (bucket((3, 512), (3, 512), dtype=torch.bfloat16, weight_rounding="stochastic") for _ in "12")
    ours, exact = (replace(of, steps=[of.steps[0]] * 2, unique_steps=of.steps[:1]) for of in made)
    stepped(ours)
    kernels.kernel("reference", "lamb")([exact]).step()
    for mine, true in zip(ours.params, exact.params, strict=True):
        assert (mine != true).double().mean() < 0.01


@interpreted
def test_steps_above_2_to_the_24th_are_counted_and_draw_other_bits() -> None:
    """float32 does not represent every integer there; the weights equal the reference's with the same bits."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "weight_rounding": "stochastic"}
    ours, exact = (bucket(3000, **options) for _ in "12")
    for each in (ours, exact):
        each.steps[0].fill_(2**24)
    moved = []
    for _ in range(2):
        before = ours.params[0].clone()
        stepped(ours)
        kernels.kernel("reference", "lamb")([exact]).step()
        assert (ours.params[0] != exact.params[0]).double().mean() < 0.01
        moved.append(ours.params[0] != before)
    assert ours.steps == exact.steps == [torch.tensor(2.0**24 + 4)]
    assert not moved[0].equal(moved[1])


@interpreted
@pytest.mark.parametrize("lost", [-5, 5])
def test_weights_that_a_program_has_set_to_0_are_0(lost: int) -> None:
    """A weight of 0 has a compensation under kahan: the bits below 0's are a NaN, and the bits above have a norm."""
    ours, exact = (bucket(3000, dtype=torch.bfloat16, weight_rounding="kahan") for _ in "12")
    for each in (ours, exact):
        each.params[0].zero_()
        each.state["compensation"][0].fill_(lost)
    stepped(ours)
    kernels.kernel("reference", "lamb")([exact]).step()
    assert ours.params[0].isfinite().all()
    torch.testing.assert_close(ours.params[0], exact.params[0])


@interpreted
def test_tables_are_made_anew_only_when_something_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counting(uploads: Any, values: list[Any], dtype: torch.dtype) -> Tensor:
        made.append(len(values))
        return table(uploads, values, dtype)

    table = tables.Uploads.table
    monkeypatch.setattr(tables.Uploads, "table", counting)
    params = [Parameter(torch.ones(20)), Parameter(torch.ones(30))]
    set_gradients(params, [torch.ones(20), torch.ones(30)])
    optimizer = Lamb(params, backend="triton")
    optimizer.step()
    assert len(made) == 4  # rows, program_to_row of chunks, addresses of gradients, options
    optimizer.step()
    assert len(made) == 4
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert made[4:] == [made[3]]
    kept = params[0].grad, params[1].grad
    set_gradients(params, [torch.ones(20), torch.ones(30)])
    assert kept[0] is not params[0].grad
    optimizer.step()
    assert made[5:] == [2]


def test_the_tables_of_a_graph_hold_the_same_numbers_without_memory_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uploads = tables.Uploads(torch.device("cpu"))
    cached = [tables.CachedTable(dtype, uploads) for dtype in (torch.int64, torch.float64)]
    values: list[list[Any]] = [[2**47 + 123, 0, -1], [0.1, -math.inf, math.inf, 1]]
    plain = [each.of(list(row)) for each, row in zip(cached, values, strict=True)]
    monkeypatch.setattr(tables, "capturing", lambda _: True)
    uploads.begin_step()
    for each, row, table in zip(cached, values, plain, strict=True):
        assert each.of(list(row)).equal(table)
        assert each.of(list(row)).data_ptr() != table.data_ptr()


@interpreted
def test_weight_decay_may_switch_adaptation_on_and_off() -> None:
    """With always_adapt=False, a schedule that reaches 0 disables adaptation; plan and kernel stay valid."""
    results = []
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        params = [Parameter(torch.randn(20, 30)), Parameter(torch.randn(9))]
        groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.2}]
        optimizer = Lamb(groups, lr=0.1, weight_decay=[0.1, 0.0, 0.1], always_adapt=False, backend=backend)
        for _ in range(3):
            set_gradients(params, [torch.randn(20, 30), torch.randn(9)])
            optimizer.step()
        results.append([*params, optimizer.telemetry().trust_ratio])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-7)


@interpreted
@pytest.mark.parametrize("adapt", [True, False])
def test_elements_beyond_the_reach_of_32_bits(adapt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first and last chunk of 2^31 + 5 elements are stepped; the others take no memory."""
    size, ends = 2**31 + 5, (slice(0, launch_group.CHUNK), slice(2**31, None))
    big, small = (
        bucket(launch_group.CHUNK + 5, dtype=torch.bfloat16, adapt=adapt, state_dtype=torch.bfloat16) for _ in "12"
    )
    columns: list[list[Any]] = [big.params, big.grads, *big.state.values()]
    for held in columns:
        values, held[0] = held[0], torch.empty(size, dtype=torch.bfloat16)
        held[0][ends[0]], held[0][ends[1]] = values[: launch_group.CHUNK], values[launch_group.CHUNK :]
    kernel = lamb.Lamb([big])
    (part,) = kernel.groups
    assert isinstance(part, LambLaunchGroup)
    part.sums.zero_()  # programs of the other chunks do not run
    only_the_first_and_the_last(part, monkeypatch)
    kernel.step()
    monkeypatch.undo()
    stepped(small)
    torch.testing.assert_close(big.metrics, small.metrics, rtol=1e-6, atol=0)
    for ours, theirs in zip(arrays(big), arrays(small), strict=True):
        assert torch.cat([ours[end] for end in ends]).equal(theirs)


def arrays(of: Bucket[LambOptions]) -> list[Tensor]:
    return [*of.params, *itertools.chain.from_iterable(of.state.values())]


def test_a_row_has_a_value_for_each_column() -> None:
    row = of_tables.RowColumns("FIRST", "SECOND", after=("ZEROTH",))
    assert row.pack(SECOND=2, ZEROTH=0, FIRST=1) == [0, 1, 2] + [0] * (of_tables.ROW.value - 3)
    assert row.SECOND.value == 2  # type: ignore[attr-defined]
    for values in ({"ZEROTH": 0, "FIRST": 1}, {"ZEROTH": 0, "FIRST": 1, "SECOND": 2, "THIRD": 3}):
        with pytest.raises(KeyError, match=r"SECOND|THIRD"):
            row.pack(**values)


# ---- unsupported --------------------------------------------------------------------------------------------------

CPU = torch.zeros(3)
GPU = torch.zeros(3, device="meta")  # in place of a tensor on a GPU


@compiled
def test_it_says_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lamb.Lamb.unsupported_reason(CPU, OPTIONS, None) == "it is on cpu, not on a GPU"
    monkeypatch.setattr(device, "DEVICES", ("meta",))
    monkeypatch.setattr(device, "broken", lambda _: None)
    assert lamb.Lamb.unsupported_reason(GPU, OPTIONS, None) is None
    assert "torch.float64" in str(lamb.Lamb.unsupported_reason(GPU.double(), OPTIONS, None))
    assert lamb.Lamb.unsupported_reason(GPU.int(), OPTIONS, None) == "its dtype is torch.int32"
    assert lamb.Lamb.unsupported_reason(GPU, replace(OPTIONS, blocks=True, weight_rounding="kahan"), None) is None
    long = torch.empty(2, 2**31, device="meta")
    assert "32 bits" in str(lamb.Lamb.unsupported_reason(long, replace(OPTIONS, blocks=True), None))
    for rare in ({"cautious": True}, {"second_moment": "amsgrad"}):
        name, reason = kernels.pick("auto", GPU, replace(OPTIONS, **rare))
        assert (name, "has no compiled kernel" in reason) == ("foreach", True)
    monkeypatch.setattr(device, "broken", lambda _: "Triton 2.0.0 is older than 3.3")
    assert "older" in str(lamb.Lamb.unsupported_reason(GPU, OPTIONS, None))
    kernels._warn_of.cache_clear()
    with pytest.warns(UserWarning, match=r"without Triton's kernels.* Triton 2\.0\.0 is older than 3\.3"):
        picked = kernels.pick("auto", GPU, OPTIONS)
    assert picked == ("foreach", "not cpu: it is on meta; not triton: Triton 2.0.0 is older than 3.3")
    assert kernels.pick("auto", GPU, OPTIONS) == picked  # without another warning
    with pytest.raises(ValueError, match=r'backend="triton" cannot serve .* older than 3\.3'):
        kernels.pick("triton", GPU, OPTIONS)


def _no_c_compiler(_: torch.device) -> float:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")


@compiled
@pytest.mark.parametrize(
    ("lamb_step", "failure"),
    [
        (_no_c_compiler, r"failed \(RuntimeError: Please specify via CC environment variable\.\)"),
        (lambda _: 1.0, r"gave 1\.0 in place of 0\.9"),
        (lambda _: math.nan, r"gave nan in place of 0\.9"),
    ],
    ids=["raises", "wrong", "nan"],
)
def test_kernels_that_fail_a_trial_are_not_chosen(
    lamb_step: Callable[[torch.device], float], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "DEVICES", ("meta",))
    monkeypatch.setattr(device, "missing", lambda _: None)
    monkeypatch.setattr(device, "capturing", lambda _: False)
    monkeypatch.setattr(device, "trial_step", lamb_step)
    device.trial_failure.cache_clear()
    kernels._warn_of.cache_clear()
    with pytest.warns(UserWarning, match=f"a trial step on meta with Triton .* {failure}"):
        name, why = kernels.pick("auto", GPU, OPTIONS)
    assert name == "foreach"
    assert re.search(f"not triton: a trial step .* {failure}", why)
    with pytest.raises(ValueError, match=f'backend="triton" cannot serve .* {failure}'):
        kernels.pick("triton", GPU, OPTIONS)
    device.trial_failure.cache_clear()


@interpreted
def test_the_trial_passes_where_kernels_work() -> None:
    assert device.trial_failure.__wrapped__(CPU.device) is None


@compiled
def test_a_triton_that_is_missing_old_or_without_driver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    why = device.missing.__wrapped__
    assert why(torch.device("cpu")) is None
    assert re.search("Triton does not work on cuda", str(why(torch.device("cuda")))) or torch.cuda.is_available()
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    assert str(why(torch.device("cuda"))).startswith("Triton 3.2.0 is older than 3.3")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert str(why(torch.device("cuda"))).startswith("Triton does not import")


@interpreted
def test_the_interpreter_serves_the_cpu_alone() -> None:
    assert lamb.Lamb.unsupported_reason(CPU, OPTIONS, None) is None
    assert "unset it" in str(lamb.Lamb.unsupported_reason(GPU, OPTIONS, None))


PROGRAM = """
import sys
sys.modules["triton"] = None
import torch
from bighorn import Lamb, kernels
p = torch.ones(3, requires_grad=True)
p.grad = torch.ones(3)
optimizer = Lamb([p])
optimizer.step()
print(optimizer.explain(), kernels.status())
"""


@compiled
def test_bighorn_does_not_need_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert "group 0: " in done.stdout
