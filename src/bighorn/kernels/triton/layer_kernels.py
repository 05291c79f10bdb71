"""Functions that the kernels of layer-wise optimizers share: the chunks of a tensor, and the totals of their sums."""

import triton
import triton.language as tl

from bighorn.kernels.triton import codec_kernels as codec
from bighorn.kernels.triton import common_kernels as common

# An element that is loaded by itself takes an address of its own, so that fewer of them fit into registers.
FEWER = tl.constexpr(4)


@triton.jit
def chunk_of(row_ptr, chunk, FORM: tl.constexpr, CHUNK: tl.constexpr):
    """Return a chunk's first element, the origin of its offsets, and its size; all blocks of codes count as full ones.

    With codes, offsets count from the tensor.
    """
    if FORM == "":
        start, size = common.extent(row_ptr, chunk, CHUNK)
        return start, start, size
    else:
        inner = tl.load(row_ptr + common.INNER)
        full = tl.load(row_ptr + common.SIZE) // inner * tl.cdiv(inner, codec.CODES) * codec.CODES
        first = (chunk - tl.load(row_ptr + common.FIRST)) * CHUNK
        return first, 0, tl.minimum(full - first, CHUNK).to(tl.int32)


@triton.jit
def aligned(addresses, row_ptr, size, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many elements of a chunk are moved in vectors; a gradient's address affects only its own loads."""
    if FORM == "":
        return common.vectorised(addresses, size, BLOCK)
    else:
        return tl.where((addresses % 16 == 0) & (tl.load(row_ptr + common.INNER) % 8 == 0), size, 0)


@triton.jit
def tensor_total(sums_ptr, row_ptr, index, WIDTH: tl.constexpr, PER_CHUNK: tl.constexpr):
    """Return a column's sum over a tensor's chunks; for shards, the sum over all ranks."""
    if PER_CHUNK:
        return common.partial_total(sums_ptr, tl.load(row_ptr + common.FIRST), tl.load(row_ptr + common.STOP), WIDTH)
    else:
        return tl.load(sums_ptr + WIDTH * index)
