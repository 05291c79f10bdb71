"""What CAME's shards need besides the kernels of whole tensors: sums over lines that ranks have in parts."""

import triton
import triton.language as tl

from bighorn.kernels.triton.came_columns import (
    FEW,
    HEIGHT,
    RES_COL,
    RES_ROW,
    SQ_COL,
    SQ_ROW,
    WIDTH,
)
from bighorn.kernels.triton.came_place_kernels import (
    aligned,
    averages,
    corner,
    is_split,
    line_at,
    line_totals,
    lines_of,
    patch,
    place,
    store_columns,
    store_lines,
)
from bighorn.kernels.triton.came_value_kernels import (
    column_factors,
    row_factors,
)
from bighorn.kernels.triton.common_kernels import (
    at,
    entries,
    gradient_scale,
    read,
    takes_part,
)


@triton.jit
def came_known_squares(
    rows, grads, tiles, hyper, grad_scale, commit, partials,
    G: tl.constexpr, SPLIT: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr,
):  # fmt: skip
    """The partial sums, along what is split, of g^2 divided by the averages that are known though others are split."""
    tile = tl.program_id(0)
    index = tl.load(tiles + tile).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    _, _, matrix, line, column = corner(row, tile, WIDE)
    start, shape, row_parts, col_parts = place(row, tile, partials, WIDE)
    if SPLIT == "rows":
        known, parts = averages(row, SQ_ROW, matrix * tl.load(row + HEIGHT) + line), col_parts
    else:
        known, parts = averages(row, SQ_COL, matrix * tl.load(row + WIDTH) + column), row_parts
    g, scale = tl.load(grads + index), gradient_scale(grad_scale, option)
    if aligned(g, shape, VECTOR):
        known_squares(at(g, start, G), shape, scale, known, parts, SPLIT, VECTOR, WIDE, PATCH)
    else:
        known_squares(at(g, start, G), shape, scale, known, parts, SPLIT, 1, WIDE, 2 * FEW)


@triton.jit
def known_squares(
    g, shape, scale, known, parts,
    SPLIT: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr,
):  # fmt: skip
    """Those of a tile."""
    ROWS: tl.constexpr = PATCH // WIDE
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for i in range(0, shape[0], ROWS):
        offsets, mask = patch(i, shape, VECTOR, WIDE, ROWS)
        value = read(g, offsets, mask, VECTOR).to(tl.float32) * scale
        if SPLIT == "rows":
            value *= row_factors(known, i, shape, 1.0, ROWS)[:, None]
        else:
            value *= column_factors(known, shape, WIDE)[None, :]
        total += value * value
        if SPLIT == "columns":
            store_lines(parts, i, shape[0], tl.sum(value * value, 1), ROWS)
    if SPLIT == "rows":
        store_columns(parts, shape[1], tl.sum(total, 0), WIDE)


@triton.jit
def came_line_sums(rows, grads, pieces, hyper, commit, partials, lines, SPLIT: tl.constexpr, WIDE: tl.constexpr):
    """Adds up partial sums of the lines whose averages are split."""
    piece = tl.program_id(0)
    index = tl.load(pieces + piece).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, _ = entries(rows, hyper, index)
    is_row, line, mask, _, parts = lines_of(row, piece, WIDE)
    mask = mask & is_split(is_row, SPLIT)
    tl.store(line_at(lines, row, is_row, line), line_totals(parts, partials), mask=mask)


@triton.jit
def came_settle(
    rows, grads, pieces, hyper, commit, lines, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Stores averages that have been added up over all ranks."""
    piece = tl.program_id(0)
    index = tl.load(pieces + piece).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, _ = entries(rows, hyper, index)
    is_row, line, mask, _, _ = lines_of(row, piece, WIDE)
    if RESIDUAL:
        average = averages(row, tl.where(is_row, RES_ROW, RES_COL), line)
    else:
        average = averages(row, tl.where(is_row, SQ_ROW, SQ_COL), line)
    mask = mask & is_split(is_row, SPLIT)
    tl.store(average, tl.load(line_at(lines, row, is_row, line), mask=mask).to(tl.float32), mask=mask)
