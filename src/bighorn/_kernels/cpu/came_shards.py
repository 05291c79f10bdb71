"""CAME's slots as shards of whole tensors, and the sums of the library that are added up over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket, Shard, matrix_shape, row_axis
from bighorn._kernels.cpu.library import STRUCTURES
from bighorn._kernels.options import CameOptions


class Shards:
    """The table of all slots, and one tensor of sums for each reduction round.

    Attributes:
        table: One entry per slot.
        sums: In the order of slots, in float64.
        dtypes: The dtypes in which they are reduced, as in the reference: float64 if there are sums of squares.
    """

    def __init__(self, buckets: list[Bucket[CameOptions]]) -> None:
        self.positions: list[Tensor] = []  # kept alive, because the table has only their addresses
        slots = [
            (bucket, i, bucket.shards[i] if bucket.shards else Shard.whole(tuple(x.shape)))
            for bucket in buckets
            for i, x in enumerate(bucket.params)
        ]
        wholes = [self._whole(*slot) for slot in slots]
        counts = [
            numbers(whole, bucket.options.factor is not None)
            for whole, (bucket, _, _) in zip(wholes, slots, strict=True)
        ]
        columns = list(zip(*counts, strict=True))
        used = [column for column in columns if sum(column)]
        self.table = (STRUCTURES["FactoredShard"] * len(wholes))(*wholes)
        self.sums = [torch.empty(sum(column), dtype=torch.float64, device="cpu") for column in used]
        for i, (sums, column) in enumerate(zip(self.sums, used, strict=True)):
            for whole, start in zip(self.table, itertools.accumulate(column, initial=0), strict=False):
                whole.sums[i] = sums.data_ptr() + start * sums.itemsize
        both_ways = [bool(whole.split_down and whole.split_across) for whole in wholes]
        squares = [not all(both_ways), any(both_ways), False]
        self.dtypes = [torch.float64 if squared else torch.float32 for squared in squares[: len(used)]]

    def _whole(self, bucket: Bucket[CameOptions], i: int, shard: Shard) -> Any:
        factor, dims = bucket.options.factor, range(len(shard.shape))
        matrices, height, width = matrix_shape(torch.Size(shard.shape), factor)
        if factor is None:
            return STRUCTURES["FactoredShard"](matrices=matrices, height=height, width=width)
        axis = row_axis(len(dims), factor)
        row, col = (bucket.state[f"exp_avg_sq_{which}"][i] for which in ("row", "col"))
        return STRUCTURES["FactoredShard"](
            matrices=matrices,
            height=height,
            width=width,
            matrix_at=self._at(shard, dims[:axis]),
            row_at=self._at(shard, dims[: axis + 1], row),
            col_at=self._at(shard, (*dims[:axis], *dims[axis + 1 :]), col),
            split_down=shard.splits([axis]),
            split_across=shard.splits(dims[axis + 1 :]),
            leads_down=shard.leads([axis]),
            leads_across=shard.leads(dims[axis + 1 :]),
        )

    def _at(self, shard: Shard, dims: Sequence[int], like: Tensor | None = None) -> int | None:
        """Return the address of the elements' positions along these dims in the whole tensor, or None for 0, 1, ..."""
        if all(shard.size[dim] == shard.shape[dim] for dim in dims) and (like is None or like.is_contiguous()):
            return None
        self.positions.append(shard.positions_along(dims, like))
        return self.positions[-1].data_ptr()


def numbers(whole: Any, factored: bool) -> tuple[int, int, int]:
    """Return how many numbers each reduction round of a tensor has; csrc/factored_shards.c documents which."""
    matrices, height, width = whole.matrices, whole.height, whole.width
    if matrices * height * width == 0:
        return 0, 0, 0
    if not factored:
        return 2, 0, 0
    if whole.split_down and whole.split_across:
        return matrices * (height + width), 2, matrices * (height + width)
    if whole.split_down or whole.split_across:
        lines = matrices * (width if whole.split_down else height)
        return 2 * lines + matrices + 1, lines + 2 * matrices, 0
    return 2, 1, 0
