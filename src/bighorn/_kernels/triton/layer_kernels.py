"""The frame of the kernels of layer-wise optimizers: chunks, their sums, and the norms of a tensor.

An algorithm adds rules. `run_chunk` calls RULE for each block of a chunk with x, the gradient times its factor, the
pointers to the moments, the numbers that NUMBERS returned before, and the block's place. In the first pass it returns
the sums of squares of x and u, one of each per lane. `run_tensor` calls RATIO once per tensor, with the norms of both.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bighorn._kernels.triton import codec_kernels as codec
from bighorn._kernels.triton import columns
from bighorn._kernels.triton import common_kernels as common
from bighorn._kernels.triton import layer_layout as layout
from bighorn._kernels.triton import weight_kernels as weights

# An element that is loaded by itself takes an address of its own, so that fewer of them fit into registers.
FEWER = tl.constexpr(4)


class Mode(NamedTuple):
    """The constants of a pass: dtypes, the forms of moments, and how x is rounded."""

    X: Any
    G: Any
    S: Any
    V: Any
    M_FORM: Any
    V_FORM: Any
    ROUNDING: Any
    CUT: Any
    CHUNK: Any
    BLOCK: Any
    CONSTANTS: Any = tl.constexpr(0)
    """The algorithm's."""
    SUMS: Any = tl.constexpr(2)
    """The number of sums of a chunk, `sums` of its options."""


class Place(NamedTuple):
    """A block: where it is, its parameter, and what its random bits derive from."""

    where: Any
    weight: Any
    rng: Any


class Chunk(NamedTuple):
    """A chunk: its first element, the origin of its offsets, the elements of a row of its tensor, and its `RngKey`."""

    first: Any
    start: Any
    inner: Any
    rng_key: Any


# ---- a pass over chunks ----------------------------------------------------------------------------------------------


@triton.jit
def run_chunk(
    tables, moments, RULE: tl.constexpr, NUMBERS: tl.constexpr, FIRST_PASS: tl.constexpr, mode,
    READS_G: tl.constexpr = True, CODES: tl.constexpr = 8,
):  # fmt: skip
    """Apply a rule to a program's chunk; the first pass stores its sums.

    `moments` are the columns with the addresses of the moments that the rule takes. The second pass is in reverse
    order, since the last chunks of the first one may still be in cache. A thread has CODES elements of a block of
    codes: with 8, the block is in one warp, whose threads find its scale without a barrier.
    """
    slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr = tables
    program = tl.program_id(0) if FIRST_PASS else tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(program_to_slot_ptr + program).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr, option_ptr = common.entries(slots_ptr, options_ptr, index)
    factor_ptr = factors_ptr + index * layout.FACTOR
    first, start, size = chunk_of(slot_ptr, program, mode.M_FORM, mode.CHUNK)
    g, addresses = tl.load(grads_ptr + index), weights.weight_addresses(slot_ptr)
    for i in tl.static_range(len(moments)):
        addresses |= tl.load(slot_ptr + moments[i])
    whole = aligned(addresses, slot_ptr, size, mode.M_FORM, mode.BLOCK)
    pointers = (
        weights.weight_at(slot_ptr, start, mode.X, mode.ROUNDING),
        common.at(g, start, mode.G),
        moments_at(slot_ptr, moments, start, mode),
    )
    numbers = common.gradient_scale(scale_ptr, option_ptr), NUMBERS(slot_ptr, option_ptr, factor_ptr)
    if FIRST_PASS:
        t = common.count(slot_ptr)
        # Not in `run_tensor`, where another slice of a stacked parameter may have counted the step.
        tl.store(factor_ptr + layout.STEP_NUMBER, t)
    else:
        t = tl.load(factor_ptr + layout.STEP_NUMBER)
    RANDOM: tl.constexpr = mode.ROUNDING == "stochastic" or mode.M_FORM != ""
    rng_key = weights.rng_key(slot_ptr, t, RANDOM, mode.CUT)
    chunk = Chunk(first, start, tl.load(slot_ptr + columns.slot.INNER), rng_key)
    VECTOR: tl.constexpr = common.UNMASKED if mode.M_FORM == "" else CODES
    if not READS_G:
        near = run_blocks(pointers, numbers, chunk, 0, whole, RULE, FIRST_PASS, READS_G, VECTOR, 1, mode)
    elif g % 16 == 0:
        near = run_blocks(pointers, numbers, chunk, 0, whole, RULE, FIRST_PASS, READS_G, VECTOR, VECTOR, mode)
    else:  # gradients of FSDP2 and DDP are often not aligned: only they are loaded one element at a time
        near = run_blocks(pointers, numbers, chunk, 0, whole, RULE, FIRST_PASS, READS_G, VECTOR, 1, mode)
    far = run_blocks(pointers, numbers, chunk, whole, size, RULE, FIRST_PASS, READS_G, 1, 1, mode)
    for column in tl.static_range(mode.SUMS if FIRST_PASS else 0):
        tl.store(sums_ptr + program * mode.SUMS + column, tl.sum((near[column] + far[column]).to(tl.float64), 0))


@triton.jit
def run_blocks(
    pointers, numbers, chunk, first, stop, RULE: tl.constexpr, FIRST_PASS: tl.constexpr,
    READS_G: tl.constexpr, VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, mode,
):  # fmt: skip
    """Apply a rule to elements `first` to `stop` of a chunk; return its sums, one of each per lane."""
    AT_ONCE: tl.constexpr = mode.BLOCK // FEWER if VECTOR == 1 else mode.BLOCK
    zeros = tl.zeros((common.LANES,), tl.float64)
    sums = (zeros, zeros, zeros) if mode.SUMS == 3 else (zeros, zeros)
    weight, gradient, moments = pointers
    scale, of_rule = numbers
    for i in range(first, stop, AT_ONCE):
        where = codec.blocks_at(chunk.first, i, stop, chunk.inner, VECTOR, mode.M_FORM, AT_ONCE)
        x = weights.read_weight(weight, where.offsets, where.mask, mode.ROUNDING, VECTOR)
        g = common.gradient(gradient, where.offsets, where.mask, scale, G_VECTOR) if READS_G else x
        place = Place(where, weight, weights.Rng(chunk.rng_key, chunk.start, where.offsets))
        if FIRST_PASS:
            sums = RULE(x, g, moments, of_rule, place, VECTOR, mode, sums)
        else:
            RULE(x, g, moments, of_rule, place, VECTOR, mode)
    return sums


@triton.jit
def moments_at(slot_ptr, moments, start, mode):
    """Return pointers to the moments and to the scales of their blocks."""
    scales_ptr = slot_ptr + columns.slot.EXP_AVG_SCALE
    found = (codec.moment_at(slot_ptr + columns.slot.EXP_AVG, scales_ptr, start, mode.S, mode.M_FORM),)
    for i in tl.static_range(1, len(moments)):
        found += (
            codec.moment_at(slot_ptr + moments[i], slot_ptr + layout.slot.EXP_AVG_SQ_SCALE, start, mode.V, mode.V_FORM),
        )
    return found


@triton.jit
def with_squares(sums, x, u):
    """Return the sums with the squares of a block of x and of u."""
    x, u = x.to(tl.float64), u.to(tl.float64)
    return sums[0] + common.folded(x * x), sums[1] + common.folded(u * u)


@triton.jit
def with_products(sums, x, u):
    """Return the sums with the squares of a block of x and of u, and with their products."""
    weight, update = with_squares(sums, x, u)
    return weight, update, sums[2] + common.folded(x.to(tl.float64) * u.to(tl.float64))


@triton.jit
def write_weight(place, x, VECTOR: tl.constexpr, mode):
    """Store a block of x, and return the stored values."""
    return weights.write_weight(
        place.weight, place.where.offsets, place.where.mask, x, place.rng, mode.ROUNDING, VECTOR
    )


@triton.jit
def chunk_of(slot_ptr, chunk, FORM: tl.constexpr, CHUNK: tl.constexpr):
    """Return a chunk's first element, the origin of its offsets, and its size; all blocks of codes count as full ones.

    With codes, offsets count from the tensor.
    """
    if FORM == "":
        start, size = common.extent(slot_ptr, chunk, CHUNK)
        return start, start, size
    else:
        inner = tl.load(slot_ptr + columns.slot.INNER)
        full = tl.load(slot_ptr + columns.slot.SIZE) // inner * tl.cdiv(inner, codec.CODES) * codec.CODES
        first = (chunk - tl.load(slot_ptr + columns.slot.FIRST)) * CHUNK
        return first, 0, tl.minimum(full - first, CHUNK).to(tl.int32)


@triton.jit
def aligned(addresses, slot_ptr, size, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many elements of a chunk are moved in vectors; a gradient's address affects only its own loads."""
    if FORM == "":
        return common.vectorised(addresses, size, BLOCK)
    else:
        return tl.where((addresses % 16 == 0) & (tl.load(slot_ptr + columns.slot.INNER) % 8 == 0), size, 0)


# ---- between the passes ----------------------------------------------------------------------------------------------


@triton.jit
def run_tensor(tables, RATIO: tl.constexpr, PER_CHUNK: tl.constexpr, INNER: tl.constexpr = False):
    """Store a tensor's norms and trust ratio, which RATIO returns from the norms of x and u, and count its step.

    With INNER, it takes <x, u>, and the tensor's slot, as well.
    """
    slots_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, totals_ptr = tables
    SUMS: tl.constexpr = 3 if INNER else 2
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr, option_ptr = common.entries(slots_ptr, options_ptr, index)
    factor_ptr = factors_ptr + index * layout.FACTOR
    weight_norm = tl.sqrt(tensor_total(totals_ptr, slot_ptr, index, PER_CHUNK, SUMS))
    update_norm = tl.sqrt(tensor_total(totals_ptr + 1, slot_ptr, index, PER_CHUNK, SUMS))
    if INNER:
        inner = tensor_total(totals_ptr + 2, slot_ptr, index, PER_CHUNK, SUMS)
        update_norm, q = RATIO(weight_norm, update_norm, inner, slot_ptr, option_ptr, factor_ptr)
    else:
        update_norm, q = RATIO(weight_norm, update_norm, option_ptr, factor_ptr)
    metrics = tl.load(slot_ptr + columns.slot.NORMS).to(tl.pointer_type(tl.float32))
    tl.store(metrics, weight_norm.to(tl.float32))
    tl.store(metrics + 1, update_norm.to(tl.float32))
    tl.store(metrics + 2, q.to(tl.float32))
    common.count_step(slot_ptr)


@triton.jit
def tensor_total(sums_ptr, slot_ptr, index, PER_CHUNK: tl.constexpr, SUMS: tl.constexpr):
    """Return a column's sum over a tensor's chunks; for shards, the sum over all ranks."""
    if PER_CHUNK:
        return common.partial_total(
            sums_ptr, tl.load(slot_ptr + columns.slot.FIRST), tl.load(slot_ptr + columns.slot.STOP), SUMS
        )
    else:
        return tl.load(sums_ptr + SUMS * index)
