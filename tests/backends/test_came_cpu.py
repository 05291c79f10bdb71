"""Compares CAME in the C library with the float64 reference, one step at a time from equal state.

The shapes cover each way in which the library divides tensors: tiles of many small matrices, of many short rows, of a
part of wide rows, of a part of tall columns, and tensors above a million elements on all threads.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import zlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bighorn import kernels
from bighorn.kernels import Bucket, CameOptions, codec
from bighorn.kernels.bucket import Shard
from bighorn.kernels.codec import Dither
from bighorn.kernels.cpu import abi, library
from bighorn.kernels.cpu import came as cpu
from bighorn.kernels.cpu.library import loaded
from bighorn.kernels.cpu.tensors import TYPES
from bighorn.kernels.options import Factor
from bighorn.kernels.reference import came as reference
from tests.backends.test_threads import ENVIRONMENTS, run, run_afresh
from tests.support.came_kernel_cases import DEFAULTS, OPTIONS, Grad, Leaf, bucket_of

STATUS = kernels.status()["cpu"]
pytestmark = pytest.mark.skipif(not STATUS.available, reason=f"backend cpu: {STATUS.detail}")

GRADS: tuple[Grad, ...] = ("zero", "zero-rows", "zero-columns", "tiny", "huge", "ladder", "constant")
SHAPES = (
    *[(1, 1), (1, 17), (17, 1), (3, 3), (3, 17), (17, 3), (17, 17), (1, 1000), (1000, 1), (3, 1000), (1000, 3)],
    *[(256, 257), (257, 256), (17, 256), (257, 17), (1000, 257), (130, 1000)],
)
SMALL = (
    *(Leaf(f"{rows}x{columns}", (rows, columns)) for rows, columns in SHAPES),
    *(
        Leaf(f"{grad}-{rows}x{columns}", (rows, columns), grad)
        for grad in GRADS
        for rows, columns in [(9, 31), (70, 90)]
    ),
    *(Leaf(f"kernels-{k}x{k}", (24, 20, k, k)) for k in (1, 2, 3, 5, 7)),
    *(Leaf(f"{grad}-kernels", (8, 20, 3, 3), grad) for grad in GRADS),
    Leaf("pointwise", (64, 80, 1, 1)),
    Leaf("depthwise", (512, 1, 3, 3)),
    Leaf("matrices", (3, 70, 50)),
    Leaf("wide-matrices", (3, 5, 1500)),
    Leaf("tall-matrices", (3, 1500, 5)),
    Leaf("thin", (512, 1, 1)),
    Leaf("no-rows", (0, 3)),
    Leaf("no-columns", (3, 0)),
)
CHANNELS_LAST = (Leaf("channels-last", (12, 20, 3, 3), layout="channels_last"),)
VECTORS = tuple(Leaf(f"vector-{n}", (n,)) for n in (0, 1, 17, 1000, 5000, 9001))
LEAVES: dict[Factor | None, tuple[Leaf, ...]] = {
    "matrix": (*SMALL, *CHANNELS_LAST),
    "last_two": SMALL,
    None: (*VECTORS, *(replace(leaf, name=f"whole-{leaf.name}") for leaf in SMALL[::3]), Leaf("number", ())),
}
LARGE = (
    *(Leaf(f"{rows}x{columns}", (rows, columns)) for rows, columns in [(2000, 1100), (30522, 16), (16, 30522)]),
    Leaf("whole-rows", (258, 8200)),
    Leaf("divided-rows", (258, 32_800)),
    Leaf("groups", (3, 900, 800)),
    Leaf("shared", (1700, 1800)),
    Leaf("shared-wide", (5, 220_000)),
    Leaf("shared-groups", (5, 700, 600)),
    Leaf("shared-tall", (220_000, 5)),
    Leaf("shared-kernels", (400, 300, 3, 3)),
    Leaf("shared-convolution", (400, 300, 3, 3), layout="channels_last"),
)
DTYPES: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype | None]] = {
    "bfloat16": (torch.bfloat16, torch.bfloat16, None),
    "float16": (torch.float16, torch.float16, None),
    "gradient-float16": (torch.float32, torch.float16, None),
    "average-bfloat16": (torch.float32, torch.float32, torch.bfloat16),
    "average-float16": (torch.float32, torch.bfloat16, torch.float16),
    "average-int8": (torch.float32, torch.float32, torch.int8),
    "all-bfloat16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "bfloat16-average-int8": (torch.bfloat16, torch.float32, torch.int8),
}


def size(*tensors: Tensor) -> float:
    return sum(float(tensor.double().norm()) for tensor in tensors)


def stored(state: dict[str, Tensor]) -> Tensor:
    m = state["exp_avg"]
    return codec.decode(m, state["exp_avg_scale"]).double() if m.dtype == torch.int8 else m.double()


def assert_stored(ours: dict[str, Tensor], exact: Tensor, old: Tensor, what: str) -> None:
    """Check that a low-precision average is the exact one rounded to a neighbour."""
    slack = 1e-6 * (exact.abs() + old.abs())  # terms of the average may cancel
    if ours["exp_avg"].dtype == torch.int8:
        _, scales = codec.encode(exact, leading=ours["exp_avg_scale"].dim() - 1)
        torch.testing.assert_close(ours["exp_avg_scale"], scales, rtol=1e-5, atol=float(slack.max()), msg=what)
        unit = codec.decode(torch.ones_like(ours["exp_avg"]), scales).double()
    else:
        info = torch.finfo(ours["exp_avg"].dtype)
        unit = info.eps * (exact.abs() + info.tiny)
    assert bool(((stored(ours) - exact).abs() <= 0.501 * unit + slack).all()), what


def prepared(bucket: Bucket[CameOptions]) -> cpu.Came:
    kernel = cpu.Came([bucket])
    kernel.prepare()
    return kernel


def assert_one_step(leaves: tuple[Leaf, ...], bucket: Bucket[CameOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one step of the library against the float64 reference.

    A low-precision average must be a neighbour of the exact one, and the reference then continues with it.
    """
    rows = range(len(leaves))
    state = [{name: column[i] for name, column in bucket.state.items()} for i in rows]
    average = bucket.state["exp_avg"][0].dtype
    twin = bucket_of([x.double() for x in bucket.params], bucket.options, average if average != torch.float32 else None)
    for i, name in itertools.product(rows, bucket.state):
        twin.state[name][i].copy_(state[i][name])
    twin.steps = twin.unique_steps = [step.clone() for step in bucket.steps]
    twin.grads = [g.double() for g in bucket.grads]
    old = [x.clone() for x in twin.params]
    averages = [stored(row) for row in state]
    before = {name: [tensor.double() for tensor in column] for name, column in bucket.state.items()}

    kernel = prepared(bucket)
    kernel.step(0.5)
    follow = iter([i for i in rows if twin.params[i].numel()])

    def rounded(name: str, m: Tensor, like: dict[str, Tensor], _: Dither) -> dict[str, Tensor]:
        i = next(follow)
        if like[name].dtype == torch.float64:
            return {name: m}
        assert_stored(state[i], m, averages[i], leaves[i].name)
        return {name: state[i][name] for name in ("exp_avg", "exp_avg_scale") if name in state[i]}

    monkeypatch.setattr(reference, "quantize", rounded)
    reference.Came([twin]).step(0.5)
    for i, leaf in enumerate(leaves):
        what = f"{leaf.name}, step {bucket.steps[i]:.0f}"
        x, exact = bucket.params[i].double(), twin.params[i]
        error, half = (x - exact).abs(), torch.finfo(bucket.params[i].dtype).eps / 2
        step = exact - old[i]
        assert bool(x.isfinite().all()), what
        if bucket.params[i].dtype == torch.float32:
            far = f"{what}: {size(error):.1e}, after a step of {size(step):.1e} from {size(old[i]):.1e}"
            assert size(error) <= 2e-7 * size(exact, old[i], step), far
            assert size(error) <= 2e-6 * size(step) + half * size(exact, old[i]), far
        else:
            bound = 1.001 * half * exact.abs() + 2e-7 * old[i].abs() + 2e-6 * step.abs() + 3e-8
            assert bool((error <= bound).all()), what
        for name in bucket.state:
            if name in ("exp_avg", "exp_avg_scale") and average != torch.float32:
                continue  # `rounded` checks them
            found, true = state[i][name], twin.state[name][i]
            assert found.dtype == torch.float32
            limit = 1e-6 * size(true, *[before[name][i]] * (name == "exp_avg"))  # terms of the average may cancel
            assert size(found.double() - true) <= limit, f"{what}: {name}"
        assert bucket.metrics[i].tolist() == pytest.approx(twin.metrics[i].tolist(), rel=1e-5), what
    assert torch.equal(torch.stack(bucket.steps), torch.stack(twin.steps))


def laid_out(tensors: list[Tensor], options: CameOptions, average: torch.dtype | None) -> Bucket[CameOptions]:
    """Return a bucket whose columns have the memory order of the parameter's inner dims, like an optimizer's."""
    bucket = bucket_of(tensors, options, average)
    for name in ("exp_avg_sq_col", "exp_avg_res_col") if options.factor == "matrix" else ():
        bucket.state[name] = [
            torch.empty_strided(x.shape[1:], x.stride()[1:]).zero_() if x.numel() else column
            for x, column in zip(tensors, bucket.state[name], strict=True)
        ]
    return bucket


def steps(
    leaves: tuple[Leaf, ...],
    options: CameOptions,
    monkeypatch: pytest.MonkeyPatch,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None] = (torch.float32, torch.float32, None),
    count: int = 3,
) -> None:
    of_param, of_grad, average = dtypes
    bucket = laid_out([leaf.values(of_param) for leaf in leaves], options, average)
    for _ in range(count):
        bucket.grads = [leaf.gradient(of_grad) for leaf in leaves]
        assert_one_step(leaves, bucket, monkeypatch)


OF_TILES = ("published", "everything", "no-second-memory", "no-clip", "tensor-lr")
"""Options that run with all shapes; the others run with few in the table of cases, and with all in `make slow`."""


@pytest.mark.parametrize("factor", LEAVES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OF_TILES)) for name in OPTIONS]
)
def test_a_step_equals_the_float64_reference(factor: Factor | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(DEFAULTS, factor=factor, **OPTIONS[name])
    steps(LEAVES[factor], options, monkeypatch, count=5 if name in ("published", "everything") else 3)


@pytest.mark.parametrize("leaf", LARGE, ids=lambda leaf: leaf.name)
@pytest.mark.parametrize(
    ("factor", "count"), [("matrix", 1), pytest.param("last_two", 2, marks=[pytest.mark.slow])], ids=str
)
def test_large_tensors(factor: Factor, count: int, leaf: Leaf, monkeypatch: pytest.MonkeyPatch) -> None:
    if factor == "last_two" and leaf.layout != "plain":
        pytest.skip("last_two has its own buckets for other layouts")
    monkeypatch.setenv("BIGHORN_NUM_THREADS", "3")
    steps((leaf,), replace(DEFAULTS, factor=factor, **OPTIONS["everything"]), monkeypatch, count=count)


@pytest.mark.parametrize("factor", LEAVES)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_every_dtype(factor: Factor | None, dtypes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_param, of_grad, average = DTYPES[dtypes]
    options = replace(DEFAULTS, factor=factor, **OPTIONS["everything"])
    leaves = tuple(
        leaf
        for leaf in LEAVES[factor]
        if not (of_grad == torch.float16 and leaf.grad in ("huge", "ladder"))
        and not (average == torch.int8 and leaf.layout == "channels_last")
    )
    steps(leaves, options, monkeypatch, (of_param, of_grad, average), count=2)


@pytest.mark.parametrize("level", ["v2", "v3"])
@pytest.mark.parametrize("factor", LEAVES)
def test_every_instruction_set(level: str, factor: Factor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGHORN_ISA", level)
    if f"x86-64-{level}" not in kernels.status()["cpu"].detail:
        pytest.skip(f"this machine has no x86-64-{level}")
    options = replace(DEFAULTS, factor=factor, **OPTIONS["everything"])
    for dtypes in ("bfloat16", "average-float16", "bfloat16-average-int8"):
        leaves = tuple(leaf for leaf in LEAVES[factor] if leaf.layout == "plain")
        steps(leaves, options, monkeypatch, DTYPES[dtypes], count=2)


def test_narrow_matrices_of_each_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual widths have separate loops."""
    leaves = tuple(Leaf(f"width-{width}", (1500, width)) for width in range(1, 18))
    steps(leaves, DEFAULTS, monkeypatch, count=2)


def test_the_comparison_sees_a_wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Leaf("plain", (70, 90))
    bucket = bucket_of([leaf.values(torch.float32)], DEFAULTS)
    bucket.grads = [leaf.gradient(torch.float32)]
    wrong = {**abi.conversions_of(CameOptions), "clip_threshold": lambda _: 0.99999}
    monkeypatch.setattr(abi, "conversions_of", lambda _: wrong)
    with pytest.raises(AssertionError, match="plain, step 1"):
        assert_one_step((leaf,), bucket, monkeypatch)


# ---- other guarantees -------------------------------------------------------------------------------------------


def test_nothing_is_written_without_commit() -> None:
    leaves = LEAVES["matrix"]
    bucket = bucket_of([leaf.values(torch.float32) for leaf in leaves], DEFAULTS)
    bucket.grads = [leaf.gradient(torch.float32) for leaf in leaves]
    kernel = prepared(bucket)
    kernel.step()
    everything = [
        *bucket.params,
        *(t for column in bucket.state.values() for t in column),
        *bucket.steps,
        bucket.metrics,
    ]
    before = [tensor.clone() for tensor in everything]
    kernel.prepare()
    kernel.step(1.0, torch.tensor(False))
    assert all(torch.equal(tensor, old) for tensor, old in zip(everything, before, strict=True))
    kernel.prepare()
    kernel.step(1.0, torch.tensor(True))
    assert not torch.equal(bucket.params[-1], before[len(leaves) - 1])


def test_gradients_are_only_read_and_their_squares_summed() -> None:
    bucket = bucket_of([leaf.values(torch.float32) for leaf in SMALL], DEFAULTS)
    bucket.grads = [leaf.gradient(torch.float32) for leaf in SMALL]
    before = [g.clone() for g in bucket.grads]
    kernel = prepared(bucket)
    expected = sum(float(g.double().square().sum()) for g in bucket.grads)
    assert float(kernel.square_sum()) == pytest.approx(expected, rel=1e-12)
    kernel.step()
    assert all(torch.equal(g, old) for g, old in zip(bucket.grads, before, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("average", [None, torch.bfloat16, torch.int8], ids=str)
def test_a_gradient_that_is_not_finite_shows(value: float, average: torch.dtype | None) -> None:
    for factor in LEAVES:
        bucket = bucket_of([torch.ones(70, 90), torch.ones(70, 90)], replace(DEFAULTS, factor=factor), average)
        bucket.grads = [torch.ones(70, 90), torch.ones(70, 90)]
        bucket.grads[0][3, 5] = value
        prepared(bucket).step()
        assert bucket.params[0].isnan().any()
        assert bucket.metrics[0].isnan().any()
        assert bucket.params[1].isfinite().all()


def workspace(shape: tuple[int, int, int], threads: int) -> int:
    """Return the bytes of workspace for a tensor, without creating the tensor."""
    matrices, height, width = shape
    weights, row, gradient = (library.STRUCTURES[name] for name in ("Weights", "FactoredRow", "Gradient"))
    rows = (row * 1)(row(weights=weights(type=TYPES[torch.float32]), matrices=matrices, height=height, width=width))
    gradients = (gradient * 1)(gradient(size=matrices * height * width))
    return 8 * int(loaded().bighorn_factored_workspace(rows, None, gradients, 1, ctypes.c_int(threads)))


EDGE_SIZES = (1, 2, 3, 9, 31, 32, 63, 64, 65, 127, 129, 192, 200, 257, 1000, 1024, 1025, 30522, 3_000_000)


@pytest.mark.parametrize("matrices", [1, 3, 50, 100_000])
def test_temporaries_are_small(matrices: int) -> None:
    """The limit includes the buffers of eight threads; three of a thread hold a row of at most 32,768 elements."""
    for height, width in itertools.product(EDGE_SIZES, EDGE_SIZES):
        buffers = 8 * ((17 << 10) + 3 * max(2 << 10, min(width, 32 << 10)))
        allowed = 4 * (buffers + max(1 << 18, 0.02 * matrices * height * width))
        assert workspace((matrices, height, width), threads=8) <= allowed, (matrices, height, width)


# ---- threads ----------------------------------------------------------------------------------------------------


def digest(threads: int) -> list[int]:
    """Return checksums after steps with each `factor`, and with int8 blocks that cross matrices."""
    os.environ["BIGHORN_NUM_THREADS"] = str(threads)
    summaries = []
    leaves = (*(leaf for leaf in LARGE if leaf.name.startswith("shared-") and leaf.layout == "plain"), *SMALL[::3])
    runs = [(torch.float32, factor, None) for factor in LEAVES]
    for dtype, factor, average in (*runs, (torch.float32, "last_two", torch.int8)):
        torch.manual_seed(0)
        options = replace(DEFAULTS, factor=factor, scale_parameter=True)
        bucket = bucket_of([leaf.values(dtype) for leaf in leaves], options, average)
        summary = 0
        bucket.grads = [leaf.gradient(dtype) for leaf in leaves]
        kernel = cpu.Came([bucket])
        kernel.prepare()
        kernel.step()
        for tensor in (*bucket.params, *(t for column in bucket.state.values() for t in column), bucket.metrics):
            summary = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, summary)
        summaries.append(summary)
    return summaries


@pytest.mark.parametrize("environment", ["free", pytest.param("thread-limit-2", marks=[pytest.mark.slow])])
def test_any_number_of_threads_gives_the_same_bits(environment: str) -> None:
    code = """
        from tests.backends import test_came_cpu
        one, *others = map(test_came_cpu.digest, (1, 5))
        assert others == [one] * len(others), (one, others)
        print(len(set(one)))
    """
    assert run_afresh(code, **ENVIRONMENTS[environment]).split() == ["4"], "the options made no difference"


def in_shards(leaf: Leaf, parts: tuple[int, int]) -> list[Tensor]:
    """Return parameters and metrics after two steps of shards, with rows and columns split into `parts`."""
    torch.manual_seed(0)
    x = leaf.values(torch.float32)
    split = frozenset(dim for dim in (0, 1) if parts[dim] > 1)
    places = torch.stack([torch.arange(x.numel()).view_as(x)]).chunk(parts[0], 1)
    boxes = [box[0] for rows in places for box in rows.chunk(parts[1], 2)]
    buckets = []
    for box in boxes:
        offset = divmod(int(box[0, 0]), x.shape[1])
        bucket = bucket_of([x.take(box)], replace(DEFAULTS, **OPTIONS["everything"]))
        bucket.shards = [Shard(tuple(x.shape), tuple(box.shape), offset, split)]
        buckets.append(bucket)
    ranks: list[cpu.Came] = []
    for _ in range(2):
        g = leaf.gradient(torch.float32)
        for bucket, box in zip(buckets, boxes, strict=True):
            bucket.grads = [g.take(box)]
        ranks = ranks or [cpu.Came([bucket]) for bucket in buckets]
        for rank in ranks:
            rank.prepare()
        for sums in zip(*(rank.sharded_step() for rank in ranks), strict=True):
            total = torch.stack(sums).sum(dim=0)
            for part in sums:
                part.copy_(total)
    for bucket, box in zip(buckets, boxes, strict=True):
        x.put_(box, bucket.params[0])
    return [x, *(bucket.metrics for bucket in buckets)]


@pytest.mark.parametrize("parts", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(30, 20), (300, 17), (40, 20_000), (1300, 1100), (2300, 1000)], ids=str)
def test_shards_are_the_whole_on_any_number_of_threads(
    shape: tuple[int, int], parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = Leaf("shards", shape)
    whole = in_shards(leaf, (1, 1))
    results = []
    for threads in (1, 3):
        monkeypatch.setenv("BIGHORN_NUM_THREADS", str(threads))
        results.append(in_shards(leaf, parts))
    assert all(map(torch.equal, *results))
    assert size(results[0][0] - whole[0]) <= 1e-6 * size(whole[0])
    for norms in results[0][1:]:
        torch.testing.assert_close(norms, whole[1], rtol=1e-5, atol=0)


def test_addresses_of_other_gradients_are_not_used() -> None:
    """Another thread can bind its gradients after this one has listed gradients and before it lists addresses."""
    leaves, buckets = LEAVES["matrix"], []
    for other in (False, True):
        torch.manual_seed(0)
        bucket = bucket_of([leaf.values(torch.float32) for leaf in leaves], DEFAULTS)
        bucket.grads = [leaf.gradient(torch.float32) for leaf in leaves]
        if other:
            others = [torch.zeros_like(grad) for grad in bucket.grads]
            bucket.known = others, [grad.data_ptr() for grad in others]
        prepared(bucket).step()
        buckets.append(bucket)
    assert all(map(torch.equal, buckets[0].params, buckets[1].params))


def test_eps_survives_where_denormals_are_flushed() -> None:
    """1e-30 and a thousandth of it are normal float32 numbers; workers flush denormals as the caller does."""
    code = """
        import torch
        from tests.backends.test_came_cpu import DEFAULTS, bucket_of, prepared
        torch.set_flush_denormal(True)
        bucket = bucket_of([torch.ones(1500, 1000), torch.ones(300, 20), torch.ones(5, 7)], DEFAULTS)
        bucket.grads = [torch.zeros_like(x) for x in bucket.params]
        prepared(bucket).step()
        for tensor in bucket.state["exp_avg_sq_row"] + bucket.state["exp_avg_sq_col"]:
            torch.testing.assert_close(tensor, torch.full_like(tensor, 1e-33), rtol=1e-6, atol=0)
        assert all(x.eq(torch.tensor(1 - 0.1 * 0.1)).all() for x in bucket.params)
    """
    run(code, BIGHORN_NUM_THREADS="3")
