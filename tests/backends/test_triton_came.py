"""CAME in Triton without a GPU; `test_interpreter.py` runs this file and the table of cases."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from bighorn import kernels
from bighorn.kernels import Bucket, CameOptions, codec, rounding
from bighorn.kernels.triton import came, came_launches, device, launch_group, tiles
from bighorn_workbench.shapes import SHAPES
from tests.support.came_kernel_cases import DEFAULTS
from tests.support.triton_interpreter import compiled, interpreted, mostly_slow, only_the_first_and_the_last

pytest.importorskip("triton")

Factor = Literal["matrix", "last_two"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, INT4 = torch.int8, torch.uint8
OPTIONS = replace(DEFAULTS, bias_correction=True, scale_parameter=True)


# ---- interpreted ------------------------------------------------------------------------------------------------


def bucket(
    *shapes: tuple[int, ...],
    factor: Factor | None = "matrix",
    dtype: torch.dtype = F32,
    average: torch.dtype = F32,
    **options: Any,
) -> Bucket[CameOptions]:
    """Return rows with gradients and a nonzero state."""
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype) for shape in shapes]
    grads: list[Tensor | None] = [torch.randn(shape).to(dtype) for shape in shapes]
    state: dict[str, list[Tensor]] = {"exp_avg": [torch.randn(shape).to(average) for shape in shapes]}
    if average in (INT8, INT4):
        form = codec.INT4 if average == INT4 else codec.LINEAR
        leading = [len(shape) - 1 if factor == "last_two" else 1 for shape in shapes]
        coded = [codec.encode(torch.randn(shape), form, leading=n) for shape, n in zip(shapes, leading, strict=True)]
        state = {"exp_avg": [codes for codes, _ in coded], "exp_avg_scale": [scales for _, scales in coded]}
    if factor is None:
        state["exp_avg_sq"] = [torch.rand(shape) for shape in shapes]
    for of in ("sq", "res") if factor else ():
        rows = [shape[:1] if factor == "matrix" else shape[:-1] for shape in shapes]
        cols = [shape[1:] if factor == "matrix" else (*shape[:-2], shape[-1]) for shape in shapes]
        state[f"exp_avg_{of}_row"] = [torch.rand(shape) for shape in rows]
        state[f"exp_avg_{of}_col"] = [torch.rand(shape) for shape in cols]
    for name, kept in rounding.AUX_STATE[options.get("weight_rounding", "nearest")].items():
        state[name] = [torch.zeros(shape, dtype=kept) for shape in shapes]
    steps = [torch.tensor(3.0) for _ in shapes]
    options = {"factor": factor, "blocks": average in (INT8, INT4), "int4": average == INT4, **options}
    norms, numbers, firsts = torch.zeros(len(shapes), 3), list(range(len(shapes))), [2**32 - 7 for _ in shapes]
    return Bucket(
        replace(OPTIONS, **options), params, state, steps, steps, norms, grads, param_ids=numbers, row_offsets=firsts
    )


def everything(of: Bucket[CameOptions]) -> list[Tensor]:
    return [*of.params, *itertools.chain.from_iterable(of.state.values()), *of.steps, of.metrics]


def stepped(of: Bucket[CameOptions], *arguments: Any) -> list[Tensor]:
    kernel = came.Came([of])
    kernel.prepare()
    kernel.step(*arguments)
    return everything(of)


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


KINDS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "matrix": (((257, 9), (5, 260)), {}),
    "last-two": (((2, 17, 300), (3, 2, 4, 5)), {"factor": "last_two"}),
    "unfactored": (((9000,), (0,), (5,)), {"factor": None}),
    "int8": (((257, 20), (9, 300)), {"average": INT8}),
    "int8-last-two": (((3, 30, 50), (2, 3, 17, 20), (2, 9, 300)), {"factor": "last_two", "average": INT8}),
    "int8-unfactored": (((2, 1100), (300, 1), (24, 1024)), {"factor": None, "average": INT8}),
    "bfloat16": (((40, 264), (5, 7)), {"dtype": BF16, "average": BF16}),
    "wide": (((3, 17_000), (2, 4, 16_500)), {}),  # rows with many partial sums
    "narrow": (((2100, 20), (2100, 32)), {}),  # tiles of few columns
    "narrow-int8": (((2100, 31), (40, 5)), {"average": INT8}),
    "int4": (((257, 20), (9, 300), (5, 16)), {"average": INT4}),
    "int4-last-two": (((3, 30, 50), (2, 4, 17, 16), (2, 9, 300)), {"factor": "last_two", "average": INT4}),
    "int4-unfactored": (((2, 1100), (300, 2), (24, 1024)), {"factor": None, "average": INT4}),
}


@interpreted
@pytest.mark.parametrize("kind", mostly_slow(KINDS, "matrix", "int8", "unfactored"))
def test_numbers_may_be_tensors(kind: str) -> None:
    """Kernels read a learning rate, a scale and an apply mask on the device, without a copy to the host."""
    shapes, options = KINDS[kind]
    plain = stepped(bucket(*shapes, **options, lr=0.25), 0.5)
    given = stepped(bucket(*shapes, **options, lr=torch.tensor(0.25)), torch.tensor(0.5), torch.tensor(True))
    assert same(plain, given)
    assert not same(plain, everything(bucket(*shapes, **options)))


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_without_commit(kind: str) -> None:
    shapes, options = KINDS[kind]
    before = everything(bucket(*shapes, **options))
    after = stepped(bucket(*shapes, **options), torch.tensor(math.nan), torch.tensor(False))
    assert same(before, after)


@interpreted
@pytest.mark.parametrize("kind", mostly_slow(KINDS, *(KINDS.keys() - {"wide"})))
def test_a_step_equals_the_reference(kind: str) -> None:
    """Shapes have more rows and columns than a tile, and the average and the residuals are not zero."""
    shapes, options = KINDS[kind]
    ours, exact = bucket(*shapes, **options), bucket(*shapes, **options)
    stepped(ours)
    kernels.kernel("reference", "came")([exact]).step()
    torch.testing.assert_close(ours.metrics, exact.metrics, rtol=2e-5 if kind.startswith("int") else 1e-6, atol=0)
    for name, columns in ours.state.items():
        for mine, true in zip(columns, exact.state[name], strict=True):
            if mine.dtype == INT4:
                mine, true = codec.unpack_int4(mine), codec.unpack_int4(true)
            if "int" in str(mine.dtype):
                assert (mine.int() - true.int()).abs().max() <= 1
            else:
                torch.testing.assert_close(mine, true, rtol=8e-3 if mine.dtype == BF16 else 1e-5, atol=1e-6)


@interpreted
def test_elements_beyond_the_reach_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first and last chunk of 2^31 + 5 elements are stepped; the others take no memory."""
    size, ends = 2**31 + 5, (slice(0, launch_group.CHUNK), slice(2**31, None))
    options: dict[str, Any] = {"factor": None, "dtype": BF16, "average": BF16, "scale_parameter": False}
    # No u reaches the threshold: its size is divided by the size of the tensor.
    big, small = (bucket((launch_group.CHUNK + 5,), **options, clip_threshold=1e9) for _ in "12")
    columns: list[list[Any]] = [big.params, big.grads, *big.state.values()]
    for held in columns:
        values, held[0] = held[0], torch.empty(size, dtype=held[0].dtype)
        held[0][ends[0]], held[0][ends[1]] = values[: launch_group.CHUNK], values[launch_group.CHUNK :]
    kernel = came.Came([big])
    (part,) = kernel.groups
    assert isinstance(part, came_launches.CameLaunchGroup)
    part.sums.zero_()  # programs of the other chunks do not run
    only_the_first_and_the_last(part, monkeypatch)
    kernel.step()
    monkeypatch.undo()
    stepped(small)
    for ours, theirs in zip(everything(big)[:3], everything(small)[:3], strict=True):
        assert torch.cat([ours[end] for end in ends]).equal(theirs)


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert_large", "vit_small", "resnet50", "llama_1b", "one"])
@pytest.mark.parametrize(("dtype", "limit"), [(F32, 0.02), (BF16, 0.02)], ids=str)
def test_partial_sums_are_few(name: str, dtype: torch.dtype, limit: float) -> None:
    """Partial sums take a bounded fraction of the memory of the parameters."""
    shapes = [torch.Size(shape) for shape in SHAPES[name]()]
    area = tiles.area_of(sum(shape.numel() for shape in shapes))
    cuts = [tiles.tile_grid(shape, "matrix", area) for shape in shapes]
    factored = [cut for cut in cuts if 2 * (cut.height + cut.width) < cut.height * cut.width]
    scratch = sum(4 * (cut.row_parts + cut.col_parts) + 24 * cut.tiles + 12 * cut.pieces for cut in factored)
    assert scratch <= limit * dtype.itemsize * sum(shape.numel() for shape in shapes)


# ---- unsupported --------------------------------------------------------------------------------------------------

GPU = torch.zeros(70, 70, 3, 3, device="meta")  # in place of a tensor on a GPU


@compiled
def test_it_says_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DEVICES", ("meta",))
    monkeypatch.setattr(device, "broken", lambda _: None)
    assert came.Came.unsupported_reason(GPU, OPTIONS, None) is None
    assert came.Came.unsupported_reason(GPU[0], replace(OPTIONS, factor="last_two"), None) is None
    assert came.Came.unsupported_reason(GPU, OPTIONS, None) is None
    name, reason = kernels.pick("auto", GPU, replace(OPTIONS, factor="last_two"))
    assert (name, "4900 matrices of 3 x 3 are too many" in reason) == ("foreach", True)
