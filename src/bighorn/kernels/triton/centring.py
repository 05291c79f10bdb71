"""Gradient centralisation in Triton, the host side: the means of rows, and rows that extend over several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from bighorn.kernels.arithmetic import compute_dtype
from bighorn.kernels.bucket import Shard
from bighorn.kernels.triton.tables import Uploads

AREA = 1 << 15  # elements of a tile
TILE_COLUMNS = 2048
WIDE = 256  # columns of a tile that are in registers at a time
NARROW = 32  # the same if a row has no more
LINES = 64  # rows whose partial sums one program adds up


class RowMeans:
    """The means of the rows of dim 0 of a launch group's gradients.

    A tile has up to TILE_COLUMNS columns, and as many rows as make AREA elements. A row with more columns has one
    partial sum for each tile across it, and a piece is LINES such rows.

    Attributes:
        means: The mean of each row, in the dtype of the arithmetic. The kernels compute the sum of a row that other
            ranks have a part of.
        partials: The partial sums.
        columns: The last columns of the table of rows; `centring_kernels.py` numbers them.
        tile_to_row: The row of the table of each tile.
        piece_to_row: The same of each piece.
        is_split: Whether other ranks have a part of some rows.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        shards: Sequence[Shard],
        uploads: Uploads,
        program_table: Callable[[list[int]], Tensor],
    ) -> None:
        heights = [x.shape[0] for x in params]
        self.means = torch.zeros(sum(heights), dtype=compute_dtype(params[0]), device=uploads.device)
        self.columns: list[list[int]] = []
        tiles: list[int] = []
        pieces: list[int] = []
        first = part = tile = piece = 0
        for x, shard, height in zip(params, shards, heights, strict=True):
            width = x.numel() // max(height, 1)
            across = -(-width // TILE_COLUMNS)
            tall = AREA // min(max(1 << (width - 1).bit_length(), NARROW), TILE_COLUMNS) if width else 1
            address = self.means.data_ptr() + first * self.means.itemsize
            self.columns.append([address, tall, tile, part, piece, 1 if splits(shard) else width])
            tiles.append(across * -(-height // tall))
            pieces.append(-(-height // LINES) if across > 1 else 0)
            first, tile, piece = first + height, tile + tiles[-1], piece + pieces[-1]
            part += across * height if across > 1 else 0
        self.partials = torch.empty(part, dtype=torch.float64, device=uploads.device)
        self.tile_to_row, self.piece_to_row = program_table(tiles), program_table(pieces)
        self.is_split = any(map(splits, shards))
        if self.is_split:
            self._index_split_rows(heights, shards, uploads)

    def added_up(self) -> Generator[Tensor, None, None]:
        """Yield the sums of the rows that other ranks have a part of, to be added up over all ranks, in place."""
        if self.is_split:
            sums = torch.zeros(self.size, dtype=torch.float64, device=self.means.device)
            sums[self.positions] = self.means[self.here].double()
            yield sums
            self.means[self.here] = (sums[self.positions] / self.widths).to(self.means.dtype)

    def _index_split_rows(self, heights: list[int], shards: Sequence[Shard], uploads: Uploads) -> None:
        here: list[int] = []
        positions: list[int] = []
        widths: list[int] = []
        first = self.size = 0
        for height, shard in zip(heights, shards, strict=True):
            if splits(shard):
                here += range(first, first + height)
                positions += range(self.size + shard.offset[0], self.size + shard.offset[0] + height)
                widths += [math.prod(shard.shape[1:])] * height
                self.size += shard.shape[0]
            first += height
        self.here, self.positions = (uploads.table(each, torch.int64) for each in (here, positions))
        self.widths = uploads.table(widths, torch.int64)


def splits(shard: Shard) -> bool:
    """Whether other ranks have a part of a shard's rows."""
    return shard.splits(range(1, len(shard.shape)))
