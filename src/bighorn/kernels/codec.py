"""State in 8 bits: blocks of 256 values that share a scale.

A block runs inside one row of dim 0, in the row's logical order whatever its memory order; the last block of a row is
shorter. So a shard of whole rows sees the blocks of the whole tensor, and a checkpoint fits any memory format. A tensor
of short rows (a vector is rows of one element) pays a scale for each of them: such a tensor is better left in float32.

Codes are signed and linear: a block's largest magnitude is its scale and has code 127. Arithmetic is in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 256
TOP = 127


def scales_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """The shape of the scales that belong to codes of a shape: rows, blocks of a row.

    Example:
        >>> scales_shape((64, 3, 7, 20)), scales_shape((5, 0)), scales_shape(())
        ((64, 2), (5, 0), (1, 1))
    """
    rows = shape[0] if len(shape) else 1
    return rows, -(-math.prod(shape[1:]) // BLOCK)


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, int8 in the shape of `values`, and scales, float32 in that of `scales_shape`.

    The error of a value is at most 1/254 of its block's scale. A block of zeros keeps scale 0. A block that holds
    a value beyond float32, an infinity or a NaN has scale NaN and decodes to NaN throughout: it cannot be told apart
    what was meant, and a NaN is seen.

    Example:
        >>> encode(torch.tensor([[1.0, -0.5, 0.0]]))
        (tensor([[127, -64,   0]], dtype=torch.int8), tensor([[1.]]))
    """
    blocks = _blocks(values.to(torch.float32))
    scales = blocks.abs().amax(dim=-1)
    scales = torch.where(scales.isfinite(), scales, math.nan)
    # Blocks of zeros would be 0 / 0; what a NaN converts to is nobody's to rely on.
    codes = torch.where(scales.unsqueeze(-1) > 0, blocks / scales.unsqueeze(-1), 0).mul(TOP).round()
    return _unblocked(codes, values.shape).to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The values, float32 in the shape of `codes`; code 127 is its block's scale, exactly.

    Example:
        >>> decode(torch.tensor([[127, -127, 0]], dtype=torch.int8), torch.tensor([[0.7]]))
        tensor([[ 0.7000, -0.7000,  0.0000]])
    """
    # The quotient first: no intermediate result overflows or vanishes, whatever the scale.
    return _unblocked(_blocks(codes.to(torch.float32)) / TOP * scales.unsqueeze(-1), codes.shape)


def _blocks(values: Tensor) -> Tensor:
    """`[rows, blocks of a row, BLOCK]`, the last block of a row filled up with zeros."""
    rows, blocks = scales_shape(values.shape)
    row = values.reshape(rows, math.prod(values.shape[1:]))
    return torch.nn.functional.pad(row, (0, blocks * BLOCK - row.shape[1])).view(rows, blocks, BLOCK)


def _unblocked(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_blocks`."""
    return blocks.flatten(1)[:, : math.prod(shape[1:])].reshape(shape)
