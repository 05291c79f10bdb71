"""Rows without a gradient in Triton: a step leaves them unchanged, and rebuilds no table for the other rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bighorn import kernels
from bighorn.kernels import Bucket
from bighorn.kernels.triton import device, launch_group, tables
from tests.backends import test_triton, test_triton_came
from tests.backends.test_triton_shards import LAYOUTS, on_ranks
from tests.support.triton_interpreter import interpreted, mostly_slow

pytest.importorskip("triton")

BF16, F16, INT8 = torch.bfloat16, torch.float16, torch.int8

Make = Callable[[], Bucket[Any]]


def lamb(*shapes: int | tuple[int, ...], **options: Any) -> Make:
    return lambda: test_triton.bucket(*(shapes or (5, 9000, (3, 512), 0)), **options)


def came(*shapes: tuple[int, ...], **options: Any) -> Make:
    return lambda: test_triton_came.bucket(*(shapes or ((30, 300), (5, 7), (9, 20), (3, 4, 5))), **options)


def stacked(make: Make) -> Make:
    """Return a `Make` whose first two rows are slices of one parameter and share a step count."""

    def made() -> Bucket[Any]:
        of = make()
        return replace(of, steps=[of.steps[0], *of.steps[:1], *of.steps[2:]], unique_steps=[of.steps[0], *of.steps[2:]])

    return made


def misaligned(make: Make) -> Make:
    """Return a `Make` with gradients whose addresses are not multiples of 16 bytes."""

    def made() -> Bucket[Any]:
        of = make()
        return replace(of, grads=[torch.cat([g.flatten()[:1], g.flatten()])[1:].view(g.shape) for g in gradients(of)])

    return made


KINDS: dict[str, tuple[str, Make]] = {
    "lamb": ("lamb", lamb()),
    "lamb-not-adaptive": ("lamb", lamb(adapt=False, decay_mode="decoupled")),
    "lamb-l2": ("lamb", lamb(decay_mode="l2", bias_correction="lr")),
    "lamb-int8": ("lamb", lamb((3, 512), (5, 260), (6, 20), dtype=BF16, state_dtype=INT8)),
    "lamb-kahan": ("lamb", lamb(dtype=BF16, weight_rounding="kahan")),
    "lamb-stochastic": (
        "lamb",
        lamb((3, 512), (5, 260), (6, 20), dtype=F16, state_dtype=F16, weight_rounding="stochastic"),
    ),
    "lamb-stacked": ("lamb", stacked(lamb())),
    "lamb-misaligned": ("lamb", misaligned(lamb())),
    "came": ("came", came()),
    "came-last-two": ("came", came((2, 17, 300), (3, 2, 4, 5), (4, 5), factor="last_two")),
    "came-unfactored": ("came", came((9000,), (0,), (5,), (3, 4), factor=None)),
    "came-int8": ("came", came(average=INT8)),
    "came-int8-last-two": ("came", came((3, 30, 50), (2, 3, 17, 20), (3, 4), factor="last_two", average=INT8)),
    "came-int8-unfactored": ("came", came((2, 1100), (300, 1), (7, 5), factor=None, average=INT8)),
    "came-kahan": ("came", came(dtype=BF16, average=BF16, weight_rounding="kahan")),
    "came-stochastic": ("came", came(dtype=BF16, weight_rounding="stochastic")),
    "came-stacked": ("came", stacked(came())),
    "came-misaligned": ("came", misaligned(came((64, 512), (8, 256), (3, 4)))),
}


def gradients(of: Bucket[Any]) -> list[Tensor]:
    return [g for g in of.grads if g is not None]


def fresh(of: Bucket[Any], seed: int) -> None:
    """Set random gradients in the memory order of the present ones."""
    torch.manual_seed(seed)
    of.grads = [torch.empty_like(g).copy_(torch.randn(g.shape)) for g in gradients(of)]


def leave_out(of: Bucket[Any], missing: set[int]) -> None:
    of.grads = [None if i in missing else g for i, g in enumerate(of.grads)]


def present(of: Bucket[Any]) -> Bucket[Any]:
    """Return a bucket of the rows with a gradient; it shares their tensors, but not the norms."""
    rows = [i for i, g in enumerate(of.grads) if g is not None]

    def chosen(column: list[Any]) -> list[Any]:
        return [column[i] for i in rows] if column else []

    steps = chosen(of.steps)
    return replace(
        of,
        params=chosen(of.params),
        grads=chosen(of.grads),
        state={name: chosen(column) for name, column in of.state.items()},
        steps=steps,
        unique_steps=list({step.data_ptr(): step for step in steps}.values()),
        metrics=of.metrics[rows],
        shards=chosen(of.shards),
        param_ids=chosen(of.param_ids),
        row_offsets=chosen(of.row_offsets),
    )


def bits(of: Bucket[Any]) -> list[list[Tensor]]:
    """Return copies of all tensors that a step writes, row by row."""
    columns = [of.params, *of.state.values(), of.steps, [*of.metrics]]
    return [[tensor.clone() for tensor in row] for row in zip(*columns, strict=True)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


def missing_sets(of: Bucket[Any]) -> Iterator[set[int]]:
    """Yield the rows that are missing at each step; slices of one parameter are missing together."""
    together = len(of.unique_steps) < len(of.steps)
    yield {2}
    yield {0, 1} if together else {0, *range(3, len(of.params))}


@interpreted
@pytest.mark.parametrize(
    "kind",
    mostly_slow(
        KINDS,
        *("lamb", "lamb-l2", "lamb-kahan", "lamb-int8", "lamb-stacked", "lamb-misaligned"),
        *("came", "came-unfactored", "came-int8-last-two", "came-stochastic"),
    ),
)
def test_rows_without_a_gradient_stay_as_they_are(kind: str) -> None:
    """The other rows equal a bucket without the missing rows, bit for bit, and match the reference."""
    algorithm, make = KINDS[kind]
    ours, alone, exact = make(), make(), make()
    kernel = kernels.kernel("triton", algorithm)([ours])
    for number, missing in enumerate(missing_sets(ours)):
        before = bits(ours)
        for each in (ours, alone, exact):
            each.grads = make().grads
            fresh(each, number)
            leave_out(each, missing)
        left = present(alone)
        other = kernels.kernel("triton", algorithm)([left])
        other.prepare()
        squares = other.square_sum()
        other.step(0.5)
        reference = present(exact)
        kernels.kernel("reference", algorithm)([reference]).step(0.5)

        kernel.prepare()
        torch.testing.assert_close(kernel.square_sum(), squares, rtol=1e-12, atol=0)
        kernel.step(0.5)
        after = bits(ours)
        for i in missing:
            assert same(before[i], after[i]), i
        for row, theirs, true in zip(rows_of(after, missing), bits(left), bits(reference), strict=True):
            assert same(row, theirs)
            assert all(map(near, row, true))


def near(ours: Tensor, exact: Tensor) -> bool:
    """Whether values are within a rounding of low-precision state; a compensation is itself a rounding error."""
    if not ours.numel() or ours.dtype == torch.int16:
        return True
    limit = 0.01 * exact.double().abs().max() + 1e-6 if ours.is_floating_point() else 1
    return bool((ours.double() - exact.double()).abs().max() <= limit)


def rows_of(rows: list[list[Tensor]], missing: set[int]) -> list[list[Tensor]]:
    return [row for i, row in enumerate(rows) if i not in missing]


@interpreted
@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_steps_that_are_not_taken_and_steps_of_none(algorithm: str) -> None:
    make = KINDS[algorithm][1]
    ours = make()
    kernel = kernels.kernel("triton", algorithm)([ours])
    leave_out(ours, {1})
    before = bits(ours)
    kernel.prepare()
    kernel.step(torch.tensor(float("nan")), torch.tensor(False))
    assert all(map(same, before, bits(ours)))
    leave_out(ours, set(range(len(ours.params))))
    kernel.prepare()
    assert kernel.square_sum() == 0
    kernel.step()
    assert all(map(same, before, bits(ours)))


@interpreted
@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_other_rows_without_a_gradient_take_no_table_but_that_of_addresses(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    compilations: list[Any] = []
    table, compiled = tables.Uploads.table, device.compiled

    def counting(uploads: Any, values: list[Any], dtype: torch.dtype) -> Tensor:
        made.append(len(values))
        return table(uploads, values, dtype)

    def noting(*given: Any) -> Any:
        compilations.append(given)
        return compiled(*given)

    monkeypatch.setattr(tables.Uploads, "table", counting)
    monkeypatch.setattr(launch_group, "compiled", noting)
    of = KINDS[algorithm][1]()
    kernel = kernels.kernel("triton", algorithm)([of])
    kernel.prepare()
    kernel.step()
    made.clear()
    compilations.clear()
    grads = of.grads
    for missing in ({0}, {1, 2}, {1, 2}, set(range(len(grads))), set()):
        of.grads = grads
        leave_out(of, missing)
        kernel.prepare()
        kernel.step()
    assert made == [len(grads)] * 4  # none for the repeated set
    assert not compilations


@interpreted
@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_tables_are_made_anew_while_gradients_are_missing(algorithm: str) -> None:
    """A new seed of random bits rebuilds the tables; a missing gradient keeps the dtype of its previous one."""
    make = KINDS[f"{algorithm}-stochastic"][1]
    ours, alone = make(), make()
    kernel = kernels.kernel("triton", algorithm)([ours])
    for each in (ours, alone):
        each.options = replace(each.options, rounding_seed=7)
        leave_out(each, {0, 1})
    kernel.prepare()
    kernel.step()
    left = present(alone)
    other = kernels.kernel("triton", algorithm)([left])
    other.prepare()
    other.step()
    assert all(map(same, rows_of(bits(ours), {0, 1}), bits(left)))
    assert all(map(same, bits(ours)[:2], bits(make())[:2]))

    fresh(ours, 1)
    ours.grads = make().grads
    kernel.prepare()
    kernel.step()
    assert [step.item() for step in ours.steps[:2]] == [4, 4]


@interpreted
def test_a_step_count_without_rows_advances_while_it_is_among_the_counts() -> None:
    """A stacked parameter without slices has a count, but no row that could miss a gradient."""
    of = KINDS["lamb"][1]()
    count = torch.tensor(3.0)
    of.unique_steps = [*of.unique_steps, count]
    kernel = kernels.kernel("triton", "lamb")([of])
    for expected in (4, 5):
        kernel.prepare()
        kernel.step()
        assert count == expected
    of.unique_steps = of.unique_steps[:-1]
    kernel.prepare()
    kernel.step()
    assert count == 5


# ---- shards ----------------------------------------------------------------------------------------------------------


def rounds(running: list[Iterator[Tensor]]) -> Iterator[Tensor]:
    """Step all ranks once, and yield the total of each reduction round."""
    while parts := [part for each in running if (part := next(each, None)) is not None]:
        total = torch.stack(parts).sum(0)
        yield total.clone()
        for part in parts:
            part.copy_(total)


SHARDS: dict[str, tuple[str, Make, list[dict[int, Any]]]] = {
    "lamb": ("lamb", lamb((7, 30), (4, 5), (9,)), [{0: [3]}, {1: [2]}, {0: [5]}]),
    "lamb-stochastic": (
        "lamb",
        lamb((7, 30), (4, 5), (9,), dtype=BF16, weight_rounding="stochastic"),
        [{0: [3]}, {1: [2]}, {0: [5]}],
    ),
    "came-int8": ("came", came((30, 300), (9, 20), (5, 7), average=INT8), [{0: [11]}, {0: [9]}, {0: [2]}]),
    **{
        f"came-{name}": ("came", came(*shapes, factor=factor), cuts)
        for name, (factor, shapes, cuts) in LAYOUTS.items()
        if len(shapes) > 1
    },
    "came-three-kinds": ("came", came((8, 9), (7, 5), (6, 4), (5, 3)), [{0: [3]}, {1: [2]}, {1: [2]}, {0: [2]}]),
}


@interpreted
@pytest.mark.parametrize("kind", mostly_slow(SHARDS, "lamb-stochastic", "came-three-kinds"))
def test_shards_without_a_gradient_stay_as_they_are(kind: str) -> None:
    """Their sums are 0; the sums of the other rows equal the sums of buckets without the missing rows."""
    algorithm, make, cuts = SHARDS[kind]
    triton = kernels.kernel("triton", algorithm)
    whole = make()
    ours, alone = on_ranks(whole, cuts), on_ranks(whole, cuts)
    running = [triton([rank]) for rank in ours]
    for number, missing in enumerate((set[int](), {len(whole.params) - 1}, {0})):
        torch.manual_seed(number)
        grads: list[Tensor | None] = [torch.randn(g.shape).to(g.dtype) for g in gradients(whole)]
        for ranks in (ours, alone):
            for rank, like in zip(ranks, on_ranks(replace(whole, grads=grads), cuts), strict=True):
                rank.grads = like.grads
                leave_out(rank, missing)
        before = [bits(rank) for rank in ours]
        left = [present(rank) for rank in alone]
        others = [triton([rank]) for rank in left]
        for each in itertools.chain(running, others):
            each.prepare()
        totals = [*rounds([each.sharded_step(0.5) for each in running])]
        theirs = [*rounds([each.sharded_step(0.5) for each in others])]
        if len(totals) == len(theirs):  # else the rounds differ
            for total, their in zip(totals, theirs, strict=True):
                assert total[total != 0].sort().values.equal(their[their != 0].sort().values)
        assert all(total.isfinite().all() for total in totals)
        for rank, was, other in zip(ours, before, left, strict=True):
            now = bits(rank)
            assert all(map(same, rows_of(now, missing), bits(other)))
            for i in missing:
                assert same(was[i], now[i])
