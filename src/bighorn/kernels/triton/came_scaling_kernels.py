"""What CAME's kernels compute with: the numbers that a tensor has one of, and the factors of its elements."""

import triton
import triton.language as tl

from bighorn.kernels.triton import came_layout as layout
from bighorn.kernels.triton import came_tiling_kernels as tiling
from bighorn.kernels.triton import codec_kernels as codec
from bighorn.kernels.triton import common_kernels as common

# ---- one number of a tensor ------------------------------------------------------------------------------------------


@triton.jit
def second_rest(row_ptr, option_ptr):
    """1 - beta2 of this step."""
    decay_rate, rest = tl.load(option_ptr + layout.DECAY_RATE), tl.load(option_ptr + layout.BETA2_REST)
    if decay_rate >= 0:
        rest = tl.exp(-decay_rate * tl.log(common.count(row_ptr)))
    return rest


@triton.jit
def residual_correction(row_ptr, option_ptr):
    """What the residuals' averages are divided by, which are 0 at first."""
    correction = 1 - tl.exp(common.count(row_ptr) * tl.log(tl.load(option_ptr + layout.BETA3)))
    return tl.where(tl.load(option_ptr + layout.CORRECTS) != 0, correction, 1.0)


@triton.jit
def tile_total(row_ptr, sums_ptr, COLUMN: tl.constexpr):
    """A sum over all tiles of a tensor."""
    return common.partial_total(
        sums_ptr + COLUMN, tl.load(row_ptr + layout.FIRST_SUM), tl.load(row_ptr + layout.STOP_SUM), layout.SUM
    )


@triton.jit
def root_mean(row_ptr, sums_ptr, COLUMN: tl.constexpr):
    """The root of the mean square of all elements of a tensor."""
    return tl.sqrt(tile_total(row_ptr, sums_ptr, COLUMN) / tl.maximum(tl.load(row_ptr + layout.NUMEL), 1))


@triton.jit
def clipping(size, option_ptr):
    """What u of a root mean square is multiplied with to be no larger than allowed; a NaN stays one."""
    excess = size / tl.load(option_ptr + layout.CLIP_THRESHOLD)
    return 1 / tl.where(excess < 1, 1.0, excess)


@triton.jit
def rate(row_ptr, option_ptr, sums_ptr):
    """The learning rate, which may grow with x."""
    scale_eps = tl.load(option_ptr + layout.SCALE_EPS)
    lr = tl.load(option_ptr + common.LR)
    if scale_eps >= 0:
        size = root_mean(row_ptr, sums_ptr, layout.X_SQUARES)
        lr *= tl.where(size < scale_eps, scale_eps, size)
    return lr


@triton.jit
def row_root(row_ptr, matrix, line_sums_ptr, root, SPLIT: tl.constexpr, WIDE: tl.constexpr):
    """The root of the mean of the averages of a matrix's rows, which shards find where it is kept."""
    if SPLIT is None:
        return tl.sqrt(row_mean(row_ptr, matrix, line_sums_ptr, WIDE)).to(tl.float32)
    else:
        return tl.load(root)


@triton.jit
def row_mean(row_ptr, matrix, line_sums_ptr, WIDE: tl.constexpr):
    """The mean of the averages of a matrix's rows."""
    height = tl.load(row_ptr + layout.HEIGHT)
    pieces = tiling.row_pieces(height, tl.load(row_ptr + layout.WIDTH), WIDE)
    first = tl.load(row_ptr + layout.FIRST_PIECE) + matrix * pieces
    return common.partial_total(line_sums_ptr, first, first + pieces, 1) / height


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
    values = common.read(pointer, offsets, mask, VECTOR)
    if tl.int8 != S:
        return values.to(tl.float32)
    elif CODES_IN_TILES:
        lines = i + tl.arange(0, ROWS)
        scale = tl.load(tile_scales(scales) + lines * tl.cdiv(scales[1], codec.CODES), mask=lines < shape[0], other=0.0)
        return codec.decoded(values, scale[:, None], "linear")
    else:
        # A matrix's rows are those of dim 0, or lie in one; what a tile has of a row touches two blocks at most.
        start, inner, lines = scales[2], scales[1], i + tl.arange(0, ROWS)
        line = start // inner + tl.where(inner == shape[2], lines, 0)
        within = start % inner + tl.where(inner == shape[2], 0, lines * shape[2])
        begun = (within % codec.CODES).to(tl.int32)
        block_scales = scales[0] + line * tl.cdiv(inner, codec.CODES) + within // codec.CODES
        here = tl.load(block_scales, mask=lines < shape[0], other=0.0)
        there = tl.load(block_scales + 1, mask=(lines < shape[0]) & (begun + shape[1] > codec.CODES), other=0.0)
        is_here = begun[:, None] + tl.arange(0, WIDE)[None, :] < codec.CODES
        return codec.decoded(values, tl.where(is_here, here[:, None], there[:, None]), "linear")


@triton.jit
def tile_scales(scales):
    """A pointer to the scale of a tile's first row, where each of its rows is a block of codes."""
    return scales[0] + scales[2] // scales[1] * tl.cdiv(scales[1], codec.CODES) + scales[2] % scales[1] // codec.CODES


@triton.jit
def scales_of(row_ptr, start):
    """The scales of an 8-bit average, the elements of a row of dim 0, and a tile's or chunk's first element."""
    return common.at(tl.load(row_ptr + layout.EXP_AVG_SCALE), 0, tl.float32), tl.load(row_ptr + common.INNER), start


@triton.jit
def wrapped(position, length):
    """How many lengths lie below a position that began below the first, and what is left; both in few instructions."""
    if length >= codec.CODES:
        carry = (position >= length).to(tl.int64)
    else:
        carry = (position.to(tl.int32) // tl.minimum(length, codec.CODES).to(tl.int32)).to(tl.int64)
    return carry, position - carry * length
