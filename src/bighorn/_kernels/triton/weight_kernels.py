"""Reads and writes of 16-bit parameters: `_kernels/rounding.py` on the device, with the same names."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bighorn._kernels import rounding
from bighorn._kernels.triton import columns
from bighorn._kernels.triton import common_kernels as common

SMALLEST_NORMAL = tl.constexpr(rounding.SMALLEST_NORMAL)


class Weight(NamedTuple):
    """Pointers to a parameter and to its aux state."""

    stored: Any
    aux: Any


class RngKey(NamedTuple):
    """The key of a tensor's random bits, its step, the position of its first element in the whole parameter, its runs.

    `runs` are length, number and distance of the runs of a shard, and the distance of the next so many; or one number
    if all elements are consecutive.
    """

    key: Any
    step: Any
    first: Any
    runs: Any


class Rng(NamedTuple):
    """What random bits of a block derive from: `rng_key`, the chunk's or tile's first element, and offsets from it."""

    key: Any
    start: Any
    offsets: Any


@triton.jit
def weight_at(slot_ptr, start, X: tl.constexpr, ROUNDING: tl.constexpr):
    """Return a parameter, and its aux state, from an element on."""
    AUX: tl.constexpr = tl.int16 if ROUNDING == "kahan" else tl.int8 if ROUNDING == "kahan8" else tl.float32
    stored, aux = tl.load(slot_ptr + columns.slot.PARAM), tl.load(slot_ptr + columns.slot.AUX)
    return Weight(common.at(stored, start, X), common.at(aux, start, AUX))


@triton.jit
def weight_addresses(slot_ptr):
    """Return the bitwise or of the addresses of a parameter and of its aux state."""
    return tl.load(slot_ptr + columns.slot.PARAM) | tl.load(slot_ptr + columns.slot.AUX)


@triton.jit
def read_weight(weight, offsets, mask, ROUNDING: tl.constexpr, VECTOR: tl.constexpr = 1):
    """Return the values that a parameter stands for, widened; 0 for elements outside the mask."""
    stored = common.read(weight.stored, offsets, mask, VECTOR).to(tl.float32)
    if ROUNDING == "kahan" or ROUNDING == "kahan8":
        UNIT: tl.constexpr = 1 if ROUNDING == "kahan" else 32 if tl.float16 == weight.stored.dtype.element_ty else 256
        shift = raised(stored, weight.stored.dtype.element_ty)
        near = stored + shift
        lost = common.read(weight.aux, offsets, mask, VECTOR).to(tl.int32)
        # A bfloat16 that a program has set to 0 keeps its compensation, and the bit patterns below 0's are NaN.
        lost = tl.where(near == 0, 0, lost * UNIT)
        return common.as_float(common.as_bits(near) + lost) - shift
    elif ROUNDING == "master":
        master = common.read(weight.aux, offsets, mask, VECTOR)
        return tl.where(master.to(weight.stored.dtype.element_ty).to(tl.float32) == stored, master, stored)
    else:
        return stored


@triton.jit
def write_weight(weight, offsets, mask, value, rng, ROUNDING: tl.constexpr, VECTOR: tl.constexpr = 1):
    """Store a parameter and its aux state; "stochastic" takes random bits by `rng`.

    The stored values are returned, since Triton 3.3 compiles no call without a result under a condition.
    """
    if ROUNDING == "stochastic":
        value = stochastic(value, random_bits(rng), weight.stored.dtype.element_ty)
    if ROUNDING == "kahan8":
        return write_with_8_bits(weight, offsets, mask, value, VECTOR)
    near = common.write(weight.stored, offsets, mask, value, VECTOR)
    if ROUNDING == "kahan":
        shift = raised(near, weight.stored.dtype.element_ty)
        lost = common.as_bits(value + shift) - common.as_bits(near + shift)
        lost = tl.where(tl.abs(near) < float("inf"), tl.minimum(tl.maximum(lost, -(2**15)), 2**15 - 1), 0)
        common.write(weight.aux, offsets, mask, lost, VECTOR)
    elif ROUNDING == "master":
        common.write(weight.aux, offsets, mask, value, VECTOR)
    return near


@triton.jit
def write_with_8_bits(weight, offsets, mask, value, VECTOR: tl.constexpr):
    """Store a parameter, and as its compensation the next 8 bits of a value; return the stored parameter."""
    X: tl.constexpr = weight.stored.dtype.element_ty
    DROPPED: tl.constexpr = 13 if tl.float16 == X else 16
    UNIT: tl.constexpr = DROPPED - 8
    shift = raised(value, X)
    bits = (common.as_bits(value + shift) + (1 << (UNIT - 1))) & -(1 << UNIT)
    # A half is rounded up, so that the lost part of a bfloat16 is -128 to 127 of its units.
    half = common.as_float((bits + (1 << (DROPPED - 1))) & -(1 << DROPPED)) - shift
    half = common.as_float((common.as_bits(half) & 0x7FFFFFFF) | (common.as_bits(value) & -(2**31)))
    near = common.write(weight.stored, offsets, mask, tl.where(tl.abs(value) < float("inf"), half, value), VECTOR)
    above = raised(near, X)
    lost = (common.as_bits(common.as_float(bits) - shift + above) - common.as_bits(near + above)) >> UNIT
    lost = tl.where(tl.abs(near) < float("inf"), tl.minimum(tl.maximum(lost, -128), 127), 0)
    common.write(weight.aux, offsets, mask, lost, VECTOR)
    return near


@triton.jit
def raised(x, X: tl.constexpr):
    """Return the addend after which the dtype lacks exactly float32's last bits: mostly 0."""
    if tl.float16 == X:
        return tl.where(
            tl.abs(x) < SMALLEST_NORMAL, tl.where(common.as_bits(x) < 0, -SMALLEST_NORMAL, SMALLEST_NORMAL), 0.0
        )
    else:
        return tl.zeros_like(x)


@triton.jit
def stochastic(value, bits, X: tl.constexpr):
    """Return one of the two neighbours in a 16-bit dtype, each more likely the nearer it is; the mean is the value."""
    DROPPED: tl.constexpr = 13 if tl.float16 == X else 16
    shift = raised(value, X)
    moved = (common.as_bits(value + shift) + (bits >> (32 - DROPPED)).to(tl.int32)) & -(1 << DROPPED)
    return tl.where(tl.abs(value) < float("inf"), common.as_float(moved) - shift, value)


# ---- random bits -----------------------------------------------------------------------------------------------------


@triton.jit
def rng_key(slot_ptr, t, RANDOM: tl.constexpr, CUT: tl.constexpr):
    """Return what random bits and dither of a tensor derive from at step `t`; without RANDOM, nothing that is read.

    CUT: the row may be a shard whose elements are not consecutive in the whole parameter.
    """
    if RANDOM:
        key, step = tl.load(slot_ptr + columns.slot.KEY).to(tl.uint32), t.to(tl.int64).to(tl.uint32)
        first = tl.load(slot_ptr + columns.slot.POSITION)
        if CUT:
            runs = (
                tl.load(slot_ptr + columns.slot.RUN),
                tl.load(slot_ptr + columns.slot.RUNS),
                tl.load(slot_ptr + columns.slot.RUN_STEP),
                tl.load(slot_ptr + columns.slot.RUNS_STEP),
            )
            return RngKey(key, step, first, runs)
        else:
            return RngKey(key, step, first, (first,))
    else:
        return slot_ptr


@triton.jit
def random_bits(rng):
    """Return 32 random bits for each element of a block."""
    rng_key, start, offsets = rng
    seed = mixed(rng_key.key + rng_key.step)
    if len(rng_key.runs) == 1 and offsets.dtype == tl.int32:
        # Less than 2^32 after the start, the high half of a position equals the start's or is one more.
        first = position_of(rng_key, start)
        low, high = first.to(tl.uint32), (first >> 32).to(tl.uint32)
        position = low + offsets.to(tl.uint32)
        high_hash = tl.where(position < low, mixed(seed + high + 1), mixed(seed + high))
        return mixed(position ^ high_hash)
    else:
        position = position_of(rng_key, start + offsets)
        return mixed(position.to(tl.uint32) ^ mixed(seed + (position >> 32).to(tl.uint32)))


@triton.jit
def dither(rng):
    """Return 16 bits for each element of a block, as `random_bits`, that are more evenly spread."""
    position = position_of(rng.key, rng.start + rng.offsets).to(tl.uint32)
    spread = rng.key.step * tl.full((), 0x9E3779B9, tl.uint32) + position * tl.full((), 0xC13FA9A9, tl.uint32)
    return (rng.key.key + spread) >> 16


@triton.jit
def position_of(rng_key, elements):
    """Return the positions of elements in the whole parameter, int64."""
    position = elements.to(tl.int64)
    if len(rng_key.runs) > 1:
        length, count, distance, far = rng_key.runs
        run = position // length
        position += run % count * (distance - length) + run // count * (far - count * length)
    return position + rng_key.first


@triton.jit
def mixed(h):
    """Return a permutation of 32 bits: lowbias32."""
    h = (h ^ (h >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)
