"""Functions that the kernels of every algorithm share: tables, positions of elements, loads and stores."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import torch
import triton
import triton.language as tl

from bighorn._kernels import arithmetic
from bighorn._kernels.triton import columns

TYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
    torch.int8: tl.int8,  # codes
    torch.uint8: tl.uint8,
}
PAST_COUNTING = tl.constexpr(arithmetic.PAST_COUNTING)
LEAST_NORM = tl.constexpr(arithmetic.LEAST_NORM)
LANES = tl.constexpr(256)  # threads of a program; the size of a block is a multiple of it
SUMS_AT_ONCE = tl.constexpr(2048)  # partial sums that a program adds up at a time: 128k rows have 501, one matrix 4

# The number of elements that are aligned together when a block is read or written, or UNMASKED if all of the
# block's elements exist, too. No kernel returns or passes None: Triton 3.3 to 3.6 cannot compile it.
UNMASKED = tl.constexpr(0)

# The table of gradients: int64, the address of each slot's gradient, which is 0 if the slot has no elements.
ABSENT = tl.constexpr(-1)  # the slot takes no part in this step


@triton.jit
def square_sums(
    slots_ptr, grads_ptr, program_to_slot_ptr, squares_ptr,
    G: tl.constexpr, CHUNK: tl.constexpr, G_BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute the sum of squares of each chunk of gradients, `[chunks]`, in reverse, since the next pass is forward."""
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(program_to_slot_ptr + chunk).to(tl.int64)
    address = tl.load(grads_ptr + index)
    start, size = extent(slots_ptr + index * columns.SLOT, chunk, CHUNK)
    size = tl.where(address == ABSENT, 0, size)
    whole = vectorised(address, size, G_BLOCK)
    g = at(address, start, G)
    total = sum_of_squares(g, 0, whole, UNMASKED, G_BLOCK) + sum_of_squares(g, whole, size, 1, G_BLOCK)
    tl.store(squares_ptr + chunk, tl.sum(total, 0))


@triton.jit
def shard_totals(
    slots_ptr, grads_ptr, apply_mask_ptr, sums_ptr, totals_ptr,
    FIRST_SUM: tl.constexpr, STOP_SUM: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute, with one program per shard, the totals of its `sums_ptr`, `[tensors, COLUMNS]`.

    FIRST_SUM and STOP_SUM are the columns of `slots_ptr` that have the bounds of its sums.
    """
    index = tl.program_id(0).to(tl.int64)
    if not takes_part(grads_ptr, apply_mask_ptr, index):
        return
    first, stop = (
        tl.load(slots_ptr + index * columns.SLOT + FIRST_SUM),
        tl.load(slots_ptr + index * columns.SLOT + STOP_SUM),
    )
    for column in tl.static_range(COLUMNS):
        tl.store(totals_ptr + COLUMNS * index + column, partial_total(sums_ptr + column, first, stop, STRIDE))


@triton.jit
def sum_of_squares(pointer, first, stop, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sums of squares over elements `first` to `stop` of a chunk, one per lane."""
    total = tl.zeros((LANES,), tl.float64)
    for i in range(first, stop, BLOCK):
        offsets, mask = block(i, stop, BLOCK)
        value = read(pointer, offsets, mask, VECTOR).to(tl.float64)
        total += folded(value * value)
    return total


# ---- positions and sizes ---------------------------------------------------------------------------------------------


@triton.jit
def takes_part(grads_ptr, apply_mask_ptr, index):
    """Whether this step writes a tensor: the apply mask is set, and the tensor has a gradient."""
    return tl.load(apply_mask_ptr) & (tl.load(grads_ptr + index) != ABSENT)


@triton.jit
def entries(slots_ptr, options_ptr, index):
    """Return a tensor's slot, and its bucket's row of hyper-parameters."""
    slot_ptr = slots_ptr + index * columns.SLOT
    return slot_ptr, options_ptr + tl.load(slot_ptr + columns.slot.HYPER) * columns.OPTION


@triton.jit
def count(slot_ptr):
    """Return the number of this step, from 1, until the step is counted."""
    return tl.load(at(tl.load(slot_ptr + columns.slot.STEP), 0, tl.float32)).to(tl.float64) + 1


@triton.jit
def count_step(slot_ptr):
    """Count this step, as `count_step` of `_kernels/arithmetic.py`."""
    step = at(tl.load(slot_ptr + columns.slot.STEP), 0, tl.float32)
    taken = tl.load(step)
    tl.store(step, taken + tl.maximum(taken * PAST_COUNTING, 1.0), mask=tl.load(slot_ptr + columns.slot.COUNTS) != 0)


@triton.jit
def one_minus_power(base, count):
    """Return 1 - base^count without cancellation, as the function of this name in csrc/numbers.h."""
    rest, square, result = count.to(tl.int64), 1 - base, 0 * base
    while rest > 0:
        result += tl.where(rest % 2 == 1, (1 - result) * square, 0.0)
        square += (1 - square) * square
        rest = rest // 2
    return result


@triton.jit
def gradient_scale(scale_ptr, option_ptr):
    """Return the factor of gradients."""
    return (tl.load(scale_ptr) * tl.load(option_ptr + columns.SIGN)).to(tl.float32)


@triton.jit
def extent(slot_ptr, chunk, CHUNK: tl.constexpr):
    """Return a chunk's first element in its tensor, and its number of elements: negative beyond the tensor's end."""
    start = (chunk - tl.load(slot_ptr + columns.slot.FIRST)) * CHUNK
    return start, tl.minimum(tl.load(slot_ptr + columns.slot.SIZE) - start, CHUNK).to(tl.int32)


@triton.jit
def vectorised(addresses, size, BLOCK: tl.constexpr):
    """Return how many elements of a chunk are in whole blocks, to be moved 16 bytes at a time: 0 if not aligned."""
    return tl.where(addresses % 16 == 0, size // BLOCK * BLOCK, 0)


@triton.jit
def at(address, start, T: tl.constexpr):
    """Return a pointer to element `start` of the tensor at an address."""
    return address.to(tl.pointer_type(T)) + start


@triton.jit
def block(i, stop, BLOCK: tl.constexpr):
    """Return the offsets of a block from element `i` on, and their mask."""
    offsets = i + tl.arange(0, BLOCK)
    return offsets, offsets < stop


# ---- blocks of elements ----------------------------------------------------------------------------------------------


@triton.jit
def read(pointer, offsets, mask, VECTOR: tl.constexpr = 1):
    """Return a block, with 0 for elements outside the mask."""
    if VECTOR == UNMASKED:
        return tl.load(tl.multiple_of(pointer + offsets, 16))
    else:
        return tl.load(aligned_to(pointer, offsets, VECTOR), mask=mask, other=0)


@triton.jit
def gradient(pointer, offsets, mask, scale, VECTOR: tl.constexpr):
    """Return a block of a gradient times `scale`, in its dtype; 0 outside the mask."""
    return read(pointer, offsets, mask, VECTOR).to(scale.dtype) * scale


@triton.jit
def write(pointer, offsets, mask, value, VECTOR: tl.constexpr = 1):
    """Store a block, rounded, and return the stored values."""
    stored = value.to(pointer.dtype.element_ty)
    if VECTOR == UNMASKED:
        tl.store(tl.multiple_of(pointer + offsets, 16), stored)
    else:
        tl.store(aligned_to(pointer, offsets, VECTOR), stored, mask=mask)
    return stored.to(tl.float32)


@triton.jit
def aligned_to(pointer, offsets, VECTOR: tl.constexpr):
    """Return pointers that the compiler can assume to be aligned to VECTOR elements."""
    if VECTOR > 1:
        return tl.multiple_of(pointer + offsets, (1, VECTOR * pointer.dtype.element_ty.primitive_bitwidth // 8))
    else:
        return pointer + offsets


@triton.jit
def folded(values):
    """Return sums over the elements that each thread holds of a block, one per lane, to keep few sums in registers."""
    return tl.sum(tl.reshape(values, (LANES, values.numel // LANES)), 1)


@triton.jit
def partial_total(partials_ptr, first, stop, STRIDE: tl.constexpr):
    """Return the sum of every STRIDE-th float64; `first` and `stop` count strides. The order is always the same."""
    total = tl.zeros((LANES,), tl.float64)
    for i in range(first, stop, SUMS_AT_ONCE):
        index = i + tl.arange(0, SUMS_AT_ONCE)
        total += folded(tl.load(partials_ptr + index * STRIDE, mask=index < stop, other=0.0))
    return tl.sum(total, 0)


@triton.jit
def number(pointer):
    """Return a float64 of a table as a float32."""
    return tl.load(pointer).to(tl.float32)


@triton.jit
def as_bits(x):
    """Return the bits of a float32 as an int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """Return the float32 with these bits."""
    return bits.to(tl.float32, bitcast=True)
