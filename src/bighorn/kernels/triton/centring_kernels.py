"""Gradient centralisation on the device: the mean of each row of dim 0, and gradients without it.

A row is the elements of one index of dim 0, which are consecutive in memory. Sums are in float64, in a fixed order.
"""

import triton
import triton.language as tl

from bighorn.kernels.triton import centring
from bighorn.kernels.triton import common_kernels as common

TILE_COLUMNS = tl.constexpr(centring.TILE_COLUMNS)
WIDE = tl.constexpr(centring.WIDE)
NARROW = tl.constexpr(centring.NARROW)
LINES = tl.constexpr(centring.LINES)
REACH = tl.constexpr(1 << 16)  # positions from the first to the last that a program serves, at most
PARTS = tl.constexpr(64)  # partial sums of a row in registers

# The last columns of the table of rows: `RowMeans` in `centring.py` builds them.
MEANS = tl.constexpr(common.ROW - 6)  # the address of its means, in the dtype of the arithmetic
TALL = tl.constexpr(common.ROW - 5)  # the rows of a tile
FIRST_TILE = tl.constexpr(common.ROW - 4)
FIRST_PART = tl.constexpr(common.ROW - 3)  # its first partial sum; each tile across a tensor has one per row
FIRST_PIECE = tl.constexpr(common.ROW - 2)
DIVISOR = tl.constexpr(common.ROW - 1)  # the elements of a row; 1 if other ranks have a part of it

# ---- means -----------------------------------------------------------------------------------------------------------


@triton.jit
def row_sums(
    rows_ptr, grads_ptr, tile_to_row_ptr, apply_mask_ptr, partials_ptr,
    G: tl.constexpr, COMPUTE: tl.constexpr, G_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute the means of rows that are within one tile, and the sums over parts of longer ones."""
    tile = tl.program_id(0)
    index = tl.load(tile_to_row_ptr + tile).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr = rows_ptr + index * common.ROW
    height, width, across = extent(row_ptr)
    g = tl.load(grads_ptr + index)
    local, tall = tile - tl.load(row_ptr + FIRST_TILE), tl.load(row_ptr + TALL)
    line, column_tile = local // across * tall, local % across
    shape = (
        tl.minimum(height - line, tall).to(tl.int32),
        tl.minimum(width - column_tile * TILE_COLUMNS, TILE_COLUMNS).to(tl.int32),
        width,
    )
    pointer = common.at(g, line * width + column_tile * TILE_COLUMNS, G)
    to = (
        common.at(tl.load(row_ptr + MEANS), line, COMPUTE),
        partials_ptr + tl.load(row_ptr + FIRST_PART) + column_tile * height + line,
        tl.load(row_ptr + DIVISOR),
        across == 1,
    )
    VECTOR: tl.constexpr = G_BLOCK // common.LANES
    if width <= NARROW:
        sum_rows(pointer, shape, to, 1, NARROW, 2 * G_BLOCK)
    elif (g % 16 == 0) & (width % VECTOR == 0):
        sum_rows(pointer, shape, to, VECTOR, WIDE, 2 * G_BLOCK)
    else:
        sum_rows(pointer, shape, to, 1, WIDE, 2 * G_BLOCK)


@triton.jit
def sum_rows(g, shape, to, VECTOR: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the mean or the sum of each row of a tile."""
    ROWS: tl.constexpr = BLOCK // COLUMNS
    means, partials, divisor, is_whole = to
    columns = tl.arange(0, COLUMNS)
    for i in range(0, shape[0], ROWS):
        lines = i + tl.arange(0, ROWS)
        # The quotients are exact, and show the compiler that the products are multiples.
        starts = (lines.to(tl.int64) * (shape[2] // VECTOR * VECTOR))[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float64)
        for j in range(0, shape[1], COLUMNS):
            mask = (lines < shape[0])[:, None] & (j + columns < shape[1] // VECTOR * VECTOR)[None, :]
            value = common.read(g, starts + (j + columns)[None, :], mask, VECTOR)
            total += value.to(means.dtype.element_ty).to(tl.float64)
        sums = tl.sum(total, 1)
        tl.store(means + lines, sums / divisor, mask=(lines < shape[0]) & is_whole)
        tl.store(partials + lines, sums, mask=(lines < shape[0]) & (is_whole == 0))


@triton.jit
def row_means(
    rows_ptr, grads_ptr, piece_to_row_ptr, apply_mask_ptr, partials_ptr, COMPUTE: tl.constexpr, _SOURCES: tl.constexpr
):
    """Compute the means of rows that are longer than a tile, from the sums over their parts."""
    piece = tl.program_id(0)
    index = tl.load(piece_to_row_ptr + piece).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr = rows_ptr + index * common.ROW
    height, _, across = extent(row_ptr)
    lines = (piece - tl.load(row_ptr + FIRST_PIECE)) * LINES + tl.arange(0, LINES)
    partials = partials_ptr + tl.load(row_ptr + FIRST_PART) + lines[None, :]
    total = tl.zeros((PARTS, LINES), tl.float64)
    for i in range(0, across, PARTS):
        column_tile = (i + tl.arange(0, PARTS))[:, None]
        total += tl.load(
            partials + column_tile * height, mask=(column_tile < across) & (lines < height)[None, :], other=0.0
        )
    mean = tl.sum(total, 0) / tl.load(row_ptr + DIVISOR)
    tl.store(common.at(tl.load(row_ptr + MEANS), lines, COMPUTE), mean, mask=lines < height)


@triton.jit
def extent(row_ptr):
    """Return the number of a tensor's rows, their length, and the number of tiles across them."""
    width = tl.load(row_ptr + common.INNER)
    return tl.load(row_ptr + common.SIZE) // width, width, tl.cdiv(width, TILE_COLUMNS)


# ---- gradients -------------------------------------------------------------------------------------------------------


@triton.jit
def means_from(row_ptr, start, length, CENTRE: tl.constexpr, COMPUTE: tl.constexpr):
    """Return where `gradient` finds the means from position `start` on; a row has `length` positions.

    A position is an element, a line of a matrix, or a block of codes.
    """
    if CENTRE:
        # Within REACH a longer row ends at most once, so that it can count as one of REACH, in 32 bits.
        short = tl.minimum(length, REACH)
        begun = short - tl.minimum(length - start % length, short)
        means = common.at(tl.load(row_ptr + MEANS), start // length, COMPUTE)
        return means, begun.to(tl.int32), short.to(tl.int32)
    else:
        return row_ptr, row_ptr


@triton.jit
def gradient(pointer, offsets, mask, means, positions, exist, scale, VECTOR: tl.constexpr):
    """Return a block of a gradient without the means of its rows, times `scale` and in its dtype; 0 outside the mask.

    `positions` and their mask `exist` are those of `means_from`, and are as many as elements or broadcast to them.
    """
    g = common.read(pointer, offsets, mask, VECTOR).to(scale.dtype)
    if len(means) == 3:
        mean = tl.load(means[0] + (means[1] + positions) // means[2], mask=exist, other=0.0)
        g = tl.where(mask, g - mean, 0.0)
    return g * scale
