"""An accelerator's lists of shards, on CPU tensors: the tests simulate ranks and add up their sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bighorn import kernels
from bighorn.kernels import Bucket
from bighorn.kernels.bucket import Shard
from bighorn.kernels.rounding import ROUNDING_MODES, Rounding

pytest.importorskip("triton", reason="the simulated ranks are those of the tests of Triton's shards")
from tests.backends import test_triton, test_triton_came
from tests.backends.test_triton_shards import (
    LAYOUTS,
    OTHER,
    Cuts,
    Shape,
    all_ranks,
    boxes,
    fragments,
    on_ranks,
    together,
)

BF16 = torch.bfloat16


def stepped(algorithm: str, whole: Bucket[Any], *arguments: Any) -> None:
    kernels.kernel("reference", algorithm)([whole]).step(*arguments)


def assert_equal(whole: Bucket[Any], ranks: list[Bucket[Any]]) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank.metrics, whole.metrics, rtol=1e-5, atol=0)
        assert all(a.equal(b) for a, b in zip(rank.steps, whole.steps, strict=True))
    for name, values in all_ranks(whole, ranks).items():
        torch.testing.assert_close(values, {"x": whole.params, **whole.state}[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *(pytest.param(layout, {}, id=layout) for layout in LAYOUTS),
        *(
            pytest.param(layout, OTHER, id=f"{layout}-other")
            for layout in ("columns", "rows-of-matrices", "unfactored")
        ),
        pytest.param("both", {"scale_parameter": True, "bias_correction": True}, id="both-scaled"),
    ],
)
def test_came_on_ranks_equals_the_unsharded_step(layout: str, options: dict[str, Any]) -> None:
    came_on_ranks(layout, options, boxes)


@pytest.mark.parametrize("layout", ["rows", "matrices"])
def test_came_on_fragments_of_whole_rows_equals_the_unsharded_step(layout: str) -> None:
    came_on_ranks(layout, {}, fragments)


def came_on_ranks(layout: str, options: dict[str, Any], shards_of: Callable[[Shape, Cuts], list[Shard]]) -> None:
    factor, shapes, cuts = LAYOUTS[layout]
    whole = test_triton_came.bucket(*shapes, **{"factor": factor, **options})
    ranks = on_ranks(whole, cuts, shards_of)
    rounds = together(ranks, kernels.kernel("foreach", "came"), 0.5)
    assert len(rounds) == (1 if factor is None else 3)
    stepped("came", whole, 0.5)
    assert_equal(whole, ranks)


@pytest.mark.parametrize(
    "options", [{}, {"decay_mode": "l2"}, {"cautious": True}, {"decay_mode": "decoupled"}], ids=str
)
def test_lamb_on_ranks_equals_the_unsharded_step(options: dict[str, Any]) -> None:
    shapes: tuple[Shape, ...] = (7, 30), (6, 5), (4, 5, 6), (3, 4)
    cuts: list[Cuts] = [{0: [3]}, {1: [2]}, {2: [2]}, {0: [3]}]
    whole = test_triton.bucket(*shapes, **options)
    ranks = on_ranks(whole, cuts)
    rounds = together(ranks, kernels.kernel("foreach", "lamb"), 0.5)
    assert len(rounds) == (2 if "cautious" in options else 1)
    stepped("lamb", whole, 0.5)
    assert_equal(whole, ranks)


@pytest.mark.parametrize("way", ROUNDING_MODES)
@pytest.mark.parametrize("cuts", [{0: [3]}, {0: [2], 1: [11]}], ids=["rows", "both"])
@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_weights_on_ranks_are_rounded_as_those_of_the_unsharded_step(algorithm: str, cuts: Cuts, way: Rounding) -> None:
    """A few weights differ, since sums have another order."""
    of: Any = {"lamb": test_triton, "came": test_triton_came}[algorithm]
    whole: Bucket[Any] = of.bucket((7, 300), dtype=BF16, weight_rounding=way)
    ranks = on_ranks(whole, [cuts])
    together(ranks, kernels.kernel("foreach", algorithm))
    stepped(algorithm, whole)
    (ours,) = all_ranks(whole, ranks)["x"]
    assert (ours != whole.params[0]).float().mean() < 0.01
    assert (ours.float() - whole.params[0].float()).abs().max() <= 2**-7 * whole.params[0].abs().max()


# ---- shards that begin and end inside a row -------------------------------------------------------------------------


def elements_of(name: str, value: Tensor, shard: Shard) -> Tensor:
    """Return a shard's elements of a parameter, or the rows and columns of the box around them."""
    assert shard.elements is not None
    if name.endswith("_row"):
        return value[shard.offset[0] :][: shard.size[0]].clone()
    if name.endswith("_col"):
        return value.clone() if shard.elements else value.flatten()[:0].view(shard.size[1:]).clone()
    return value.flatten()[shard.elements.start : shard.elements.stop].clone()


ENDS = {"inside-rows": [100, 101, 700], "one-row": [64, 70, 80], "none": [0, 0, 600]}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_parts_of_rows_equal_the_unsharded_step(algorithm: str, ends: str) -> None:
    """Flat tensors of ZeRO and of Megatron's distributed optimizer are cut inside rows."""
    shapes: tuple[Shape, ...] = (31, 29), (29, 31)
    of: Any = {"lamb": test_triton, "came": test_triton_came}[algorithm]
    whole: Bucket[Any] = of.bucket(*shapes)
    cuts = [range(a, b) for a, b in itertools.pairwise([0, *ENDS[ends], math.prod(shapes[0])])]
    ranks = []
    for cut in cuts:
        shards = [Shard.around(cut, shape, cut=True) for shape in shapes]
        columns: dict[str, list[Any]] = {"x": whole.params, "g": whole.grads, **whole.state}
        state: dict[str, list[Any]] = {
            name: [elements_of(name, value, shard) for value, shard in zip(values, shards, strict=True)]
            for name, values in columns.items()
        }
        x, g, steps = state.pop("x"), state.pop("g"), [step.clone() for step in whole.steps]
        parts: dict[str, Any] = {
            "params": x,
            "grads": g,
            "state": state,
            "steps": steps,
            "unique_steps": steps,
            "shards": shards,
        }
        ranks.append(replace(whole, metrics=whole.metrics.clone(), **parts))
    together(ranks, kernels.kernel("foreach", algorithm), 0.5)
    stepped(algorithm, whole, 0.5)
    for i, param in enumerate(whole.params):
        torch.testing.assert_close(torch.cat([rank.params[i] for rank in ranks]), param.flatten(), rtol=1e-5, atol=1e-6)
        m = torch.cat([rank.state["exp_avg"][i] for rank in ranks])
        torch.testing.assert_close(m, whole.state["exp_avg"][i].flatten(), rtol=1e-5, atol=1e-6)
    for rank in ranks:
        torch.testing.assert_close(rank.metrics, whole.metrics, rtol=1e-5, atol=0)
