"""Additional kernels for CAME's shards: sums over lines that extend over several ranks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

from bighorn.kernels.triton import came_layout as layout
from bighorn.kernels.triton import came_scaling_kernels as scaling
from bighorn.kernels.triton import came_tiling_kernels as tiling
from bighorn.kernels.triton import common_kernels as common


@triton.jit
def came_known_squares(
    rows_ptr, grads_ptr, tile_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, partials_ptr,
    G: tl.constexpr, COMPUTE: tl.constexpr, SPLIT: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums, along the split dim, of g^2 divided by the averages that are not split."""
    tile = tl.program_id(0)
    index = tl.load(tile_to_row_ptr + tile).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    _, _, matrix, line, column = tiling.corner(row_ptr, tile, TALL, WIDE)
    start, shape, row_parts, col_parts = tiling.tile_at(row_ptr, tile, partials_ptr, TALL, WIDE)
    if SPLIT == "rows":
        known, parts = (
            tiling.averages(row_ptr, layout.SQ_ROW, matrix * tl.load(row_ptr + layout.HEIGHT) + line, COMPUTE),
            col_parts,
        )
    else:
        known, parts = (
            tiling.averages(row_ptr, layout.SQ_COL, matrix * tl.load(row_ptr + layout.WIDTH) + column, COMPUTE),
            row_parts,
        )
    g, scale = tl.load(grads_ptr + index), common.gradient_scale(scale_ptr, option_ptr, COMPUTE)
    if tiling.aligned(g, shape, VECTOR):
        known_squares(common.at(g, start, G), shape, scale, known, parts, SPLIT, VECTOR, WIDE, TILE_BLOCK)
    else:
        known_squares(common.at(g, start, G), shape, scale, known, parts, SPLIT, 1, WIDE, 2 * layout.FEW)


@triton.jit
def known_squares(
    g, shape, scale, known, parts,
    SPLIT: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the partial sums of a tile."""
    ROWS: tl.constexpr = TILE_BLOCK // WIDE
    total = tl.zeros((ROWS, WIDE), scale.dtype)
    for i in range(0, shape[0], ROWS):
        offsets, mask = tiling.tile_block(i, shape, VECTOR, WIDE, ROWS)
        value = common.gradient(g, offsets, mask, scale, VECTOR)
        if SPLIT == "rows":
            value *= scaling.row_factors(known, i, shape, 1.0, ROWS)[:, None]
        else:
            value *= scaling.column_factors(known, shape, WIDE)[None, :]
        total += value * value
        if SPLIT == "columns":
            tiling.store_lines(parts, i, shape[0], tl.sum(value * value, 1), ROWS)
    if SPLIT == "rows":
        tiling.store_columns(parts, shape[1], tl.sum(total, 0), WIDE)


@triton.jit
def came_line_sums(
    rows_ptr, grads_ptr, piece_to_row_ptr, options_ptr, apply_mask_ptr, partials_ptr, inner_ptr,
    SPLIT: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Add up partial sums of the lines whose averages are split."""
    piece = tl.program_id(0)
    index = tl.load(piece_to_row_ptr + piece).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, _ = common.entries(rows_ptr, options_ptr, index)
    is_row, line, mask, _, parts = tiling.lines_of(row_ptr, piece, TALL, WIDE)
    mask = mask & tiling.is_split(is_row, SPLIT)
    tl.store(tiling.line_at(inner_ptr, row_ptr, is_row, line), tiling.line_totals(parts, partials_ptr), mask=mask)


@triton.jit
def came_settle(
    rows_ptr, grads_ptr, piece_to_row_ptr, options_ptr, apply_mask_ptr, lines_ptr,
    COMPUTE: tl.constexpr, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Store averages that were added up over all ranks."""
    piece = tl.program_id(0)
    index = tl.load(piece_to_row_ptr + piece).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, _ = common.entries(rows_ptr, options_ptr, index)
    is_row, line, mask, _, _ = tiling.lines_of(row_ptr, piece, TALL, WIDE)
    if RESIDUAL:
        average = tiling.averages(row_ptr, tl.where(is_row, layout.RES_ROW, layout.RES_COL), line, COMPUTE)
    else:
        average = tiling.averages(row_ptr, tl.where(is_row, layout.SQ_ROW, layout.SQ_COL), line, COMPUTE)
    mask = mask & tiling.is_split(is_row, SPLIT)
    tl.store(average, tl.load(tiling.line_at(lines_ptr, row_ptr, is_row, line), mask=mask), mask=mask)
