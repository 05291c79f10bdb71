"""CAME on the device, in Triton: passes over tiles of matrices, with the averages of rows and columns between them.

A matrix is divided into tiles. A tile contributes a partial sum to each of its rows and columns, and `came_lines` adds
these up, always in the same order. An unfactored tensor has no such sums, and is divided into chunks, as in LAMB. A
row of a tile is within one block of codes. Passes alternate in direction, since the last tiles of the previous pass may
still be in cache.

The lines tagged `CAME-...` follow `reference/came.py`, which has the details. Arithmetic is in float32. Sums
over more than a tile, and numbers that exist once per row, column or tensor, are in float64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

from bighorn.kernels.triton import came_layout as layout
from bighorn.kernels.triton import came_scaling_kernels as scaling
from bighorn.kernels.triton import came_tiling_kernels as tiling
from bighorn.kernels.triton import codec_kernels as codec
from bighorn.kernels.triton import columns
from bighorn.kernels.triton import common_kernels as common
from bighorn.kernels.triton import weight_kernels as weights


@triton.jit
def came_squares(
    rows_ptr, grads_ptr, tile_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, partials_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, KNOWN: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums of g^2, and of x^2 if the size of x scales the learning rate.

    For shards a second launch computes those along the split dim (KNOWN is "rows" or "columns") of g^2 divided by the
    averages that are not split.
    """
    tile = tl.program_id(0)
    index = tl.load(tile_to_row_ptr + tile).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    _, _, matrix, line, column = tiling.corner(row_ptr, tile, TALL, WIDE)
    start, shape, row_parts, col_parts = tiling.tile_at(row_ptr, tile, partials_ptr, TALL, WIDE)
    known, parts = row_ptr, (row_parts, col_parts)
    if KNOWN == "rows":
        known = tiling.averages(row_ptr, layout.row.SQ_ROW, matrix * tl.load(row_ptr + layout.row.HEIGHT) + line)
    elif KNOWN == "columns":
        known = tiling.averages(row_ptr, layout.row.SQ_COL, matrix * tl.load(row_ptr + layout.row.WIDTH) + column)
    g, scale = tl.load(grads_ptr + index), common.gradient_scale(scale_ptr, option_ptr)
    if tiling.aligned(g, shape, VECTOR):
        square_tile(common.at(g, start, G), shape, scale, known, parts, KNOWN, VECTOR, WIDE, TILE_BLOCK)
    else:
        square_tile(common.at(g, start, G), shape, scale, known, parts, KNOWN, 1, WIDE, 2 * layout.FEW)
    if KNOWN == "":  # noqa: SIM102 - known when the kernel is compiled, unlike the next condition
        if tl.load(option_ptr + layout.option.SCALE_EPS) >= 0:
            squares = param_squares(weights.weight_at(row_ptr, start, X, ROUNDING), shape, ROUNDING, WIDE)
            tl.store(sums_ptr + tile * layout.SUM + layout.X_SQUARES, squares)


@triton.jit
def square_tile(
    g, shape, scale, known, parts,
    KNOWN: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sums of g^2, or of g^2 / known, over the rows and the columns of a tile."""
    ROWS: tl.constexpr = TILE_BLOCK // WIDE
    total = tl.zeros((ROWS, WIDE), scale.dtype)
    for i in range(0, shape[0], ROWS):
        offsets, mask = tiling.tile_block(i, shape, VECTOR, WIDE, ROWS)
        value = common.gradient(g, offsets, mask, scale, VECTOR)
        if KNOWN == "rows":
            value *= scaling.row_factors(known, i, shape, 1.0, ROWS)[:, None]
        elif KNOWN == "columns":
            value *= scaling.column_factors(known, shape, WIDE)[None, :]
        if KNOWN != "rows":
            tiling.store_lines(parts[0], i, shape[0], tl.sum(value * value, 1), ROWS)
        total += value * value
    if KNOWN != "columns":
        tiling.store_columns(parts[1], shape[1], tl.sum(total, 0), WIDE)


@triton.jit
def param_squares(weight, shape, ROUNDING: tl.constexpr, WIDE: tl.constexpr):
    """Return the sum of x^2 over a tile."""
    ROWS: tl.constexpr = 2 * layout.FEW // WIDE
    total = tl.zeros((ROWS, WIDE), tl.float64)
    for i in range(0, shape[0], ROWS):
        offsets, mask = tiling.tile_block(i, shape, 1, WIDE, ROWS)
        value = weights.read_weight(weight, offsets, mask, ROUNDING).to(tl.float64)
        total += value * value
    return tl.sum(total)


@triton.jit
def came_lines(
    rows_ptr, grads_ptr, piece_to_row_ptr, options_ptr, apply_mask_ptr, partials_ptr, line_sums_ptr, lines_ptr,
    RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the averages of rows or columns, and store the sum of the new averages.

    For shards, the kernel stores the averages themselves. For averages that are split (SPLIT "rows" means that a
    matrix's rows are split, and so the averages of its columns), it stores only this rank's part.
    """
    piece = tl.program_id(0)
    index = tl.load(piece_to_row_ptr + piece).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    is_row, line, mask, length, parts = tiling.lines_of(row_ptr, piece, TALL, WIDE)
    total = tiling.line_totals(parts, partials_ptr)
    if RESIDUAL:
        rest, eps = tl.load(option_ptr + layout.option.BETA3_REST), tl.load(option_ptr + layout.option.EPS2)
        average = tiling.averages(row_ptr, tl.where(is_row, layout.row.RES_ROW, layout.row.RES_COL), line)
    else:
        rest, eps = scaling.second_rest(row_ptr, option_ptr), tl.load(option_ptr + layout.option.EPS1)
        average = tiling.averages(row_ptr, tl.where(is_row, layout.row.SQ_ROW, layout.row.SQ_COL), line)
    old = tl.load(average, mask=mask, other=1.0).to(tl.float64)
    whole = tl.load(row_ptr + tl.where(is_row, layout.row.WHOLE_WIDTH, layout.row.WHOLE_HEIGHT))
    kept = tl.where(
        tl.load(row_ptr + tl.where(is_row, layout.row.LEADS_ROWS, layout.row.LEADS_COLS)) != 0, 1 - rest, 0.0
    )
    new = kept * old + rest * (total / whole + eps * length / whole)  # CAME-row, CAME-col, CAME-res
    stored = new.to(tl.float32)
    if SPLIT is None:
        tl.store(average, stored, mask=mask)
        tl.store(line_sums_ptr + piece, tl.sum(tl.where(mask, stored.to(tl.float64), 0.0), 0))
    else:
        split = tiling.is_split(is_row, SPLIT)
        tl.store(average, stored, mask=mask & (split == 0))
        tl.store(
            tiling.line_at(lines_ptr, row_ptr, is_row, line), tl.where(split, new, stored.to(tl.float64)), mask=mask
        )


@triton.jit
def came_update_squares(
    rows_ptr, grads_ptr, tile_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr,
    line_sums_ptr, roots_ptr, sums_ptr,
    G: tl.constexpr, SPLIT: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute the sum of u^2 over each tile, and each matrix's root of the mean of its row averages; in reverse."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(tile_to_row_ptr + tile).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    start, shape, matrix, line, column = tiling.corner(row_ptr, tile, TALL, WIDE)
    root_here = roots_ptr + tl.load(row_ptr + layout.row.FIRST_MATRIX) + matrix
    root = scaling.row_root(row_ptr, matrix, line_sums_ptr, root_here, SPLIT, WIDE)
    if (SPLIT is None) & (line == 0) & (column == 0):
        tl.store(root_here, root)

    g = tl.load(grads_ptr + index)
    row_averages = tiling.averages(row_ptr, layout.row.SQ_ROW, matrix * tl.load(row_ptr + layout.row.HEIGHT) + line)
    c = scaling.column_factors(
        tiling.averages(row_ptr, layout.row.SQ_COL, matrix * tl.load(row_ptr + layout.row.WIDTH) + column), shape, WIDE
    )
    scale = common.gradient_scale(scale_ptr, option_ptr)
    if tiling.aligned(g, shape, VECTOR):
        total = update_squares(common.at(g, start, G), shape, scale, row_averages, root, c, VECTOR, WIDE, TILE_BLOCK)
    else:
        total = update_squares(common.at(g, start, G), shape, scale, row_averages, root, c, 1, WIDE, 2 * layout.FEW)
    tl.store(sums_ptr + tile * layout.SUM + layout.U_SQUARES, total)


@triton.jit
def update_squares(
    g, shape, scale, row_averages, root, c, VECTOR: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr
):  # fmt: skip
    """Return the sum of u^2 over a tile."""
    ROWS: tl.constexpr = TILE_BLOCK // WIDE
    total = tl.zeros((ROWS, WIDE), scale.dtype)
    for i in range(0, shape[0], ROWS):
        offsets, mask = tiling.tile_block(i, shape, VECTOR, WIDE, ROWS)
        value = common.gradient(g, offsets, mask, scale, VECTOR)
        u = scaling.update(value, scaling.row_factors(row_averages, i, shape, root, ROWS), c)
        total += u * u
    return tl.sum(total.to(tl.float64))


@triton.jit
def came_totals(
    rows_ptr, grads_ptr, options_ptr, apply_mask_ptr, whole_sums_ptr, scalars_ptr,
    SPLIT: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute, with one program per tensor, the clip factor of u, the learning rate, and the first two metrics."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    scalars = scalars_ptr + index * layout.NUMBER
    size = tl.sqrt(scaling.mean(row_ptr, index, whole_sums_ptr, layout.U_SQUARES, SPLIT))
    excess = size / tl.load(option_ptr + layout.option.CLIP_THRESHOLD)
    clip = 1 / tl.where(excess < 1, 1.0, excess)  # CAME-clip; a NaN remains NaN
    tl.store(scalars + layout.CLIP, clip)
    scale_eps, lr = tl.load(option_ptr + layout.option.SCALE_EPS), tl.load(option_ptr + columns.LR)
    if scale_eps >= 0:
        param_size = tl.sqrt(scaling.mean(row_ptr, index, whole_sums_ptr, layout.X_SQUARES, SPLIT))
        lr *= tl.where(param_size < scale_eps, scale_eps, param_size)
    tl.store(scalars + layout.RATE, lr)
    correction = common.one_minus_power(tl.load(option_ptr + layout.option.BETA3), common.count(row_ptr))
    correction = tl.where(tl.load(option_ptr + layout.option.CORRECTS) != 0, correction, 1.0)
    tl.store(scalars + layout.RES_FACTOR, tl.sqrt(correction))
    norms = common.at(tl.load(row_ptr + columns.row.NORMS), 0, tl.float32)
    tl.store(norms, size.to(tl.float32))
    tl.store(norms + 1, clip.to(tl.float32))


@triton.jit
def came_average(
    rows_ptr, grads_ptr, tile_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr,
    roots_ptr, scalars_ptr, partials_ptr,
    G: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr, CUT: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the average, and compute partial sums of its residual's squares."""
    tile = tl.program_id(0)
    index = tl.load(tile_to_row_ptr + tile).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    start, shape, matrix, line, column = tiling.corner(row_ptr, tile, TALL, WIDE)
    _, _, row_parts, col_parts = tiling.tile_at(row_ptr, tile, partials_ptr, TALL, WIDE)

    g, m = tl.load(grads_ptr + index), tl.load(row_ptr + columns.row.EXP_AVG)
    root = tl.load(roots_ptr + tl.load(row_ptr + layout.row.FIRST_MATRIX) + matrix) * common.number(
        scalars_ptr + index * layout.NUMBER + layout.CLIP
    )
    row_averages = tiling.averages(row_ptr, layout.row.SQ_ROW, matrix * tl.load(row_ptr + layout.row.HEIGHT) + line)
    c = scaling.column_factors(
        tiling.averages(row_ptr, layout.row.SQ_COL, matrix * tl.load(row_ptr + layout.row.WIDTH) + column), shape, WIDE
    )
    factors = (
        common.gradient_scale(scale_ptr, option_ptr),
        common.number(option_ptr + layout.option.BETA1),
        common.number(option_ptr + layout.option.BETA1_REST),
        root,
    )
    pointers = common.at(g, start, G), scaling.average_at(row_ptr, m, start, shape[2], S, M_FORM)
    parts = row_parts, col_parts
    rng_key = weights.rng_key(row_ptr, common.count(row_ptr), M_FORM == "int4", CUT)
    if tiling.aligned(m, shape, VECTOR):
        if g % 16 == 0:
            average(
                pointers, start, shape, factors, row_averages, c, parts, rng_key,
                M_FORM, VECTOR, VECTOR, WIDE, TILE_BLOCK,
            )  # fmt: skip
        else:  # gradients of FSDP2 and DDP are often not aligned: only they are loaded one element at a time
            average(
                pointers, start, shape, factors, row_averages, c, parts, rng_key,
                M_FORM, VECTOR, 1, WIDE, 2 * layout.FEW,
            )  # fmt: skip
    else:
        average(pointers, start, shape, factors, row_averages, c, parts, rng_key, M_FORM, 1, 1, WIDE, layout.FEW)


@triton.jit
def average(
    pointers, start, shape, factors, row_averages, c, parts, rng_key,
    FORM: tl.constexpr, VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Update exp_avg for a tile; store the partial sums of (u - m)^2 over its rows and columns."""
    ROWS: tl.constexpr = TILE_BLOCK // WIDE
    scale, beta1, beta1_rest, root = factors
    total = tl.zeros((ROWS, WIDE), root.dtype)
    for i in range(0, shape[0], ROWS):
        where = scaling.rows_at(i, shape, FORM, VECTOR, WIDE, ROWS)
        m = codec.read_moment(pointers[1], where, FORM, VECTOR)
        g = common.gradient(pointers[0], where[0], where[1], scale, G_VECTOR)
        u = scaling.update(g, scaling.row_factors(row_averages, i, shape, root, ROWS), c)
        m = beta1 * m + beta1_rest * u  # CAME-m
        m = codec.write_moment(pointers[1], where, m, (rng_key, start, where[0]), FORM, VECTOR)
        residual = (u - m) * (u - m)  # CAME-res
        tiling.store_lines(parts[0], i, shape[0], tl.sum(residual, 1), ROWS)
        total += residual
    tiling.store_columns(parts[1], shape[1], tl.sum(total, 0), WIDE)


@triton.jit
def came_apply(
    rows_ptr, grads_ptr, tile_to_row_ptr, options_ptr, apply_mask_ptr, line_sums_ptr, roots_ptr, scalars_ptr, sums_ptr,
    X: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr,
    ROUNDING: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Step the parameter, in reverse order."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(tile_to_row_ptr + tile).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    start, shape, matrix, line, column = tiling.corner(row_ptr, tile, TALL, WIDE)

    m = tl.load(row_ptr + columns.row.EXP_AVG)
    root = scaling.row_root(
        row_ptr, matrix, line_sums_ptr, roots_ptr + tl.load(row_ptr + layout.row.FIRST_MATRIX) + matrix, SPLIT, WIDE
    )
    row_averages = tiling.averages(row_ptr, layout.row.RES_ROW, matrix * tl.load(row_ptr + layout.row.HEIGHT) + line)
    c = scaling.column_factors(
        tiling.averages(row_ptr, layout.row.RES_COL, matrix * tl.load(row_ptr + layout.row.WIDTH) + column),
        shape,
        WIDE,
    )
    c *= common.number(scalars_ptr + index * layout.NUMBER + layout.RES_FACTOR)
    lr = tl.load(scalars_ptr + index * layout.NUMBER + layout.RATE)
    factors = lr.to(tl.float32), (lr * tl.load(option_ptr + columns.DECAY)).to(tl.float32), root
    rng_key = weights.rng_key(row_ptr, common.count(row_ptr), ROUNDING == "stochastic", CUT)
    average_at = scaling.average_at(row_ptr, m, start, shape[2], S, M_FORM)
    pointers = weights.weight_at(row_ptr, start, X, ROUNDING), average_at
    if tiling.aligned(weights.weight_addresses(row_ptr) | m, shape, VECTOR):
        r = apply(pointers, start, shape, factors, row_averages, c, rng_key, M_FORM, ROUNDING, VECTOR, WIDE, TILE_BLOCK)
    else:
        r = apply(pointers, start, shape, factors, row_averages, c, rng_key, M_FORM, ROUNDING, 1, WIDE, layout.FEW)
    if SPLIT is None:
        there = tl.arange(0, WIDE) < shape[1]
        confidence = r * tl.sum(tl.where(there, c, 0.0).to(tl.float64), 0)
        tl.store(sums_ptr + tile * layout.SUM + layout.CONFIDENCES, confidence)


@triton.jit
def apply(
    pointers, start, shape, factors, row_averages, c, rng_key,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Step a tile of the parameter; return the sum of the rows' factors."""
    ROWS: tl.constexpr = TILE_BLOCK // WIDE
    lr, decay, root = factors
    total = tl.zeros((ROWS,), tl.float64)
    for i in range(0, shape[0], ROWS):
        where = scaling.rows_at(i, shape, FORM, VECTOR, WIDE, ROWS)
        m = codec.read_moment(pointers[1], where, FORM, VECTOR)
        r = scaling.row_factors(row_averages, i, shape, root, ROWS)
        x = weights.read_weight(pointers[0], where[0], where[1], ROUNDING, VECTOR)
        starts = start + (i + tl.arange(0, ROWS)) * shape[2]
        rng = rng_key, starts[:, None], tl.arange(0, WIDE)[None, :]
        x -= decay * x
        x -= lr * scaling.update(m, r, c)  # CAME-x
        weights.write_weight(pointers[0], where[0], where[1], x, rng, ROUNDING, VECTOR)
        total += tl.where(i + tl.arange(0, ROWS) < shape[0], r, 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def came_metrics(
    rows_ptr, grads_ptr, apply_mask_ptr, whole_sums_ptr, scalars_ptr,
    FACTORED: tl.constexpr, SPLIT: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Store each tensor's mean confidence and count its step, with one program per tensor, after all other kernels."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr = rows_ptr + index * columns.ROW
    confidence = scaling.mean(row_ptr, index, whole_sums_ptr, layout.CONFIDENCES, SPLIT)
    if SPLIT is not None:  # averages that were added up over ranks are not corrected yet
        confidence *= tl.load(scalars_ptr + index * layout.NUMBER + layout.RES_FACTOR)
    norms = common.at(tl.load(row_ptr + columns.row.NORMS), 0, tl.float32)
    tl.store(norms + 2, confidence.to(tl.float32) if FACTORED else 1.0)
    common.count_step(row_ptr)
