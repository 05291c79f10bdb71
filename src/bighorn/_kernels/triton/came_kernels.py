"""CAME on the device, in Triton: passes over tiles of matrices, with the averages of rows and columns between them.

A matrix is divided into tiles. A tile contributes a partial sum to each of its rows and columns, and `came_lines` adds
these up, always in the same order. An unfactored tensor has no such sums, and is divided into chunks, as in LAMB. A
row of a tile is within one block of codes. Passes alternate in direction, since the last tiles of the previous pass may
still be in cache.

The lines tagged `CAME-...` follow `reference/came.py`, which has the details. Arithmetic is in float32. Sums
over more than a tile, and numbers that exist once per row, column or tensor, are in float64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bighorn._kernels.triton import came_layout as layout
from bighorn._kernels.triton import came_scaling_kernels as scaling
from bighorn._kernels.triton import came_tiling_kernels as tiling
from bighorn._kernels.triton import codec_kernels as codec
from bighorn._kernels.triton import columns, layer_layout
from bighorn._kernels.triton import common_kernels as common
from bighorn._kernels.triton import weight_kernels as weights


class Constants(NamedTuple):
    """The constants of a pass: dtypes, the form of the average, how x is rounded, and what shards have."""

    X: Any = tl.constexpr(0)
    G: Any = tl.constexpr(0)
    S: Any = tl.constexpr(0)
    M_FORM: Any = tl.constexpr("")
    ROUNDING: Any = tl.constexpr("")
    CUT: Any = tl.constexpr(False)
    SPLIT: Any = tl.constexpr("")
    AVERAGED: Any = tl.constexpr("")
    SCALES_LR: Any = tl.constexpr(False)


@triton.jit
def came_squares(
    slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, partials_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, AVERAGED: tl.constexpr, SCALES_LR: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums of g^2, and of x^2 if the size of x scales the learning rate.

    For shards a second launch computes those along the split dim (AVERAGED is "rows" or "columns") of g^2 divided by
    the averages that are not split.
    """
    tiling.run_tile(
        (slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, apply_mask_ptr), (scale_ptr, partials_ptr, sums_ptr),
        squares, False, tiling.Mode(VECTOR, TALL, WIDE, TILE_BLOCK),
        Constants(X=X, G=G, ROUNDING=ROUNDING, AVERAGED=AVERAGED, SCALES_LR=SCALES_LR),
    )  # fmt: skip


@triton.jit
def squares(tile, tables, mode, const):
    """Store the sums of a tile."""
    scale_ptr, partials_ptr, sums_ptr = tables
    parts, averages = tiling.parts_at(tile, partials_ptr, mode), tile.slot_ptr
    if const.AVERAGED == "rows":
        averages = tiling.row_averages(tile, layout.slot.SQ_ROW)
    elif const.AVERAGED == "columns":
        averages = tiling.column_averages(tile, layout.slot.SQ_COL)
    address, scale = tl.load(tile.grad_ptr), common.gradient_scale(scale_ptr, tile.option_ptr)
    g = common.at(address, tile.start, const.G)
    if tiling.aligned(address, tile, mode):
        square_tile(g, tile, scale, averages, parts, const.AVERAGED, mode.VECTOR, mode.WIDE, mode.BLOCK)
    else:
        square_tile(g, tile, scale, averages, parts, const.AVERAGED, 1, mode.WIDE, 2 * layout.FEW)
    if const.SCALES_LR and const.AVERAGED == "":
        weight = weights.weight_at(tile.slot_ptr, tile.start, const.X, const.ROUNDING)
        total = param_squares(weight, tile, const.ROUNDING, mode.WIDE)
        tl.store(sums_ptr + tile.number * layout.SUM + layout.X_SQUARES, total)


@triton.jit
def square_tile(
    g, tile, scale, averages, parts,
    AVERAGED: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sums of g^2, or of g^2 / averages, over the rows and the columns of a tile."""
    ROWS: tl.constexpr = BLOCK // WIDE
    row_parts, col_parts = parts
    total = tl.zeros((ROWS, WIDE), scale.dtype)
    for i in range(0, tile.high, ROWS):
        where = tiling.rows_at(i, tile, "", VECTOR, WIDE, ROWS)
        value = common.gradient(g, where.offsets, where.mask, scale, VECTOR)
        if AVERAGED == "rows":
            value *= scaling.row_factors(averages, i, tile, 1.0, ROWS)[:, None]
        elif AVERAGED == "columns":
            value *= scaling.column_factors(averages, tile, WIDE)[None, :]
        if AVERAGED != "rows":
            tiling.store_lines(row_parts, i, tile.high, tl.sum(value * value, 1), ROWS)
        total += value * value
    if AVERAGED != "columns":
        tiling.store_columns(col_parts, tile.wide, tl.sum(total, 0), WIDE)


@triton.jit
def param_squares(weight, tile, ROUNDING: tl.constexpr, WIDE: tl.constexpr):
    """Return the sum of x^2 over a tile."""
    ROWS: tl.constexpr = 2 * layout.FEW // WIDE
    total = tl.zeros((ROWS, WIDE), tl.float64)
    for i in range(0, tile.high, ROWS):
        where = tiling.rows_at(i, tile, "", 1, WIDE, ROWS)
        value = weights.read_weight(weight, where.offsets, where.mask, ROUNDING).to(tl.float64)
        total += value * value
    return tl.sum(total)


@triton.jit
def came_lines(
    slots_ptr, grads_ptr, strip_to_slot_ptr, options_ptr, apply_mask_ptr, partials_ptr, line_sums_ptr, lines_ptr,
    RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the averages of rows or columns, and store the sum of the new averages.

    For shards, the kernel stores the averages themselves. For averages that are split (SPLIT "rows" means that a
    matrix's rows are split, and so the averages of its columns), it stores only this rank's part.
    """
    strip = tl.program_id(0)
    index = tl.load(strip_to_slot_ptr + strip).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr, option_ptr = common.entries(slots_ptr, options_ptr, index)
    is_row, line, mask, length, parts = tiling.lines_of(slot_ptr, strip, TALL, WIDE)
    total = tiling.line_totals(parts, partials_ptr)
    if RESIDUAL:
        rest, eps = tl.load(option_ptr + layout.option.BETA3_REST), tl.load(option_ptr + layout.option.EPS2)
        average = tiling.averages(slot_ptr, tl.where(is_row, layout.slot.RES_ROW, layout.slot.RES_COL), line)
    else:
        rest, eps = scaling.second_rest(slot_ptr, option_ptr), tl.load(option_ptr + layout.option.EPS1)
        average = tiling.averages(slot_ptr, tl.where(is_row, layout.slot.SQ_ROW, layout.slot.SQ_COL), line)
    old = tl.load(average, mask=mask, other=1.0).to(tl.float64)
    whole = tl.load(slot_ptr + tl.where(is_row, layout.slot.WHOLE_WIDTH, layout.slot.WHOLE_HEIGHT))
    kept = tl.where(
        tl.load(slot_ptr + tl.where(is_row, layout.slot.LEADS_ROWS, layout.slot.LEADS_COLS)) != 0, 1 - rest, 0.0
    )
    new = kept * old + rest * (total / whole + eps * length / whole)  # CAME-row, CAME-col, CAME-res
    stored = new.to(tl.float32)
    if SPLIT is None:
        tl.store(average, stored, mask=mask)
        tl.store(line_sums_ptr + strip, tl.sum(tl.where(mask, stored.to(tl.float64), 0.0), 0))
    else:
        split = tiling.is_split(is_row, SPLIT)
        tl.store(average, stored, mask=mask & (split == 0))
        tl.store(
            tiling.line_at(lines_ptr, slot_ptr, is_row, line), tl.where(split, new, stored.to(tl.float64)), mask=mask
        )


@triton.jit
def came_update_squares(
    slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr,
    line_sums_ptr, roots_ptr, sums_ptr,
    G: tl.constexpr, SPLIT: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute the sum of u^2 over each tile, and each matrix's root of the mean of its row averages; in reverse."""
    tiling.run_tile(
        (slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, apply_mask_ptr),
        (scale_ptr, line_sums_ptr, roots_ptr, sums_ptr),
        update_squares, True, tiling.Mode(VECTOR, TALL, WIDE, TILE_BLOCK), Constants(G=G, SPLIT=SPLIT),
    )  # fmt: skip


@triton.jit
def update_squares(tile, tables, mode, const):
    """Store the sum of u^2 of a tile, and its matrix's root."""
    scale_ptr, line_sums_ptr, roots_ptr, sums_ptr = tables
    root_ptr = scaling.root_at(tile, roots_ptr)
    root = scaling.row_root(tile, line_sums_ptr, root_ptr, const.SPLIT, mode.WIDE)
    if (const.SPLIT is None) & (tile.line == 0) & (tile.column == 0):
        tl.store(root_ptr, root)
    address, r = tl.load(tile.grad_ptr), tiling.row_averages(tile, layout.slot.SQ_ROW)
    c = scaling.column_factors(tiling.column_averages(tile, layout.slot.SQ_COL), tile, mode.WIDE)
    numbers = common.gradient_scale(scale_ptr, tile.option_ptr), root
    g = common.at(address, tile.start, const.G)
    if tiling.aligned(address, tile, mode):
        total = update_square_sum(g, tile, numbers, r, c, mode.VECTOR, mode.WIDE, mode.BLOCK)
    else:
        total = update_square_sum(g, tile, numbers, r, c, 1, mode.WIDE, 2 * layout.FEW)
    tl.store(sums_ptr + tile.number * layout.SUM + layout.U_SQUARES, total)


@triton.jit
def update_square_sum(
    g, tile, numbers, row_averages, c, VECTOR: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the sum of u^2 over a tile."""
    ROWS: tl.constexpr = BLOCK // WIDE
    scale, root = numbers
    total = tl.zeros((ROWS, WIDE), scale.dtype)
    for i in range(0, tile.high, ROWS):
        where = tiling.rows_at(i, tile, "", VECTOR, WIDE, ROWS)
        value = common.gradient(g, where.offsets, where.mask, scale, VECTOR)
        u = scaling.update(value, scaling.row_factors(row_averages, i, tile, root, ROWS), c)
        total += u * u
    return tl.sum(total.to(tl.float64))


@triton.jit
def came_totals(
    slots_ptr, grads_ptr, options_ptr, apply_mask_ptr, whole_sums_ptr, factors_ptr,
    SPLIT: tl.constexpr, SCALES_LR: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute, with one program per tensor, the clip factor of u, the learning rate, and the first two metrics."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr, option_ptr = common.entries(slots_ptr, options_ptr, index)
    factor_ptr = factors_ptr + index * layer_layout.FACTOR
    size = tl.sqrt(scaling.mean(slot_ptr, index, whole_sums_ptr, layout.U_SQUARES, SPLIT))
    excess = size / tl.load(option_ptr + layout.option.CLIP_THRESHOLD)
    clip = 1 / tl.where(excess < 1, 1.0, excess)  # CAME-clip; a NaN remains NaN
    tl.store(factor_ptr + layout.CLIP, clip)
    lr = tl.load(option_ptr + columns.LR)
    if SCALES_LR:
        scale_eps = tl.load(option_ptr + layout.option.SCALE_EPS)
        param_size = tl.sqrt(scaling.mean(slot_ptr, index, whole_sums_ptr, layout.X_SQUARES, SPLIT))
        lr *= tl.where(param_size < scale_eps, scale_eps, param_size)
    tl.store(factor_ptr + layout.RATE, lr)
    correction = common.one_minus_power(tl.load(option_ptr + layout.option.BETA3), common.count(slot_ptr))
    correction = tl.where(tl.load(option_ptr + layout.option.CORRECTS) != 0, correction, 1.0)
    tl.store(factor_ptr + layout.RES_FACTOR, tl.sqrt(correction))
    norms = common.at(tl.load(slot_ptr + columns.slot.NORMS), 0, tl.float32)
    tl.store(norms, size.to(tl.float32))
    tl.store(norms + 1, clip.to(tl.float32))


@triton.jit
def came_average(
    slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr,
    roots_ptr, factors_ptr, partials_ptr,
    G: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr, CUT: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the average, and compute partial sums of its residual's squares."""
    tiling.run_tile(
        (slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, apply_mask_ptr),
        (scale_ptr, roots_ptr, factors_ptr, partials_ptr),
        average, False, tiling.Mode(VECTOR, TALL, WIDE, TILE_BLOCK), Constants(G=G, S=S, M_FORM=M_FORM, CUT=CUT),
    )  # fmt: skip


@triton.jit
def average(tile, tables, mode, const):
    """Advance the average of a tile; store the partial sums of its residual."""
    scale_ptr, roots_ptr, factors_ptr, partials_ptr = tables
    parts = tiling.parts_at(tile, partials_ptr, mode)
    g, m = tl.load(tile.grad_ptr), tl.load(tile.slot_ptr + columns.slot.EXP_AVG)
    clip = common.number(factors_ptr + tile.index * layer_layout.FACTOR + layout.CLIP)
    root = tl.load(scaling.root_at(tile, roots_ptr)) * clip
    r = tiling.row_averages(tile, layout.slot.SQ_ROW)
    c = scaling.column_factors(tiling.column_averages(tile, layout.slot.SQ_COL), tile, mode.WIDE)
    numbers = (
        common.gradient_scale(scale_ptr, tile.option_ptr),
        common.number(tile.option_ptr + layout.option.BETA1),
        common.number(tile.option_ptr + layout.option.BETA1_REST),
        root,
    )
    pointers = common.at(g, tile.start, const.G), tiling.average_at(tile, const.S, const.M_FORM), r, parts
    rng_key = weights.rng_key(tile.slot_ptr, common.count(tile.slot_ptr), const.M_FORM != "", const.CUT)
    if not tiling.aligned(m, tile, mode):
        average_tile(pointers, tile, numbers, c, rng_key, const.M_FORM, 1, 1, mode.WIDE, layout.FEW)
    elif g % 16 == 0:
        average_tile(pointers, tile, numbers, c, rng_key, const.M_FORM, mode.VECTOR, mode.VECTOR, mode.WIDE, mode.BLOCK)
    else:  # gradients of FSDP2 and DDP are often not aligned: only they are loaded one element at a time
        average_tile(pointers, tile, numbers, c, rng_key, const.M_FORM, mode.VECTOR, 1, mode.WIDE, 2 * layout.FEW)


@triton.jit
def average_tile(
    pointers, tile, numbers, c, rng_key,
    FORM: tl.constexpr, VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update exp_avg for a tile; store the partial sums of (u - m)^2 over its rows and columns."""
    ROWS: tl.constexpr = BLOCK // WIDE
    gradient, stored, row_averages, parts = pointers
    row_parts, col_parts = parts
    scale, beta1, beta1_rest, root = numbers
    total = tl.zeros((ROWS, WIDE), root.dtype)
    for i in range(0, tile.high, ROWS):
        where = tiling.rows_at(i, tile, FORM, VECTOR, WIDE, ROWS)
        m = codec.read_moment(stored, where, FORM, VECTOR)
        g = common.gradient(gradient, where.offsets, where.mask, scale, G_VECTOR)
        u = scaling.update(g, scaling.row_factors(row_averages, i, tile, root, ROWS), c)
        m = beta1 * m + beta1_rest * u  # CAME-m
        rng = weights.Rng(rng_key, tile.start, where.offsets)
        m = codec.write_moment(stored, where, m, rng, FORM, VECTOR)
        residual = (u - m) * (u - m)  # CAME-res
        tiling.store_lines(row_parts, i, tile.high, tl.sum(residual, 1), ROWS)
        total += residual
    tiling.store_columns(col_parts, tile.wide, tl.sum(total, 0), WIDE)


@triton.jit
def came_apply(
    slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, apply_mask_ptr,
    line_sums_ptr, roots_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr,
    ROUNDING: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr,
    VECTOR: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TILE_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Step the parameter, in reverse order."""
    tiling.run_tile(
        (slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, apply_mask_ptr),
        (line_sums_ptr, roots_ptr, factors_ptr, sums_ptr),
        apply, True, tiling.Mode(VECTOR, TALL, WIDE, TILE_BLOCK),
        Constants(X=X, S=S, M_FORM=M_FORM, ROUNDING=ROUNDING, CUT=CUT, SPLIT=SPLIT),
    )  # fmt: skip


@triton.jit
def apply(tile, tables, mode, const):
    """Step a tile of the parameter; store the sum of its factors."""
    line_sums_ptr, roots_ptr, factors_ptr, sums_ptr = tables
    factor_ptr = factors_ptr + tile.index * layer_layout.FACTOR
    root = scaling.row_root(tile, line_sums_ptr, scaling.root_at(tile, roots_ptr), const.SPLIT, mode.WIDE)
    r = tiling.row_averages(tile, layout.slot.RES_ROW)
    c = scaling.column_factors(tiling.column_averages(tile, layout.slot.RES_COL), tile, mode.WIDE)
    c *= common.number(factor_ptr + layout.RES_FACTOR)
    lr = tl.load(factor_ptr + layout.RATE)
    numbers = lr.to(tl.float32), (lr * tl.load(tile.option_ptr + columns.DECAY)).to(tl.float32), root
    rng_key = weights.rng_key(tile.slot_ptr, common.count(tile.slot_ptr), const.ROUNDING == "stochastic", const.CUT)
    stored = tiling.average_at(tile, const.S, const.M_FORM)
    pointers = weights.weight_at(tile.slot_ptr, tile.start, const.X, const.ROUNDING), stored, r
    addresses = weights.weight_addresses(tile.slot_ptr) | tl.load(tile.slot_ptr + columns.slot.EXP_AVG)
    if tiling.aligned(addresses, tile, mode):
        total = apply_tile(pointers, tile, numbers, c, rng_key, const, mode.VECTOR, mode.WIDE, mode.BLOCK)
    else:
        total = apply_tile(pointers, tile, numbers, c, rng_key, const, 1, mode.WIDE, layout.FEW)
    if const.SPLIT is None:
        there = tl.arange(0, mode.WIDE) < tile.wide
        confidence = total * tl.sum(tl.where(there, c, 0.0).to(tl.float64), 0)
        tl.store(sums_ptr + tile.number * layout.SUM + layout.CONFIDENCES, confidence)


@triton.jit
def apply_tile(
    pointers, tile, numbers, c, rng_key, const, VECTOR: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Step a tile of the parameter; return the sum of the rows' factors."""
    ROWS: tl.constexpr = BLOCK // WIDE
    weight, stored, row_averages = pointers
    lr, decay, root = numbers
    total = tl.zeros((ROWS,), tl.float64)
    for i in range(0, tile.high, ROWS):
        where = tiling.rows_at(i, tile, const.M_FORM, VECTOR, WIDE, ROWS)
        m = codec.read_moment(stored, where, const.M_FORM, VECTOR)
        r = scaling.row_factors(row_averages, i, tile, root, ROWS)
        x = weights.read_weight(weight, where.offsets, where.mask, const.ROUNDING, VECTOR)
        starts = tile.start + (i + tl.arange(0, ROWS)) * tile.width
        rng = weights.Rng(rng_key, starts[:, None], tl.arange(0, WIDE)[None, :])
        x -= decay * x
        x -= lr * scaling.update(m, r, c)  # CAME-x
        weights.write_weight(weight, where.offsets, where.mask, x, rng, const.ROUNDING, VECTOR)
        total += tl.where(i + tl.arange(0, ROWS) < tile.high, r, 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def came_metrics(
    slots_ptr, grads_ptr, apply_mask_ptr, whole_sums_ptr, factors_ptr,
    FACTORED: tl.constexpr, SPLIT: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Store each tensor's mean confidence and count its step, with one program per tensor, after all other kernels."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr = slots_ptr + index * columns.SLOT
    confidence = scaling.mean(slot_ptr, index, whole_sums_ptr, layout.CONFIDENCES, SPLIT)
    if SPLIT is not None:  # averages that were added up over ranks are not corrected yet
        confidence *= tl.load(factors_ptr + index * layer_layout.FACTOR + layout.RES_FACTOR)
    norms = common.at(tl.load(slot_ptr + columns.slot.NORMS), 0, tl.float32)
    tl.store(norms + 2, confidence.to(tl.float32) if FACTORED else 1.0)
    common.count_step(slot_ptr)
