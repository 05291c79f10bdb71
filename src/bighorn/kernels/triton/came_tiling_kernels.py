"""Positions of CAME's tiles and lines: in memory, in matrices, and among the partial sums."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

from bighorn.kernels.triton import came_layout as layout
from bighorn.kernels.triton import common_kernels as common


@triton.jit
def corner(row_ptr, tile, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Return a tile's first element, shape (rows, columns, matrix width), matrix, first row and first column."""
    height, width = tl.load(row_ptr + layout.row.HEIGHT), tl.load(row_ptr + layout.row.WIDTH)
    local = tile - tl.load(row_ptr + layout.row.FIRST_TILE)
    across, down = tl.cdiv(width, WIDE), tl.cdiv(height, TALL)
    matrix = local // (across * down)
    line, column = local // across % down * TALL, local % across * WIDE
    start = (matrix * height + line) * width + column
    high, wide = tl.minimum(height - line, TALL).to(tl.int32), tl.minimum(width - column, WIDE).to(tl.int32)
    return start, (high, wide, width), matrix, line, column


@triton.jit
def tile_at(row_ptr, tile, partials_ptr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Return a tile's first element, its shape, and the positions of its partial sums of rows and columns."""
    start, shape, matrix, line, column = corner(row_ptr, tile, TALL, WIDE)
    height, width, matrices = (
        tl.load(row_ptr + layout.row.HEIGHT),
        tl.load(row_ptr + layout.row.WIDTH),
        tl.load(row_ptr + layout.row.MATRICES),
    )
    row_part = (column // WIDE * matrices + matrix) * height + line
    col_part = (line // TALL * matrices + matrix) * width + column
    return (
        start,
        shape,
        partials_ptr + tl.load(row_ptr + layout.row.ROW_PARTS) + row_part,
        partials_ptr + tl.load(row_ptr + layout.row.COL_PARTS) + col_part,
    )


@triton.jit
def aligned(addresses, shape, VECTOR: tl.constexpr):
    """Whether every row of a tile starts at a multiple of 16 bytes, in all its arrays."""
    return (addresses % 16 == 0) & (shape[2] % VECTOR == 0)


@triton.jit
def tile_block(i, shape, VECTOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return offsets and mask of the elements of rows from the tile's `i`-th on, which are loaded VECTOR at a time."""
    lines, columns = i + tl.arange(0, ROWS), tl.arange(0, WIDE)
    # The quotients are exact, and show the compiler that the products are multiples.
    starts = lines.to(tl.int64) * (shape[2] // VECTOR * VECTOR)
    mask = (lines < shape[0])[:, None] & (columns < shape[1] // VECTOR * VECTOR)[None, :]
    return starts[:, None] + columns[None, :], mask


@triton.jit
def lines_of(row_ptr, piece, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Return the lines of a piece: whether they are rows, indices, mask, length, and the positions of partial sums."""
    height, width, matrices = (
        tl.load(row_ptr + layout.row.HEIGHT),
        tl.load(row_ptr + layout.row.WIDTH),
        tl.load(row_ptr + layout.row.MATRICES),
    )
    local = piece - tl.load(row_ptr + layout.row.FIRST_PIECE)
    of_rows = matrices * row_pieces(height, width, WIDE)
    is_row = local < of_rows
    local = tl.where(is_row, local, local - of_rows)
    lines, length = tl.where(is_row, height, width), tl.where(is_row, width, height)
    parts = tl.cdiv(length, tl.where(is_row, WIDE, TALL))
    each, lanes = lines_at_once(parts), tl.arange(0, layout.LINES)
    matrix, first = local // tl.cdiv(lines, each), local % tl.cdiv(lines, each) * each
    line = first + lanes % each
    exists = line < lines
    mask = exists & (lanes < each)
    line += matrix * lines
    return (
        is_row,
        line,
        mask,
        length,
        (
            tl.load(row_ptr + tl.where(is_row, layout.row.ROW_PARTS, layout.row.COL_PARTS)),
            parts,
            matrices * lines,
            line,
            exists,
        ),
    )


@triton.jit
def lines_at_once(parts):
    """Return how many lines a program adds up; if lines have many partial sums, several lanes share each line."""
    return tl.where(parts > layout.MANY, layout.FEW_LINES, layout.LINES)


@triton.jit
def row_pieces(height, width, WIDE: tl.constexpr):
    """Return the number of pieces of a matrix's rows."""
    return tl.cdiv(height, lines_at_once(tl.cdiv(width, WIDE)))


@triton.jit
def line_totals(where, partials_ptr):
    """Return the sums of lines, from their partial sums."""
    start, parts, lines, line, exists = where
    each, lanes = lines_at_once(parts), tl.arange(0, layout.LINES)
    shared = tl.where(parts > layout.MANY, layout.LINES // layout.FEW_LINES, 1)  # lanes per line
    total = tl.zeros((layout.PARTS, layout.LINES), tl.float64)
    for i in range(0, parts, shared * layout.PARTS):
        part = i + (tl.arange(0, layout.PARTS) * shared)[:, None].to(tl.int64) + (lanes // each)[None, :]
        offsets = start + part * lines + line[None, :]
        total += tl.load(partials_ptr + offsets, mask=(part < parts) & exists[None, :], other=0.0).to(tl.float64)
    totals = tl.sum(total, 0)
    if each == layout.FEW_LINES:
        by_line = tl.sum(tl.reshape(totals, (layout.LINES // layout.FEW_LINES, layout.FEW_LINES)), 0)
        totals = tl.reshape(
            tl.broadcast_to(by_line[None, :], (layout.LINES // layout.FEW_LINES, layout.FEW_LINES)), (layout.LINES,)
        )
    return totals


@triton.jit
def averages(row_ptr, column, first):
    """Return a pointer to the averages of a tensor's rows or columns, from index `first` on."""
    return common.at(tl.load(row_ptr + column), first, tl.float32)


@triton.jit
def store_lines(pointer, i, height, values, ROWS: tl.constexpr):
    """Store a number for each of a tile's rows from the `i`-th on."""
    lines = i + tl.arange(0, ROWS)
    tl.store(pointer + lines, values, mask=lines < height)


@triton.jit
def store_columns(col_parts, width, values, WIDE: tl.constexpr):
    """Store partial sums of columns."""
    columns = tl.arange(0, WIDE)
    tl.store(col_parts + columns, values, mask=columns < width)


@triton.jit
def is_split(is_row, SPLIT: tl.constexpr):
    """Whether the average of a line is split: a row's if columns are split, and the reverse."""
    return is_row & (SPLIT == "columns" or SPLIT == "both") | (is_row == 0) & (SPLIT == "rows" or SPLIT == "both")


@triton.jit
def line_at(lines_ptr, row_ptr, is_row, line):
    """Return the address of lines of a tensor among all lines."""
    first = tl.load(row_ptr + layout.row.FIRST_LINE) + tl.where(
        is_row, 0, tl.load(row_ptr + layout.row.MATRICES) * tl.load(row_ptr + layout.row.HEIGHT)
    )
    return lines_ptr + first + line
