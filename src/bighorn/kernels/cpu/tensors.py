"""The structures that describe tensors to the library, and the tensors that it cannot serve."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels.bucket import Bucket
from bighorn.kernels.cpu import library
from bighorn.kernels.options import Options
from bighorn.kernels.reference.stepper import needs_rng_key
from bighorn.kernels.rounding import AUX_STATE

CHUNK_ELEMS = 8192  # CHUNK_ELEMS of csrc/run.h

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STATE_TYPES = {**TYPES, torch.int8: 3, torch.uint8: 4}
ROUNDING_MODES = {"nearest": 0, "stochastic": 1, "kahan": 2, "master": 3, "kahan8": 4}


def unsupported_reason(param: Tensor) -> str | None:
    """The reason why no algorithm of the library can serve a tensor, or None."""
    if library.LIBRARY is None:
        return library.LIBRARY_DETAIL
    if param.device.type != "cpu":
        return f"it is on {param.device}"
    if param.dtype not in TYPES:
        return f"its dtype is {param.dtype}"
    return None


def describe_gradient(g: Tensor) -> Any:
    """Return the structure of a gradient."""
    return library.STRUCTURES["Gradient"](size=g.numel(), type=TYPES[g.dtype])


def weights(bucket: Bucket[Options], i: int, positions: array[int] | None) -> Any:
    """Return how the weights of row `i` of a bucket are stored, and their `position_layout`."""
    x, way = bucket.params[i], bucket.options.weight_rounding
    offset, param_id = (first_position(bucket, i), bucket.param_ids[i]) if needs_rng_key(bucket) else (0, 0)
    return library.STRUCTURES["Weights"](
        data=x.data_ptr(),
        aux=next((bucket.state[name][i].data_ptr() for name in AUX_STATE[way]), None),
        layout=positions.buffer_info()[0] if positions else None,
        offset=offset,
        param_id=param_id,
        type=TYPES[x.dtype],
        rounding=ROUNDING_MODES[way],
    )


def first_position(bucket: Bucket[Options], i: int) -> int:
    """Return the position of the first element of row `i` in its parameter."""
    if not bucket.shards:
        return bucket.row_offsets[i]
    shard = bucket.shards[i]
    along = zip(shard.offset, contiguous_strides(shard.shape), strict=True)
    return bucket.row_offsets[i] + sum(offset * stride for offset, stride in along)


def position_layout(bucket: Bucket[Options], i: int) -> array[int] | None:
    """Return the layout of row `i` in its parameter; None if its elements are consecutive there."""
    if not bucket.shards:
        return None
    return layout(bucket.shards[i].size, bucket.shards[i].shape)


def layout(sizes: Sequence[int], whole: Sequence[int]) -> array[int] | None:
    """Return the layout (csrc/numbers.h) of a box of this size in a row-major tensor; None if it is consecutive."""
    order, strides = contiguous_strides(sizes), contiguous_strides(whole)
    dims = [d for d in range(len(sizes)) if sizes[d] > 1]
    if all(order[d] == strides[d] for d in dims):
        return None
    merged: list[tuple[int, int]] = []  # dims that are consecutive in the whole tensor, too, are one dim
    for d in dims:
        size, stride = sizes[d], strides[d]
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return array("q", [len(merged), *(size for size, _ in merged), *(stride for _, stride in merged)])


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a row-major tensor."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
