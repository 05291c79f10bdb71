"""The structures that describe tensors to the library, and the tensors that it cannot serve."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket
from bighorn._kernels.cpu import library
from bighorn._kernels.options import Options
from bighorn._kernels.reference.stepper import needs_rng_key

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


def weights(bucket: Bucket[Options], i: int, positions: array[int] | None, aux: int) -> Any:
    """Return the C structure `Weights` of slot `i`. It points into `positions`, which must outlive it."""
    x, way = bucket.params[i], bucket.options.weight_rounding
    offset, param_id = (bucket.first_position(i), bucket.param_ids[i]) if needs_rng_key(bucket) else (0, 0)
    return library.STRUCTURES["Weights"](
        data=x.data_ptr(),
        aux=aux,
        layout=positions.buffer_info()[0] if positions else None,
        offset=offset,
        param_id=param_id,
        type=TYPES[x.dtype],
        rounding=ROUNDING_MODES[way],
    )


def position_layout(bucket: Bucket[Options], i: int) -> array[int] | None:
    """Return the layout of slot `i` in its parameter (csrc/numbers.h); None if its elements are consecutive there."""
    if not bucket.shards or len(runs := bucket.shards[i].runs) == 1:
        return None
    sizes, strides = zip(*runs[runs[0] == (1, 1) :][::-1], strict=True)
    return array("q", [len(sizes), *sizes, *strides])
