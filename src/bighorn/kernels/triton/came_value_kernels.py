"""What CAME's kernels compute with: the numbers that a tensor has one of, and the factors of its elements."""

import triton
import triton.language as tl

from bighorn.kernels.triton.came_columns import (
    BETA2_REST,
    BETA3,
    CLIP_THRESHOLD,
    CORRECTS,
    DECAY_RATE,
    EXP_AVG_SCALE,
    FIRST_PIECE,
    FIRST_SUM,
    HEIGHT,
    NUMEL,
    SCALE_EPS,
    STOP_SUM,
    SUM,
    WIDTH,
    X_SQUARES,
)
from bighorn.kernels.triton.came_place_kernels import row_pieces
from bighorn.kernels.triton.codec_kernels import CODES, decoded
from bighorn.kernels.triton.common_kernels import INNER, LR, at, count, partial_total, read

# ---- one number of a tensor ------------------------------------------------------------------------------------------


@triton.jit
def second_rest(row, option):
    """1 - beta2 of this step."""
    decay_rate, rest = tl.load(option + DECAY_RATE), tl.load(option + BETA2_REST)
    if decay_rate >= 0:
        rest = tl.exp(-decay_rate * tl.log(count(row)))
    return rest


@triton.jit
def residual_correction(row, option):
    """What the residuals' averages are divided by, which are 0 at first."""
    correction = 1 - tl.exp(count(row) * tl.log(tl.load(option + BETA3)))
    return tl.where(tl.load(option + CORRECTS) != 0, correction, 1.0)


@triton.jit
def tile_total(row, sums, COLUMN: tl.constexpr):
    """A sum over all tiles of a tensor."""
    return partial_total(sums + COLUMN, tl.load(row + FIRST_SUM), tl.load(row + STOP_SUM), SUM)


@triton.jit
def root_mean(row, sums, COLUMN: tl.constexpr):
    """The root of the mean square of all elements of a tensor."""
    return tl.sqrt(tile_total(row, sums, COLUMN) / tl.maximum(tl.load(row + NUMEL), 1))


@triton.jit
def clipping(size, option):
    """What u of a root mean square is multiplied with to be no larger than allowed; a NaN stays one."""
    excess = size / tl.load(option + CLIP_THRESHOLD)
    return 1 / tl.where(excess < 1, 1.0, excess)


@triton.jit
def rate(row, option, sums):
    """The learning rate, which may grow with x."""
    scale_eps = tl.load(option + SCALE_EPS)
    lr = tl.load(option + LR)
    if scale_eps >= 0:
        size = root_mean(row, sums, X_SQUARES)
        lr *= tl.where(size < scale_eps, scale_eps, size)
    return lr


@triton.jit
def row_root(row, matrix, line_sums, root, SPLIT: tl.constexpr, WIDE: tl.constexpr):
    """The root of the mean of the averages of a matrix's rows, which shards find where it is kept."""
    if SPLIT is None:
        return tl.sqrt(row_mean(row, matrix, line_sums, WIDE)).to(tl.float32)
    else:
        return tl.load(root)


@triton.jit
def row_mean(row, matrix, line_sums, WIDE: tl.constexpr):
    """The mean of the averages of a matrix's rows."""
    height = tl.load(row + HEIGHT)
    pieces = row_pieces(height, tl.load(row + WIDTH), WIDE)
    first = tl.load(row + FIRST_PIECE) + matrix * pieces
    return partial_total(line_sums, first, first + pieces, 1) / height


# ---- blocks of elements ----------------------------------------------------------------------------------------------


@triton.jit
def inverse_root(value):
    """1 / sqrt(value)."""
    return tl.div_rn(1.0, tl.sqrt_rn(value))


@triton.jit
def row_factors(row_averages, i, shape, root, ROWS: tl.constexpr):
    """The factors of rows from the tile's `i`-th on; `root` is the root of the mean of all rows' averages."""
    # Not sqrt(mean / average): a row of zeros beside large ones is a ratio of 1e42.
    lines = i + tl.arange(0, ROWS)
    return inverse_root(tl.load(row_averages + lines, mask=lines < shape[0], other=1.0)) * root


@triton.jit
def column_factors(column_averages, shape, WIDE: tl.constexpr):
    """The factors of a tile's columns."""
    columns = tl.arange(0, WIDE)
    return inverse_root(tl.load(column_averages + columns, mask=columns < shape[1], other=1.0))


@triton.jit
def update(values, r, c):
    """Values times the factors of their row and column: large ones meet small values first."""
    return values * c[None, :] * r[:, None]  # CAME-u


@triton.jit
def unfactored(g, v):
    """U where the second moment is not factored, and 0 where there is no element."""
    return tl.where(v == 0, g, tl.div_rn(g, tl.sqrt_rn(v)))  # CAME-u


@triton.jit
def momentum(
    pointer, offsets, mask, scales, i, shape,
    S: tl.constexpr, CODES_IN_TILES: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The average as it is stored, of the rows from the tile's `i`-th on."""
    values = read(pointer, offsets, mask, VECTOR)
    if tl.int8 != S:
        return values.to(tl.float32)
    elif CODES_IN_TILES:
        lines = i + tl.arange(0, ROWS)
        scale = tl.load(tile_scales(scales) + lines * tl.cdiv(scales[1], CODES), mask=lines < shape[0], other=0.0)
        return decoded(values, scale[:, None], "linear")
    else:
        # A matrix's rows are those of dim 0, or lie in one; what a tile has of a row touches two blocks at most.
        start, inner, lines = scales[2], scales[1], i + tl.arange(0, ROWS)
        line = start // inner + tl.where(inner == shape[2], lines, 0)
        within = start % inner + tl.where(inner == shape[2], 0, lines * shape[2])
        begun = (within % CODES).to(tl.int32)
        block_scales = scales[0] + line * tl.cdiv(inner, CODES) + within // CODES
        here = tl.load(block_scales, mask=lines < shape[0], other=0.0)
        there = tl.load(block_scales + 1, mask=(lines < shape[0]) & (begun + shape[1] > CODES), other=0.0)
        is_here = begun[:, None] + tl.arange(0, WIDE)[None, :] < CODES
        return decoded(values, tl.where(is_here, here[:, None], there[:, None]), "linear")


@triton.jit
def tile_scales(scales):
    """A pointer to the scale of a tile's first row, where each of its rows is a block of codes."""
    return scales[0] + scales[2] // scales[1] * tl.cdiv(scales[1], CODES) + scales[2] % scales[1] // CODES


@triton.jit
def scales_of(row, start):
    """The scales of an 8-bit average, the elements of a row of dim 0, and a tile's or chunk's first element."""
    return at(tl.load(row + EXP_AVG_SCALE), 0, tl.float32), tl.load(row + INNER), start


@triton.jit
def wrapped(position, length):
    """How many lengths lie below a position that began below the first, and what is left; both in few instructions."""
    if length >= CODES:
        carry = (position >= length).to(tl.int64)
    else:
        carry = (position.to(tl.int32) // tl.minimum(length, CODES).to(tl.int32)).to(tl.int64)
    return carry, position - carry * length
