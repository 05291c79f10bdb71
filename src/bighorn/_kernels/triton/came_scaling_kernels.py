"""The scalars of CAME's kernels, which each tensor has once, and the factors of its elements."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

from bighorn._kernels.triton import came_layout as layout
from bighorn._kernels.triton import came_tiling_kernels as tiling
from bighorn._kernels.triton import common_kernels as common

# ---- scalars of a tensor ---------------------------------------------------------------------------------------------


@triton.jit
def second_rest(slot_ptr, option_ptr):
    """Return 1 - beta2 of this step."""
    decay_rate, rest = tl.load(option_ptr + layout.option.DECAY_RATE), tl.load(option_ptr + layout.option.BETA2_REST)
    if decay_rate >= 0:
        rest = tl.exp(-decay_rate * tl.log(common.count(slot_ptr)))
    return rest


@triton.jit
def mean(slot_ptr, index, sums_ptr, COLUMN: tl.constexpr, SPLIT: tl.constexpr):
    """Return the mean over all elements of a tensor, from the sums of its tiles or, for a shard, from its sum."""
    if SPLIT is None:
        first, stop = tl.load(slot_ptr + layout.slot.FIRST_TILE), tl.load(slot_ptr + layout.slot.STOP_TILE)
        total = common.partial_total(sums_ptr + COLUMN, first, stop, layout.SUM)
    else:
        total = tl.load(sums_ptr + index * layout.SUM + COLUMN)
    return total / tl.maximum(tl.load(slot_ptr + layout.slot.NUMEL), 1)


@triton.jit
def root_at(tile, roots_ptr):
    """Return a pointer to the root of the mean of the row averages of a tile's matrix."""
    return roots_ptr + tl.load(tile.slot_ptr + layout.slot.FIRST_MATRIX) + tile.matrix


@triton.jit
def row_root(tile, line_sums_ptr, root_ptr, SPLIT: tl.constexpr, WIDE: tl.constexpr):
    """Return the root of the mean of the row averages of a tile's matrix; for shards, it is loaded."""
    if SPLIT is None:
        height = tl.load(tile.slot_ptr + layout.slot.HEIGHT)
        strips = tiling.row_strips(height, tl.load(tile.slot_ptr + layout.slot.WIDTH), WIDE)
        first = tl.load(tile.slot_ptr + layout.slot.FIRST_STRIP) + tile.matrix * strips
        mean = common.partial_total(line_sums_ptr, first, first + strips, 1) / height
        return tl.sqrt(mean).to(root_ptr.dtype.element_ty)
    else:
        return tl.load(root_ptr)


# ---- blocks of elements ----------------------------------------------------------------------------------------------


@triton.jit
def inverse_root(value):
    """Return 1 / sqrt(value)."""
    return tl.div_rn(1.0, tl.sqrt_rn(value))


@triton.jit
def row_factors(row_averages, i, tile, root, ROWS: tl.constexpr):
    """Return the factors of rows from the tile's `i`-th on; `root` is the root of the mean of all row averages."""
    # Not sqrt(mean / average), since for a row of zeros beside large ones this ratio is 1e42.
    lines = i + tl.arange(0, ROWS)
    return inverse_root(tl.load(row_averages + lines, mask=lines < tile.high, other=1.0)) * root


@triton.jit
def column_factors(column_averages, tile, WIDE: tl.constexpr):
    """Return the factors of a tile's columns."""
    columns = tl.arange(0, WIDE)
    return inverse_root(tl.load(column_averages + columns, mask=columns < tile.wide, other=1.0))


@triton.jit
def update(values, r, c):
    """Return values times the factors of their row and column, in an order that multiplies large by small numbers."""
    return values * c[None, :] * r[:, None]  # CAME-u


@triton.jit
def unfactored(g, v):
    """Return u for an unfactored second moment, and 0 for elements outside the mask."""
    return tl.where(v == 0, g, tl.div_rn(g, tl.sqrt_rn(v)))  # CAME-u
