"""Moments in blocks of few bits: `_kernels/codec.py` on the device, with the same names."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bighorn._kernels import codec
from bighorn._kernels.triton import common_kernels as common
from bighorn._kernels.triton import weight_kernels as weights

CODES = tl.constexpr(codec.BLOCK)

# The bits of the float 64, which codes 128 ("signed") and 256 ("unsigned") would represent, and of both codes.
SHARE_END = tl.constexpr((127 + 6) << 23)
SIGNED_END = tl.constexpr((127 + 7) << 23)
UNSIGNED_END = tl.constexpr((127 + 8) << 23)

SIGN = tl.constexpr(-0x80000000)
TWO_TO_23 = tl.constexpr((127 + 23) << 23)

# These factors are within an ulp of divisions, for a tenth of the instructions; the largest codes still have share 1.
ONE_127TH = tl.constexpr(1 / 127)
ONE_63RD = tl.constexpr(1 / 63)
ONE_7TH = tl.constexpr(1 / 7)


class Where(NamedTuple):
    """Offsets and masks: of elements, of the scales of their blocks of codes, and of the bytes of codes of 4 bits.

    A form without one of them has the offsets and mask of the elements there.
    """

    offsets: Any
    mask: Any
    scales: Any
    has_scale: Any
    bytes: Any
    has_byte: Any


@triton.jit
def blocks_at(first, i, stop, inner, VECTOR: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a block of a chunk is.

    Without codes, offsets are relative to the chunk. With codes, every block of codes counts as a full one in a chunk,
    whose elements begin at `first`, and offsets are relative to the tensor, whose rows have `inner` elements.
    """
    if FORM == "":
        offsets, mask = common.block(i, stop, BLOCK)
        return Where(offsets, mask, offsets, mask, offsets, mask)
    else:
        inner = inner.to(tl.int32)
        numbers = ((first + i) // CODES).to(tl.int32) + tl.arange(0, BLOCK // CODES)
        exist = numbers < ((first + stop) // CODES).to(tl.int32)
        in_row = tl.cdiv(inner, CODES)
        line, block = (numbers // in_row).to(tl.int64), numbers % in_row
        offsets, mask = in_blocks(line, block, exist, inner, VECTOR, CODES)
        if FORM == "int4":
            halves, has_byte = in_blocks(line, block, exist, inner // 2, (VECTOR + 1) // 2, CODES // 2)
            return Where(offsets, mask, numbers, exist, halves, has_byte)
        else:
            return Where(offsets, mask, numbers, exist, offsets, mask)


@triton.jit
def in_blocks(line, block, exist, inner, VECTOR: tl.constexpr, LENGTH: tl.constexpr):
    """Return offsets and mask of what blocks of LENGTH have, in rows of `inner`."""
    columns = (block * LENGTH)[:, None] + tl.arange(0, LENGTH)[None, :]
    # The quotients are exact, and show the compiler that the products are multiples.
    offsets = (line * (inner // VECTOR * VECTOR))[:, None] + columns
    return offsets, exist[:, None] & (columns < inner // VECTOR * VECTOR)


@triton.jit
def moment_at(address_ptr, scales_ptr, start, S: tl.constexpr, FORM: tl.constexpr):
    """Return pointers to a moment from an element on, and to the scales of its blocks, which begin at the tensor.

    The arguments point to their addresses, in the table of slots.
    """
    if FORM == "":
        return common.at(tl.load(address_ptr), start, S), scales_ptr
    else:
        return common.at(tl.load(address_ptr), 0, S), common.at(tl.load(scales_ptr), 0, tl.float32)


@triton.jit
def read_moment(moment, where, FORM: tl.constexpr, VECTOR: tl.constexpr):
    """Return a block of a stored moment, widened."""
    stored, scales = moment
    if FORM == "":
        return common.read(stored, where.offsets, where.mask, VECTOR).to(tl.float32)
    else:
        codes = read_codes(stored, where, FORM, VECTOR)
        return decoded(codes, tl.load(scales + where.scales, mask=where.has_scale, other=0.0)[:, None], FORM)


@triton.jit
def write_moment(moment, where, value, rng, FORM: tl.constexpr, VECTOR: tl.constexpr):
    """Store a block of a moment, and return the stored values; `rng` is for `encoded`."""
    stored, scales = moment
    if FORM == "":
        return common.write(stored, where.offsets, where.mask, value, VECTOR)
    else:
        codes, scale = encoded(value, where.mask, rng, FORM)
        tl.store(scales + where.scales, scale, mask=where.has_scale)
        codes = write_codes(stored, where, codes, FORM, VECTOR)
        return decoded(codes, scale[:, None], FORM)


@triton.jit
def read_codes(pointer, where, FORM: tl.constexpr, VECTOR: tl.constexpr):
    """Return a block of codes."""
    if FORM == "int4":
        both = common.read(pointer, where.bytes, where.has_byte, (VECTOR + 1) // 2).to(tl.int32)
        return signed_int4(tl.reshape(tl.join(both, both >> 4), (both.shape[0], both.shape[1] * 2)))
    else:
        return common.read(pointer, where.offsets, where.mask, VECTOR)


@triton.jit
def write_codes(pointer, where, codes, FORM: tl.constexpr, VECTOR: tl.constexpr):
    """Store a block of codes, and return the codes as they are stored."""
    if FORM == "int4":
        low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
        common.write(pointer, where.bytes, where.has_byte, (low & 15) | (high & 15) << 4, (VECTOR + 1) // 2)
        return codes
    else:
        return common.write(pointer, where.offsets, where.mask, codes, VECTOR)


@triton.jit
def signed_int4(bits):
    """Return the codes whose two's complements are the lower 4 bits, as float32, of which 2^23 has a last bit of 1."""
    return common.as_float((bits & 15) ^ (TWO_TO_23 | 8)) - (2.0**23 + 8)


@triton.jit
def decoded(codes, scale, FORM: tl.constexpr):
    """Return the values of codes; the share is computed first, so that nothing overflows or underflows."""
    code = codes.to(tl.float32)
    if FORM == "linear":
        return code * ONE_127TH * scale
    elif FORM == "int4":
        return code * ONE_7TH * scale
    elif FORM == "signed":
        share = power(magnitude(code), SIGNED_END, 1)
        return common.as_float(common.as_bits(share) | (common.as_bits(code) & SIGN)) * scale
    else:
        return power(code, UNSIGNED_END, 2) * scale


@triton.jit
def encoded(values, mask, rng, FORM: tl.constexpr):
    """Return codes of some blocks, dithered by `rng`, as integers or float32, and the scales.

    A scale of a block that is not finite is NaN.
    """
    size = magnitude(values)
    # As integers, the bits of non-negative floats have the order of the floats, with NaN last.
    scale = common.as_float(tl.max(tl.where(mask, common.as_bits(size), 0), 1))
    scale = tl.where(scale < float("inf"), scale, float("nan"))
    # The inverse of a scale below 2^-128 would be infinite, and a division for each element takes ten instructions.
    lift = tl.where(scale < 2.0**-64, 2.0**64, 1.0)
    inverse = tl.div_rn(1.0, tl.where(scale > 0, scale * lift, 1.0))
    share = size * lift[:, None] * inverse[:, None]
    if FORM == "linear":
        code = dithered(share * 127, rng, 127)
    elif FORM == "signed":
        code = dithered(root(share, SIGNED_END, 1), rng, 127)
    elif FORM == "int4":
        code = dithered(share * 7, rng, 7)
    else:
        code = tl.maximum(dithered(root(share, UNSIGNED_END, 2), rng, 255), 1)
    code = tl.where(size > tl.where(scale > 0, 0.0, float("inf"))[:, None], code, 0)
    return code if FORM == "unsigned" else tl.where(values < 0, -code, code), scale


@triton.jit
def dithered(code, rng, MOST: tl.constexpr):
    """Return a number from 0 to MOST as one of the two integers beside it, by the dither of its element."""
    return (in_65536ths(code, MOST) + weights.dither(rng).to(tl.int32)) >> 16


@triton.jit
def root(share, END: tl.constexpr, HALVINGS: tl.constexpr):
    """Return a root of a share, by shifting the bits of floats; it is then rounded to a code."""
    return common.as_float((common.as_bits(share * 63) >> HALVINGS) + (END - (SHARE_END >> HALVINGS)))


@triton.jit
def power(code, END: tl.constexpr, HALVINGS: tl.constexpr):
    """Return the share of a code: the inverse of `root`."""
    share = common.as_float(((common.as_bits(code) - END) << HALVINGS) + SHARE_END)
    return tl.where(code == 0, 0.0, share * ONE_63RD)


@triton.jit
def magnitude(x):
    """Return the absolute value, by its bits: `tl.abs` flushes float32's subnormal numbers to 0 (abs.ftz in PTX)."""
    return common.as_float(common.as_bits(x) & 0x7FFFFFFF)


@triton.jit
def in_65536ths(x, MOST: tl.constexpr):
    """Return the nearest multiple of 2^-16, as their number, of a number from 0 to MOST, which is 255 at most.

    It is in the last bits of a float from 128 on, whose own bits are SIGNED_END.
    """
    if MOST < 128:
        return common.as_bits(x + 128.0) - SIGNED_END
    is_below = x < 128.0
    return common.as_bits(tl.where(is_below, x + 128.0, x)) - tl.where(is_below, SIGNED_END, SIGNED_END - (128 << 16))
