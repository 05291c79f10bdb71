"""Buckets for tests of kernels without an optimizer, and simulated ranks that hold shards of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels import Bucket, codec, rounding
from bighorn._kernels.bucket import Shard
from bighorn._kernels.options import CameOptions, Factor
from bighorn._kernels.triton import trial

OPTIONS: dict[str, Any] = {
    "lamb": replace(trial.OPTIONS, eps=1e-6, weight_decay=0.1),
    "came": CameOptions(
        lr=0.1,
        betas=(0.9, 0.999, 0.9999),
        eps=(1e-30, 1e-16),
        clip_threshold=1.0,
        weight_decay=0.1,
        decay_rate=None,
        bias_correction=True,
        scale_parameter=True,
        scale_eps=1e-3,
        cautious=False,
        maximize=False,
        factor="matrix",
    ),
}

Shape = tuple[int, ...]


def bucket(
    algorithm: str,
    *shapes: Shape,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Bucket[Any]:
    """Return rows with gradients and a nonzero state, in blocks if it is int8, or uint8 for 4 bits."""
    torch.manual_seed(0)
    blocks, int4 = state_dtype in (torch.int8, torch.uint8), state_dtype == torch.uint8
    given = replace(OPTIONS[algorithm], **{"blocks": blocks, "int4": int4, **options})
    factor: Factor | None = getattr(given, "factor", None)
    params = [torch.randn(shape).to(dtype) for shape in shapes]
    grads: list[Any] = [torch.randn(shape).to(dtype) for shape in shapes]
    state: dict[str, list[Tensor]] = {}
    for name in ("exp_avg", "exp_avg_sq") if algorithm == "lamb" else ("exp_avg",):
        square = name == "exp_avg_sq"
        values = [torch.rand(shape) - (0 if square else 0.5) for shape in shapes]
        if not blocks:
            state[name] = [each.to(state_dtype) for each in values]
            continue
        form = given.forms[name][torch.uint8 if square else state_dtype]
        leading = [max(1, len(shape) - 1) if factor == "last_two" else 1 for shape in shapes]
        coded = [codec.encode(each, form, leading=n) for each, n in zip(values, leading, strict=True)]
        state |= {name: [codes for codes, _ in coded], f"{name}_scale": [scales for _, scales in coded]}
    if algorithm == "came" and factor is None:
        state["exp_avg_sq"] = [torch.rand(shape) for shape in shapes]
    for of in ("sq", "res") if factor else ():
        axes = [len(shape) - 2 if factor == "last_two" else 0 for shape in shapes]
        state[f"exp_avg_{of}_row"] = [torch.rand(shape[: at + 1]) for shape, at in zip(shapes, axes, strict=True)]
        lines = [(*shape[:at], *shape[at + 1 :]) for shape, at in zip(shapes, axes, strict=True)]
        state[f"exp_avg_{of}_col"] = [torch.rand(line) for line in lines]
    for name, kept in rounding.AUX_STATE[given.weight_rounding].items():
        state[name] = [torch.zeros(shape, dtype=kept) for shape in shapes]
    steps = [torch.tensor(3.0) for _ in shapes]
    metrics, ids, firsts = torch.zeros(len(shapes), 3), list(range(len(shapes))), [2**32 - 7 for _ in shapes]
    return Bucket(given, params, state, steps, steps, metrics, grads, param_ids=ids, slot_offsets=firsts)


def everything(of: Bucket[Any]) -> list[Tensor]:
    """Return all tensors that a step writes."""
    return [*of.params, *itertools.chain.from_iterable(of.state.values()), *of.steps, of.metrics]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


def stepped(kernel: Any, of: Bucket[Any], *arguments: Any) -> list[Tensor]:
    """Step a bucket by a kernel, and return all tensors that the step has written."""
    stepper = kernel([of])
    stepper.prepare()
    stepper.step(*arguments)
    return everything(of)


# ---- simulated ranks ------------------------------------------------------------------------------------------------

Cuts = dict[int, Sequence[int]]
"""The positions at which each sharded dim is cut."""
Divide = Callable[[Shape, Cuts], list[Shard]]

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
"""How CAME factors tensors, their shapes, and their cuts."""


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


def parts_of_rows(shape: Shape, cuts: Cuts) -> list[Shard]:
    """Return the shards of flat tensors that are cut inside rows, at positions of elements."""
    ends = [0, *cuts[0], math.prod(shape)]
    return [Shard.around(range(a, b), shape, cut=True) for a, b in itertools.pairwise(ends)]


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
    elif shard.elements is not None:
        return value.flatten()[shard.elements.start : shard.elements.stop].clone()
    at = tuple(slice(shard.offset[dim], shard.offset[dim] + shard.size[dim]) for dim in dims)
    return value[at].clone(memory_format=torch.preserve_format)


def on_ranks(whole: Bucket[Any], cuts: Sequence[Cuts], divide: Divide = boxes) -> list[Bucket[Any]]:
    """Return the bucket of each rank; all tensors have the same number of shards."""
    factor = getattr(whole.options, "factor", None)
    shards = [divide(tuple(x.shape), each) for x, each in zip(whole.params, cuts, strict=True)]
    buckets = []
    for mine in zip(*shards, strict=True):
        columns = {
            name: [part_of(name, value, shard, factor) for value, shard in zip(values, mine, strict=True)]
            for name, values in {"x": whole.params, "g": whole.grads, **whole.state}.items()
        }
        x, g, steps = columns.pop("x"), columns.pop("g"), [step.clone() for step in whole.steps]
        own: dict[str, Any] = {"params": x, "grads": g, "state": columns, "steps": steps, "unique_steps": steps}
        buckets.append(replace(whole, metrics=whole.metrics.clone(), shards=[*mine], **own))
    return buckets


def together(buckets: list[Bucket[Any]], kernel: Any, *arguments: Any) -> list[tuple[int, torch.dtype]]:
    """Step all ranks once; return the number and the dtype of the sums of each reduction round."""
    running, exchanged = [], []
    for each in buckets:
        stepper = kernel([each])
        stepper.prepare()
        running.append(stepper.sharded_step(*arguments))
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
    out: dict[str, list[Tensor]] = {}
    for name, values in {"x": whole.params, **whole.state}.items():
        parts = [rank.params if name == "x" else rank.state[name] for rank in ranks]
        out[name] = [
            gathered(name, value, [part[i] for part in parts], [rank.shards[i] for rank in ranks], factor)
            for i, value in enumerate(values)
        ]
    return out
