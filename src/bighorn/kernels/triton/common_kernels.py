"""What the kernels of every algorithm share: tables, where things lie, how they are read and written."""

import torch
import triton
import triton.language as tl

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,  # gradients may be
    torch.int8: tl.int8,  # codes
}
LANES = tl.constexpr(256)  # threads of a program; a block is a multiple of it

# The table of rows: int64, one row per tensor; the columns after these are the algorithm's.
SIZE = tl.constexpr(0)  # in elements
FIRST = tl.constexpr(1)  # its first chunk
STOP = tl.constexpr(2)  # the chunk after its last
PARAM = tl.constexpr(3)  # addresses
EXP_AVG = tl.constexpr(4)
STEP = tl.constexpr(5)
NORMS = tl.constexpr(6)
COUNTS = tl.constexpr(7)  # 1 where it advances `step`, which the slices of a parameter share
HYPER = tl.constexpr(8)  # its row in the table of hyper-parameters
ROW = tl.constexpr(26)

# The table of hyper-parameters: float64, one row per bucket (`options` is a name of Triton's own).
LR = tl.constexpr(0)
SIGN = tl.constexpr(1)  # -1 to maximize
DECAY = tl.constexpr(2)
OPTION = tl.constexpr(16)


@triton.jit
def square_sums(rows, grads, owners, squares, G: tl.constexpr, CHUNK: tl.constexpr):
    """The sum of the squares of each chunk of the gradients, `[chunks]`."""
    BLOCK: tl.constexpr = LANES * (128 // G.primitive_bitwidth)
    chunk = tl.program_id(0)
    index = tl.load(owners + chunk).to(tl.int64)
    start, size = extent(rows + index * ROW, chunk, CHUNK)
    whole = vectorised(tl.load(grads + index), size, BLOCK)
    g = at(tl.load(grads + index), start, G)
    total = sum_of_squares(g, 0, whole, False, BLOCK) + sum_of_squares(g, whole, size, True, BLOCK)
    tl.store(squares + chunk, tl.sum(total, 0))


@triton.jit
def sum_of_squares(pointer, first, stop, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of squares over elements `first` to `stop` of a chunk, one for each lane."""
    total = tl.zeros((LANES,), tl.float64)
    for i in range(first, stop, BLOCK):
        offsets, mask = block(i, stop, MASKED, BLOCK)
        value = read(pointer, offsets, mask).to(tl.float64)
        total += folded(value * value)
    return total


@triton.jit
def extent(row, chunk, CHUNK: tl.constexpr):
    """Where a chunk starts in its tensor, and how many elements it has."""
    start = (chunk - tl.load(row + FIRST)) * CHUNK
    return start, tl.minimum(tl.load(row + SIZE) - start, CHUNK).to(tl.int32)


@triton.jit
def vectorised(addresses, size, BLOCK: tl.constexpr):
    """How many elements of a chunk are whole blocks, to be moved 16 bytes at a time: none if an address forbids it."""
    return tl.where(addresses % 16 == 0, size // BLOCK * BLOCK, 0)


@triton.jit
def at(address, start, T: tl.constexpr):
    """A pointer to element `start` of the tensor at an address."""
    return address.to(tl.pointer_type(T)) + start


@triton.jit
def block(i, stop, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The offsets of a block from element `i` on, and which of them there are; None: all, and they are aligned."""
    offsets = i + tl.arange(0, BLOCK)
    return offsets, offsets < stop if MASKED else None


@triton.jit
def read(pointer, offsets, mask):
    """A block, with 0 where there is no element."""
    if mask is None:
        return tl.load(tl.multiple_of(pointer + offsets, 16))
    else:
        return tl.load(pointer + offsets, mask=mask, other=0)


@triton.jit
def write(pointer, offsets, mask, value):
    """Store a block, rounded, and return it as it is stored."""
    stored = value.to(pointer.dtype.element_ty)
    if mask is None:
        tl.store(tl.multiple_of(pointer + offsets, 16), stored)
    else:
        tl.store(pointer + offsets, stored, mask=mask)
    return stored.to(tl.float32)


@triton.jit
def folded(values):
    """Sums over what a thread holds of a block, one for each lane: one for each element would take its registers."""
    return tl.sum(tl.reshape(values, (LANES, values.shape[0] // LANES)), 1)


@triton.jit
def number(pointer):
    """A float64 of a table as a float32."""
    return tl.load(pointer).to(tl.float32)
