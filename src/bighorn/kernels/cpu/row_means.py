"""The means of gradients' rows that are computed before a step: those of long rows, and of rows that are cut up."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels.bucket import Bucket, Shard
from bighorn.kernels.cpu.abi import RunConfig
from bighorn.kernels.cpu.library import address, loaded
from bighorn.kernels.cpu.tensors import CHUNK_ELEMS


class RowMeans:
    """The means of some rows of a kernel's gradients.

    The library's loops compute a mean again in every chunk that its row extends over, so the means of longer rows are
    computed once, before the step. Rows of shards that are cut up along the dims over which gradients are centred have
    a part of their means on each rank.

    Attributes:
        needed: Whether any means are computed before the step.
        each: For each of the kernel's rows the means of its gradient, `[dim 0]`; None if the loops compute them.
    """

    def __init__(self, buckets: Sequence[Bucket[Any]]) -> None:
        self.each: list[Tensor | None] = []
        self.cut: list[tuple[Tensor, Shard]] = []
        for bucket in buckets:
            if not bucket.options.centre:
                self.each += [None] * len(bucket.params)
                continue
            shards = bucket.shards or [Shard.whole(tuple(x.shape)) for x in bucket.params]
            for x, shard in zip(bucket.params, shards, strict=True):
                means = _memory(x, shard)
                self.each.append(means)
                if means is not None and _is_cut(shard):
                    self.cut.append((means, shard))
        self.needed = any(means is not None for means in self.each)
        self.partial = torch.empty(0, dtype=torch.float64, device="cpu")  # sums of parts of the rows

    def reserve(self, gradients: Tensor) -> None:
        """Allocate memory for the table of gradients of all rows."""
        if self.needed:
            units = loaded().bighorn_row_means_units(gradients.data_ptr(), len(gradients))
            self.partial = torch.empty(units, dtype=torch.float64, device="cpu")

    def compute(self, run: RunConfig, gradients: Tensor, grads: array[int]) -> None:
        """Compute the means of the gradients at these addresses; of rows that are cut up, this rank's part of them."""
        for means, _ in self.cut:
            means.zero_()  # a gradient without elements here, or none at all, has no part of them
        partial = self.partial.data_ptr()
        loaded().bighorn_row_means(run, gradients.data_ptr(), address(grads), len(grads), partial)

    def reduced(self) -> Iterator[Tensor]:
        """Yield the parts of the means of rows that are cut up, to be added up over all ranks, and store the result."""
        if not self.cut:
            return
        parts = torch.cat([shard.spread(_kept(means, shard), _inner(shard)).view(-1) for means, shard in self.cut])
        yield parts
        sums = torch.split(parts, [shard.shape[0] for _, shard in self.cut])
        for (means, shard), whole in zip(self.cut, sums, strict=True):
            means.copy_(shard.cut(_kept(whole, shard), _inner(shard)).view(-1))


def _memory(x: Tensor, shard: Shard) -> Tensor | None:
    long = math.prod(x.shape[1:]) > CHUNK_ELEMS
    return torch.zeros(x.shape[0], dtype=torch.float64, device="cpu") if long or _is_cut(shard) else None


def _inner(shard: Shard) -> range:
    """Return the dims over which a gradient is centred."""
    return range(1, len(shard.shape))


def _is_cut(shard: Shard) -> bool:
    return shard.splits(_inner(shard))


def _kept(means: Tensor, shard: Shard) -> Tensor:
    """Return means of rows with the dims of their tensor."""
    return means.view(-1, *[1] * (len(shard.shape) - 1))
