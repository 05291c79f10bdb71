"""The division of CAME's tensors among programs, by their shapes alone, on the host and on the device alike.

This package has four names for some elements of a tensor. A chunk is consecutive elements that one program of LAMB, or
of CAME for unfactored tensors, serves; a tile is rows and columns of a matrix that one program of CAME serves; a block
is the elements that a program has in registers at a time, which with codes are whole blocks of `_kernels/codec.py`. A
strip is rows or columns whose averages one program advances.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from bighorn._kernels.bucket import matrix_shape
from bighorn._kernels.options import Factor

AREA = 1 << 16  # elements of a tile, at most
LEAST_AREA = 1 << 13  # the same, at least
ENOUGH = 512  # tiles that occupy a device: an H100 has 132 multiprocessors
WIDE = 256  # columns of a tile
NARROW = 16  # the same, at least, for a tall matrix with fewer columns, which would use few lanes of a wider tile
LINES = 256  # rows or columns whose averages one program advances
FEW_LINES = 8  # the same for lines with more than MANY partial sums
MANY = 64


@dataclass(frozen=True)
class TileGrid:
    """A tensor as `count` matrices of `height` x `width`."""

    count: int
    height: int
    width: int
    area: int = AREA
    """Elements of a tile."""

    @cached_property
    def wide(self) -> int:
        """The columns of a tile."""
        narrow = min(max(1 << (self.width - 1).bit_length(), NARROW), WIDE)
        return narrow if self.height > AREA // narrow else WIDE

    @cached_property
    def tall(self) -> int:
        """The rows of a tile."""
        return self.area // self.wide

    @cached_property
    def tiles(self) -> int:
        """The number of tiles of all matrices."""
        return self.count * ceil(self.height, self.tall) * ceil(self.width, self.wide)

    @cached_property
    def strips(self) -> int:
        """The number of strips of all matrices' rows and columns."""
        row_parts, col_parts = ceil(self.width, self.wide), ceil(self.height, self.tall)
        of_rows = ceil(self.height, FEW_LINES if row_parts > MANY else LINES)
        return self.count * (of_rows + ceil(self.width, FEW_LINES if col_parts > MANY else LINES))

    @cached_property
    def lines(self) -> int:
        """The number of rows and columns of all matrices."""
        return self.count * (self.height + self.width)

    @cached_property
    def row_parts(self) -> int:
        """The number of partial sums of rows."""
        return self.count * self.height * ceil(self.width, self.wide)

    @cached_property
    def col_parts(self) -> int:
        """The number of partial sums of columns."""
        return self.count * self.width * ceil(self.height, self.tall)


@lru_cache(maxsize=1024)
def tile_grid(shape: torch.Size, factor: Factor | None, area: int = AREA) -> TileGrid:
    """Return the division of a tensor into tiles."""
    return TileGrid(*matrix_shape(shape, factor), area)


def area_of(elements: int) -> int:
    """Return the elements of a tile if one launch serves so many: a small model has small tiles, to occupy a device."""
    return min(max(1 << (elements // ENOUGH).bit_length(), LEAST_AREA), AREA)


def ceil(n: int, size: int) -> int:
    """Return n / size, rounded up."""
    return -(-n // size)
