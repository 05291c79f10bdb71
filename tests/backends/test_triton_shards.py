"""Triton's kernels on shards, without a GPU or processes: the tests simulate ranks and add up their sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bighorn import kernels
from bighorn.kernels import Bucket, codec
from bighorn.kernels.bucket import Shard
from bighorn.kernels.cpu.tensors import ROUNDING_MODES
from bighorn.kernels.options import Factor
from bighorn.kernels.rounding import Rounding
from bighorn.kernels.triton import came, came_shards, lamb, tables
from tests.backends import test_triton, test_triton_came
from tests.support.triton_interpreter import interpreted

pytest.importorskip("triton")

Shape = tuple[int, ...]
Cuts = dict[int, Sequence[int]]
"""The positions at which each sharded dim is cut."""

BF16, INT8, INT4 = torch.bfloat16, torch.int8, torch.uint8


def boxes(shape: Shape, cuts: Cuts) -> list[Shard]:
    """Return the shards of a tensor: one for each combination of parts along the sharded dims."""
    ends = [[0, *cuts.get(dim, ()), size] for dim, size in enumerate(shape)]
    split = frozenset(cuts)
    along = [list(itertools.pairwise(each)) for each in ends]
    return [
        Shard(shape, tuple(b - a for a, b in box), tuple(a for a, _ in box), split) for box in itertools.product(*along)
    ]


def fragments(shape: Shape, cuts: Cuts) -> list[Shard]:
    """Return the shards of fragments of whole rows; a rank that holds none has a box without rows and columns."""
    row = math.prod(shape[1:])
    ends = [0, *(cut * row for cut in cuts[0]), shape[0] * row]
    return [Shard.around(range(a, b), shape, cut=False) for a, b in itertools.pairwise(ends)]


def part_of(name: str, value: Tensor, shard: Shard, factor: str | None) -> Tensor:
    """Return a shard's part of a parameter or of its state."""
    dims = list(range(len(shard.shape)))
    axis = dims[-2] if factor == "last_two" else 0
    if name.endswith("_row"):
        dims = dims[: axis + 1]
    elif name.endswith("_col"):
        del dims[axis]
    elif name.endswith("_scale"):
        return value[shard.offset[0] : shard.offset[0] + shard.size[0]].clone()
    at = tuple(slice(shard.offset[dim], shard.offset[dim] + shard.size[dim]) for dim in dims)
    return value[at].clone(memory_format=torch.preserve_format)


def on_ranks(
    whole: Bucket[Any], cuts: Sequence[Cuts], shards_of: Callable[[Shape, Cuts], list[Shard]] = boxes
) -> list[Bucket[Any]]:
    """Return the bucket of each rank; all tensors have the same number of shards."""
    factor = getattr(whole.options, "factor", None)
    shards = [shards_of(tuple(x.shape), each) for x, each in zip(whole.params, cuts, strict=True)]
    buckets = []
    for mine in zip(*shards, strict=True):
        columns: dict[str, list[Any]] = {"x": whole.params, "g": whole.grads, **whole.state}
        state: dict[str, list[Any]] = {
            name: [part_of(name, value, shard, factor) for value, shard in zip(values, mine, strict=True)]
            for name, values in columns.items()
        }
        params, grads, steps = state.pop("x"), state.pop("g"), [step.clone() for step in whole.steps]
        norms = whole.metrics.clone()
        buckets.append(
            replace(
                whole,
                params=params,
                grads=grads,
                state=state,
                steps=steps,
                unique_steps=steps,
                metrics=norms,
                shards=[*mine],
            )
        )
    return buckets


def together(buckets: list[Bucket[Any]], kernel: Any, *arguments: Any) -> list[tuple[int, torch.dtype]]:
    """Step all ranks once; return the number and the dtype of the sums of each reduction round."""
    running, exchanged = [], []
    for bucket in buckets:
        each = kernel([bucket])
        each.prepare()
        running.append(each.sharded_step(*arguments))
    while parts := [part for rounds in running if (part := next(rounds, None)) is not None]:
        assert len(parts) == len(running)
        total = torch.stack(parts).sum(0)
        for part in parts:
            part.copy_(total)
        exchanged.append((len(total), total.dtype))
    return exchanged


def gathered(name: str, like: Tensor, parts: list[Tensor], shards: list[Shard], factor: str | None) -> Tensor:
    """Return the whole tensor from the shards of all ranks; replicated shards must be equal."""
    out, known = torch.zeros(like.numel(), dtype=like.dtype), torch.zeros(like.numel(), dtype=torch.bool)
    places = torch.arange(like.numel()).view(like.shape)
    for part, shard in zip(parts, shards, strict=True):
        place = part_of(name, places, shard, factor).flatten()
        assert (~known[place] | (out[place] == part.flatten())).all(), name
        out[place], known[place] = part.flatten(), True
    assert known.all(), name
    return out.view(like.shape)


def all_ranks(whole: Bucket[Any], ranks: list[Bucket[Any]]) -> dict[str, list[Tensor]]:
    """Return whole parameters and state, gathered from the shards."""
    factor = getattr(whole.options, "factor", None)
    return {
        name: [
            gathered(
                name,
                value,
                [(rank.params if name == "x" else rank.state[name])[i] for rank in ranks],
                [rank.shards[i] for rank in ranks],
                factor,
            )
            for i, value in enumerate(values)
        ]
        for name, values in {"x": whole.params, **whole.state}.items()
    }


LAYOUTS: dict[str, tuple[Factor | None, tuple[Shape, ...], list[Cuts]]] = {
    "rows": ("matrix", ((257, 20), (3, 9), (5, 4, 3, 2)), [{0: [100]}, {0: [3]}, {0: [2]}]),
    "columns": ("matrix", ((9, 300), (5, 4), (4, 6, 5)), [{1: [130]}, {1: [4]}, {2: [2]}]),
    "both": ("matrix", ((30, 270), (7, 6)), [{0: [11], 1: [260]}, {0: [7], 1: [5]}]),
    "matrices": ("last_two", ((5, 7, 6), (2, 3, 30)), [{0: [2]}, {0: [1]}]),
    "rows-of-matrices": ("last_two", ((3, 9, 6), (2, 4, 5, 3)), [{1: [4]}, {2: [3]}]),
    "all-of-matrices": ("last_two", ((4, 9, 6),), [{0: [3], 1: [4], 2: [5]}]),
    "none-first": ("matrix", ((6, 5), (7, 4)), [{1: [0]}, {0: [0]}]),
    "of-two-kinds": ("matrix", ((8, 9), (7, 5)), [{0: [3]}, {1: [2]}]),
    "unfactored": (None, ((9000,), (3,)), [{0: [100]}, {0: [3]}]),
    "unfactored-matrices": (None, ((3, 4), (5, 3, 2)), [{1: [1]}, {2: [1]}]),
}


OTHER: dict[str, Any] = {"scale_parameter": False, "eps": (1e-3, 1e-2), "decay_rate": 0.8, "maximize": True}


@interpreted
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *(pytest.param(layout, {}, id=layout) for layout in LAYOUTS),
        *(pytest.param(layout, OTHER, id=f"{layout}-other") for layout in ("columns", "rows-of-matrices")),
    ],
)
def test_came_on_ranks_equals_the_unsharded_step(layout: str, options: dict[str, Any]) -> None:
    came_on_ranks_equals_the_unsharded_step(layout, options, boxes)


@interpreted
@pytest.mark.parametrize("layout", ["rows", "matrices"])
def test_came_on_fragments_of_whole_rows_equals_the_unsharded_step(layout: str) -> None:
    came_on_ranks_equals_the_unsharded_step(layout, {}, fragments)


def came_on_ranks_equals_the_unsharded_step(
    layout: str, options: dict[str, Any], shards_of: Callable[[Shape, Cuts], list[Shard]]
) -> None:
    """A step exchanges the same sums, in the same number of reduction rounds, as the reference."""
    factor, shapes, cuts = LAYOUTS[layout]
    whole = test_triton_came.bucket(*shapes, **{"factor": factor, **options})
    ranks, theirs = on_ranks(whole, cuts, shards_of), on_ranks(whole, cuts, shards_of)
    added, expected = together(ranks, came.Came, 0.5), together(theirs, kernels.kernel("reference", "came"), 0.5)
    assert added == expected
    test_triton_came.stepped(whole, 0.5)
    for rank in ranks:
        torch.testing.assert_close(rank.metrics, whole.metrics, rtol=1e-5, atol=0)
        assert all(a.equal(b) for a, b in zip(rank.steps, whole.steps, strict=True))
    for name, values in all_ranks(whole, ranks).items():
        for ours, theirs_ in zip(values, {"x": whole.params, **whole.state}[name], strict=True):
            torch.testing.assert_close(ours, theirs_, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("decay_mode", ["ratio", "l2"])
def test_lamb_on_ranks_equals_the_unsharded_step(decay_mode: str) -> None:
    """Sums and rounds are as many as the reference's."""
    shapes: tuple[Shape, ...] = (7, 30), (6, 5), (4, 5, 6), (3, 4)
    cuts: list[Cuts] = [{0: [3]}, {1: [2]}, {2: [2]}, {0: [3]}]
    whole = test_triton.bucket(*shapes, decay_mode=decay_mode)
    ranks, theirs = on_ranks(whole, cuts), on_ranks(whole, cuts)
    ours, exact = together(ranks, lamb.Lamb, 0.5), together(theirs, kernels.kernel("reference", "lamb"), 0.5)
    assert ours == [(2 * len(shapes), torch.float64)]
    assert (len(ours), sum(size for size, _ in ours)) == (len(exact), sum(size for size, _ in exact))
    test_triton.stepped(whole, 0.5)
    for rank in ranks:
        torch.testing.assert_close(rank.metrics, whole.metrics, rtol=1e-5, atol=0)
        assert all(a.equal(b) for a, b in zip(rank.steps, whole.steps, strict=True))
    for name, values in all_ranks(whole, ranks).items():
        torch.testing.assert_close(values, {"x": whole.params, **whole.state}[name], rtol=1e-5, atol=1e-6)


@interpreted
def test_nothing_of_shards_is_written_without_commit() -> None:
    factor, shapes, cuts = LAYOUTS["both"]
    whole = test_triton_came.bucket(*shapes, factor=factor)
    ranks = on_ranks(whole, cuts)
    together(ranks, came.Came, torch.tensor(float("nan")), torch.tensor(False))
    for rank, before in zip(ranks, on_ranks(whole, cuts), strict=True):
        assert test_triton_came.same(test_triton_came.everything(rank), test_triton_came.everything(before))


@interpreted
@pytest.mark.parametrize("way", ROUNDING_MODES)
@pytest.mark.parametrize("cuts", [{0: [3]}, {0: [2], 1: [11]}], ids=["rows", "both"])
@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_weights_on_ranks_are_rounded_as_those_of_the_unsharded_step(algorithm: str, cuts: Cuts, way: Rounding) -> None:
    """Random bits depend on the position in the whole tensor; a few weights differ, since sums have another order."""
    shape, kernel = (7, 300), kernels.kernel("triton", algorithm)
    whole: Bucket[Any] = (
        test_triton.bucket(shape, dtype=BF16, weight_rounding=way)
        if algorithm == "lamb"
        else test_triton_came.bucket(shape, dtype=BF16, weight_rounding=way)
    )
    ranks = on_ranks(whole, [cuts])
    together(ranks, kernel)
    alone = kernel([whole])
    alone.prepare()
    alone.step()
    ours = all_ranks(whole, ranks)
    assert (ours["x"][0] != whole.params[0]).float().mean() < 0.01
    assert (ours["x"][0].float() - whole.params[0].float()).abs().max() <= 2**-7 * whole.params[0].abs().max()


@interpreted
@pytest.mark.parametrize("blocks", [INT8, INT4], ids=str)
def test_moments_in_blocks_on_ranks_are_those_of_the_unsharded_step(blocks: torch.dtype) -> None:
    whole = test_triton.bucket((7, 300), (40, 20), state_dtype=blocks)
    ranks = on_ranks(whole, [{0: [3]}, {0: [40]}])
    together(ranks, lamb.Lamb)
    test_triton.stepped(whole)
    ours = all_ranks(whole, ranks)
    for name, values in whole.state.items():
        assert all(a.equal(b) for a, b in zip(ours[name], values, strict=True)), name
    torch.testing.assert_close(ours["x"], whole.params, rtol=1e-6, atol=1e-6)


@interpreted
@pytest.mark.parametrize("average", [INT8, INT4], ids=str)
def test_an_average_in_codes_on_ranks_is_that_of_the_unsharded_step(average: torch.dtype) -> None:
    whole = test_triton_came.bucket((30, 300), (9, 20), average=average)
    ranks = on_ranks(whole, [{0: [11]}, {0: [9]}])
    together(ranks, came.Came)
    test_triton_came.stepped(whole)
    ours = all_ranks(whole, ranks)
    for a, b in zip(ours["exp_avg"], whole.state["exp_avg"], strict=True):
        mine, true = (codec.unpack_int4(each) if average == INT4 else each.int() for each in (a, b))
        assert (mine != true).float().mean() < 0.01
        assert (mine - true).abs().max() <= 1
    torch.testing.assert_close(ours["x"], whole.params, rtol=1e-3, atol=1e-3)


@interpreted
def test_tables_wait_for_each_stream_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a table that is freed while a second stream reads it must not be reused."""
    recorded: set[tuple[int, str]] = set()
    monkeypatch.setattr(
        Tensor, "record_stream", lambda table, name: recorded.add((table.data_ptr(), name)), raising=False
    )
    kernel = came.Came([on_ranks(test_triton_came.bucket((8, 6)), [{0: [3]}])[0]])
    for name in ("first", "second", "first"):
        monkeypatch.setattr(tables, "current_stream", lambda _, name=name: name)
        kernel.prepare()
    (part,) = kernel.groups
    assert isinstance(part, came_shards.CameShardLaunchGroup)
    for table in (part.rows, part.program_to_row, part.partials, part.grads, part.by_row.here, part.by_col.positions):
        assert {(table.data_ptr(), "first"), (table.data_ptr(), "second")} <= recorded
    assert kernel.uploads.streams == ["first", "second"]
