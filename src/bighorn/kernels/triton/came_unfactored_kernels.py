"""CAME on the device for tensors whose second moment is not factored: chunks of elements, as in LAMB."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

from bighorn.kernels.triton import came_layout as layout
from bighorn.kernels.triton import came_scaling_kernels as scaling
from bighorn.kernels.triton import codec_kernels as codec
from bighorn.kernels.triton import columns
from bighorn.kernels.triton import common_kernels as common
from bighorn.kernels.triton import layer_kernels as layer
from bighorn.kernels.triton import weight_kernels as weights

CODES = tl.constexpr(8)  # of a block of codes, a thread's: a block is in one warp, whose threads find its scale


@triton.jit
def came_second_moment(
    rows_ptr, grads_ptr, tile_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the second moment; compute the sums of u^2 of each chunk, and of x^2 if it scales the learning rate."""
    chunk = tl.program_id(0)
    index = tl.load(tile_to_row_ptr + chunk).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    start, size = common.extent(row_ptr, chunk, CHUNK)
    g, v = tl.load(grads_ptr + index), tl.load(row_ptr + layout.row.EXP_AVG_SQ)
    rest = scaling.second_rest(row_ptr, option_ptr)
    numbers = (
        common.gradient_scale(scale_ptr, option_ptr),
        (1 - rest).to(tl.float32),
        rest.to(tl.float32),
        common.number(option_ptr + layout.option.EPS1),
    )
    whole = common.vectorised(v, size, BLOCK)
    pointers = common.at(g, start, G), common.at(v, start, tl.float32)
    if g % 16 == 0:
        total = second_moment(pointers, numbers, 0, whole, common.UNMASKED, common.UNMASKED, BLOCK)
    else:
        total = second_moment(pointers, numbers, 0, whole, common.UNMASKED, 1, BLOCK)
    total += second_moment(pointers, numbers, whole, size, 1, 1, BLOCK)
    tl.store(sums_ptr + chunk * layout.SUM + layout.U_SQUARES, tl.sum(total, 0))
    if tl.load(option_ptr + layout.option.SCALE_EPS) >= 0:
        weight, squares = weights.weight_at(row_ptr, start, X, ROUNDING), tl.zeros((common.LANES,), tl.float64)
        for i in range(0, size, BLOCK):
            offsets, mask = common.block(i, size, BLOCK)
            value = weights.read_weight(weight, offsets, mask, ROUNDING).to(tl.float64)
            squares += common.folded(value * value)
        tl.store(sums_ptr + chunk * layout.SUM + layout.X_SQUARES, tl.sum(squares, 0))


@triton.jit
def second_moment(
    pointers, numbers, first, stop, VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Advance elements `first` to `stop` of a chunk; return the sums of u^2, one per lane."""
    scale, beta2, rest, eps = numbers
    total = tl.zeros((common.LANES,), tl.float64)
    for i in range(first, stop, BLOCK):
        offsets, mask = common.block(i, stop, BLOCK)
        g = common.gradient(pointers[0], offsets, mask, scale, G_VECTOR)
        v = beta2 * common.read(pointers[1], offsets, mask, VECTOR) + rest * (g * g + eps)  # CAME-v
        u = scaling.unfactored(g, common.write(pointers[1], offsets, mask, v, VECTOR))
        total += common.folded(u.to(tl.float64) * u.to(tl.float64))
    return total


@triton.jit
def came_move(
    rows_ptr, grads_ptr, tile_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, scalars_ptr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr,
    ROUNDING: tl.constexpr, CUT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the average of an unfactored tensor, and step the parameter."""
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(tile_to_row_ptr + chunk).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    first, start, size = layer.chunk_of(row_ptr, chunk, M_FORM, CHUNK)
    g, m, v = (
        tl.load(grads_ptr + index),
        tl.load(row_ptr + columns.row.EXP_AVG),
        tl.load(row_ptr + layout.row.EXP_AVG_SQ),
    )
    lr = tl.load(scalars_ptr + index * layout.NUMBER + layout.RATE)
    factors = (
        common.gradient_scale(scale_ptr, option_ptr),
        common.number(scalars_ptr + index * layout.NUMBER + layout.CLIP),
        common.number(option_ptr + layout.option.BETA1),
        common.number(option_ptr + layout.option.BETA1_REST),
        lr.to(tl.float32),
        (lr * tl.load(option_ptr + columns.DECAY)).to(tl.float32),
    )
    whole = layer.aligned(weights.weight_addresses(row_ptr) | m | v, row_ptr, size, M_FORM, BLOCK)
    pointers = (
        weights.weight_at(row_ptr, start, X, ROUNDING),
        common.at(g, start, G),
        codec.moment_at(row_ptr + columns.row.EXP_AVG, row_ptr + layout.row.EXP_AVG_SCALE, start, S, M_FORM),
        common.at(v, start, tl.float32),
    )
    RANDOM: tl.constexpr = ROUNDING == "stochastic" or M_FORM == "int4"
    rng_key = weights.rng_key(row_ptr, common.count(row_ptr), RANDOM, CUT)
    positions = first, start, tl.load(row_ptr + columns.row.INNER), rng_key
    VECTOR: tl.constexpr = common.UNMASKED if M_FORM == "" else CODES
    if g % 16 == 0:
        move(pointers, positions, factors, 0, whole, VECTOR, VECTOR, M_FORM, ROUNDING, BLOCK)
    else:
        move(pointers, positions, factors, 0, whole, VECTOR, 1, M_FORM, ROUNDING, BLOCK)
    move(pointers, positions, factors, whole, size, 1, 1, M_FORM, ROUNDING, BLOCK)


@triton.jit
def move(
    pointers, positions, factors, first, stop,
    VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, FORM: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step elements `first` to `stop` of a chunk."""
    scale, clip, beta1, beta1_rest, lr, decay = factors
    AT_ONCE: tl.constexpr = BLOCK if FORM == "" else codec.CODES if VECTOR == 1 else common.LANES * CODES
    for i in range(first, stop, AT_ONCE):
        where = codec.blocks_at(positions[0], i, stop, positions[2], VECTOR, FORM, AT_ONCE)
        rng = positions[3], positions[1], where[0]
        x = weights.read_weight(pointers[0], where[0], where[1], ROUNDING, VECTOR)
        g = common.gradient(pointers[1], where[0], where[1], scale, G_VECTOR)
        u = scaling.unfactored(g, common.read(pointers[3], where[0], where[1], VECTOR)) * clip
        m = beta1 * codec.read_moment(pointers[2], where, FORM, VECTOR) + beta1_rest * u  # CAME-m
        m = codec.write_moment(pointers[2], where, m, rng, FORM, VECTOR)
        x -= decay * x
        weights.write_weight(pointers[0], where[0], where[1], x - lr * m, rng, ROUNDING, VECTOR)  # CAME-x
