"""Kernels on shards, without processes: the tests simulate ranks and add up their sums.

`test_interpreter.py` runs the tests of Triton.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from bighorn import _kernels as kernels
from bighorn._kernels import codec
from bighorn._kernels.foreach import lists
from bighorn._kernels.rounding import ROUNDING_MODES, Rounding
from tests.support.buckets import (
    LAYOUTS,
    Cuts,
    Divide,
    Shape,
    all_ranks,
    boxes,
    bucket,
    everything,
    fragments,
    on_ranks,
    parts_of_rows,
    same,
    stepped,
    together,
)
from tests.support.tables import for_every
from tests.support.triton_interpreter import interpreted

BF16, INT8, INT4 = torch.bfloat16, torch.int8, torch.uint8
ON_CPU = pytest.mark.skipif(not kernels.status()["cpu"].available, reason="the C library does not work here")
BACKENDS = ["foreach", pytest.param("cpu", marks=ON_CPU), pytest.param("triton", marks=interpreted)]
EACH = pytest.mark.parametrize("backend", BACKENDS)
EACH_BUT_C = pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
"""The C library serves shards of CAME alone."""


def check(
    backend: str,
    algorithm: str,
    cuts: list[Cuts],
    *shapes: Shape,
    divide: Divide = boxes,
    groups: int = 1,
    **options: Any,
) -> None:
    """Check that a step on ranks equals the reference's unsharded step.

    Compiled kernels exchange the same sums as the reference; foreach exchanges whole vectors of each group.
    """
    whole = bucket(algorithm, *shapes, **options)
    ranks, theirs = on_ranks(whole, cuts, divide), on_ranks(whole, cuts, divide)
    reference = kernels.kernel("reference", algorithm)
    exchanged = together(ranks, kernels.kernel(backend, algorithm), 0.5)
    expected = together(theirs, reference, 0.5)
    if backend == "foreach":
        sums = 3 if getattr(whole.options, "factor", None) else 1
        assert len(exchanged) == groups * (sums + bool(options.get("cautious")))
    else:
        assert exchanged == expected
    stepped(reference, whole, 0.5)
    for rank in ranks:
        torch.testing.assert_close(rank.metrics, whole.metrics, rtol=1e-5, atol=0)
        assert same(rank.steps, whole.steps)
    for name, values in all_ranks(whole, ranks).items():
        torch.testing.assert_close(values, {"x": whole.params, **whole.state}[name], rtol=1e-5, atol=1e-6)


OTHER: dict[str, Any] = {"scale_parameter": False, "eps": (1e-3, 1e-2), "decay_rate": 0.8, "maximize": True}


@EACH
@pytest.mark.parametrize(
    ("layout", "options", "divide"),
    [
        *(pytest.param(layout, {}, boxes, id=layout) for layout in LAYOUTS),
        *(pytest.param(layout, OTHER, boxes, id=f"{layout}-other") for layout in ("columns", "rows-of-matrices")),
        *(pytest.param(layout, {}, fragments, id=f"{layout}-fragments") for layout in ("rows", "matrices")),
    ],
)
def test_came_on_ranks_equals_the_unsharded_step(
    layout: str, options: dict[str, Any], divide: Divide, backend: str
) -> None:
    factor, shapes, cuts = LAYOUTS[layout]
    check(backend, "came", cuts, *shapes, divide=divide, factor=factor, **options)


@for_every(("layout", "divide"), [*((layout, boxes) for layout in LAYOUTS), ("rows", fragments)])
def test_cautious_came_on_ranks_equals_the_unsharded_step(layout: str, divide: Divide) -> None:
    factor, shapes, cuts = LAYOUTS[layout]
    check("foreach", "came", cuts, *shapes, divide=divide, factor=factor, cautious=True)


@EACH_BUT_C
@for_every("options", [{}, {"decay_mode": "l2"}, {"cautious": True}, {"decay_mode": "decoupled"}])
def test_lamb_on_ranks_equals_the_unsharded_step(options: dict[str, Any], backend: str) -> None:
    if backend == "triton" and "cautious" in options:
        return
    cuts: list[Cuts] = [{0: [3]}, {1: [2]}, {2: [2]}, {0: [3]}]
    check(backend, "lamb", cuts, (7, 30), (6, 5), (4, 5, 6), (3, 4), **options)


@pytest.mark.parametrize("ends", [[100, 101, 700], [64, 70, 80], [0, 0, 600]], ids=["inside-rows", "one-row", "none"])
@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_parts_of_rows_equal_the_unsharded_step(algorithm: str, ends: list[int]) -> None:
    """Flat tensors of ZeRO and of Megatron's distributed optimizer are cut inside rows."""
    check("foreach", algorithm, [{0: ends}] * 2, (31, 29), (29, 31), divide=parts_of_rows)


@for_every("algorithm", ("lamb", "came"))
@for_every(("divide", "ends"), [(boxes, (9, 1, 9)), (parts_of_rows, (95, 5, 95))])
def test_all_ranks_cut_groups_alike(algorithm: str, divide: Divide, ends: tuple[int, ...]) -> None:
    """Two whole tensors are beyond the bound; by its own elements, one rank would step all three together."""
    cuts: list[Cuts] = [{0: [end]} for end in ends]
    with mock.patch.object(lists, "CACHED_BYTES", 300):
        check("foreach", algorithm, cuts, *[(10, 10)] * 3, divide=divide, groups=3)


@ON_CPU
@pytest.mark.parametrize("cuts", [{0: [0.5]}, {1: [0.5]}, {0: [0.5], 1: [0.5]}], ids=str)
@pytest.mark.parametrize("shape", [(30, 20), (300, 17), (40, 20_000), (1300, 1100), (2300, 1000)], ids=str)
def test_shards_in_c_are_the_same_on_any_number_of_threads(
    shape: Shape, cuts: dict[int, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at: Cuts = {dim: [int(shape[dim] * end) for end in ends] for dim, ends in cuts.items()}
    results = []
    for threads in (1, 3):
        monkeypatch.setenv("BIGHORN_NUM_THREADS", str(threads))
        ranks = on_ranks(bucket("came", shape, decay_rate=0.8, maximize=True), [at])
        together(ranks, kernels.kernel("cpu", "came"))
        results.append([tensor for rank in ranks for tensor in everything(rank)])
    assert same(*results)
    check("cpu", "came", [at], shape, decay_rate=0.8, maximize=True)


@EACH
def test_nothing_of_shards_is_written_without_commit(backend: str) -> None:
    factor, shapes, cuts = LAYOUTS["both"]
    whole = bucket("came", *shapes, factor=factor)
    ranks = on_ranks(whole, cuts)
    together(ranks, kernels.kernel(backend, "came"), torch.tensor(float("nan")), torch.tensor(False))
    for rank, before in zip(ranks, on_ranks(whole, cuts), strict=True):
        assert same(everything(rank), everything(before))


@EACH
@pytest.mark.parametrize("way", ROUNDING_MODES)
@for_every("cuts", [{0: [3]}, {0: [2], 1: [11]}])
@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_weights_on_ranks_are_rounded_as_those_of_the_unsharded_step(
    algorithm: str, cuts: Cuts, way: Rounding, backend: str
) -> None:
    """Random bits depend on the position in the whole tensor; a few weights differ, since sums have another order."""
    if (backend, algorithm) == ("cpu", "lamb"):
        return
    whole, kernel = bucket(algorithm, (7, 300), dtype=BF16, weight_rounding=way), kernels.kernel(backend, algorithm)
    ranks = on_ranks(whole, [cuts])
    together(ranks, kernel)
    stepped(kernel, whole)
    (ours,) = all_ranks(whole, ranks)["x"]
    assert (ours != whole.params[0]).float().mean() < 0.01
    assert (ours.float() - whole.params[0].float()).abs().max() <= 2**-7 * whole.params[0].abs().max()


@EACH
@for_every(("algorithm", "state_dtype"), [("lamb", INT8), ("lamb", INT4), ("came", INT8), ("came", INT4)])
def test_codes_on_ranks_are_those_of_the_unsharded_step(algorithm: str, state_dtype: torch.dtype, backend: str) -> None:
    if (backend, algorithm) == ("cpu", "lamb"):
        return
    whole, kernel = bucket(algorithm, (30, 300), (40, 20), state_dtype=state_dtype), kernels.kernel(backend, algorithm)
    ranks = on_ranks(whole, [{0: [11]}, {0: [40]}])
    together(ranks, kernel)
    stepped(kernel, whole)
    ours, near = all_ranks(whole, ranks), 1e-3 if algorithm == "came" else 1e-6
    if algorithm == "lamb":
        assert all(same(ours[name], values) for name, values in whole.state.items())
    for a, b in zip(ours["exp_avg"], whole.state["exp_avg"], strict=True):
        mine, true = (codec.unpack_int4(each) if state_dtype == INT4 else each.int() for each in (a, b))
        assert (mine != true).float().mean() < 0.01
        assert (mine - true).abs().max() <= 1
    torch.testing.assert_close(ours["x"], whole.params, rtol=near, atol=near)
