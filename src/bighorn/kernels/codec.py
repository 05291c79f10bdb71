"""State in few bits: blocks of 256 values that share a scale, the largest magnitude of the block.

A block runs inside one row of dim 0, in the row's logical order whatever its memory order; the last block of a row is
shorter. So a shard of whole rows sees the blocks of the whole tensor, and a checkpoint fits any memory format. A tensor
of short rows (a vector is rows of one element) pays a scale for each of them: such a tensor is better left in float32.

What is stored for a value is a code for its share of the scale, by one of the forms below (docs/precision.md has the
measurements behind them). Arithmetic is in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
TOP = 127

CODES = (torch.int8, torch.uint8, torch.float16)
"""The dtypes of codes."""


Dither = Tensor | int
"""What is added to a code, in 2^-16ths, before it is rounded down: evenly spread from 0 to 2^16 - 1, or `NEAREST`."""

NEAREST = 1 << 15


@dataclass(frozen=True)
class Form:
    """How a value's share of its block's scale becomes a code.

    Attributes:
        dtype: Of the codes.
        to_code: From shares, -1 to 1, to codes in float32.
        to_share: The inverse; the largest code is 1, exactly.
        root: The root of the values is what is stored: they are squares.
    """

    dtype: torch.dtype
    to_code: Callable[[Tensor, Dither], Tensor]
    to_share: Callable[[Tensor], Tensor]
    root: bool = False


def _half(share: Tensor, dither: Dither) -> Tensor:
    del dither
    # What is not 0 does not become 0: it may be what another number is divided by.
    return torch.where(share == 0, share, share.abs().clamp(min=2.0**-24).copysign(share))


def _root(dtype: torch.dtype, end: int, halvings: int) -> Form:
    """Codes below `end` for a root of shares as the bits of floats make it: a square root, halved twice a fourth root.

    The bits of a float, as an integer, are its logarithm at powers of 2 and straight between them. Half of them are the
    bits of a number that grows like its square root, but straight from code to code: what a value is between two
    codes, it is between the values of these, and dither leaves the mean what it is. (The lowest codes are more than a
    factor of 2 apart, and straight to the logarithm only: of second moments those below 1e-7 of the largest.)
    """

    def bits(values: Tensor) -> Tensor:
        return values.view(torch.int32)

    # So `end` would stand for 64 and the largest code stands for 63, which is a share of 1.
    root_end, share_end = (int(bits(torch.tensor(float(of)))) for of in (end, 64))

    def to_code(share: Tensor, dither: Dither) -> Tensor:
        root = root_end + (bits(share.abs() * 63) - share_end >> halvings)
        code = (((root.view(torch.float32) * 2**16).round() + dither) / 2**16).floor()
        least = 0 if dtype.is_signed else 1  # what is not 0 does not become 0: updates are divided by it
        return torch.where(share == 0, share, code.clamp(min=least).copysign(share))

    def to_share(code: Tensor) -> Tensor:
        share = share_end + (bits(code.abs()) - root_end << halvings)
        return torch.where(code == 0, code, (share.view(torch.float32) / 63).copysign(code))

    return Form(dtype, to_code, to_share)


LINEAR = Form(torch.int8, lambda share, _: (share * TOP).round(), lambda code: code / TOP)
"""CAME's momentum, whose values are of one size, since the updates that it averages are."""

SIGNED = _root(torch.int8, 128, 1)
"""LAMB's first moment, by its square root: codes lie closer where values are smaller."""

UNSIGNED = _root(torch.uint8, 256, 2)
"""LAMB's second moment, by its fourth root.

A step changes it by less than the distance of two codes, so to the nearest one it would stay where it is: it is
dithered.
"""

HALF = Form(torch.float16, _half, lambda code: code)
"""A moment in float16, which without scales would lose what is below 6e-8."""

HALF_ROOT = Form(torch.float16, _half, lambda code: code, root=True)
"""A second moment in float16, whose root spans half as many orders of magnitude."""

LAMB_FORMS = {
    "exp_avg": {torch.int8: SIGNED, torch.float16: HALF},
    "exp_avg_sq": {torch.uint8: UNSIGNED, torch.float16: HALF_ROOT},
}
"""By state name and dtype."""


def form_of(name: str, state: Mapping[str, Tensor]) -> Form | None:
    """By which form a moment of a parameter's state is stored, or None: it is floats as they are.

    LAMB has both moments in blocks or neither, CAME only the first.
    """
    if f"{name}_scale" not in state:
        return None
    return LAMB_FORMS[name].get(state[name].dtype) if "exp_avg_sq_scale" in state else LINEAR


def quantize(name: str, values: Tensor, like: Mapping[str, Tensor], dither: Dither = NEAREST) -> dict[str, Tensor]:
    """A moment as it is stored, under its names: rounded to its dtype, or as codes and scales."""
    form = form_of(name, like)
    if form is None:
        return {name: values.to(like[name].dtype)}
    codes, scales = encode(values, form, dither)
    return {name: codes, f"{name}_scale": scales}


def dequantize(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """A moment as it was stored, in a floating dtype."""
    form = form_of(name, state)
    return state[name] if form is None else decode(state[name], state[f"{name}_scale"], form)


def scales_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """The shape of the scales that belong to codes of a shape: rows, blocks of a row.

    Example:
        >>> scales_shape((64, 3, 7, 20)), scales_shape((5, 0)), scales_shape(())
        ((64, 2), (5, 0), (1, 1))
    """
    rows = shape[0] if len(shape) else 1
    return rows, -(-math.prod(shape[1:]) // BLOCK)


def encode(values: Tensor, form: Form = LINEAR, dither: Dither = NEAREST) -> tuple[Tensor, Tensor]:
    """Codes, in the shape of `values`, and scales, float32 in that of `scales_shape`.

    A linear value's error is at most 1/254 of its block's scale. A block of zeros keeps scale 0. A block that holds
    a value beyond float32, an infinity or a NaN has scale NaN and decodes to NaN throughout: it cannot be told apart
    what was meant, and a NaN is seen.

    Example:
        >>> encode(torch.tensor([[1.0, -0.5, 0.0]]))
        (tensor([[127, -64,   0]], dtype=torch.int8), tensor([[1.]]))
        >>> encode(torch.tensor([[1.0, 0.0625, 1e-30]]), UNSIGNED)
        (tensor([[255, 128,   1]], dtype=torch.uint8), tensor([[1.]]))
    """
    blocks = _blocks((values.sqrt() if form.root else values).to(torch.float32))
    scales = blocks.abs().amax(dim=-1)
    scales = torch.where(scales.isfinite(), scales, math.nan)
    # Blocks of zeros would be 0 / 0; what a NaN converts to is nobody's to rely on. No share but that of 0 vanishes.
    shares = (blocks.abs() / scales.unsqueeze(-1)).clamp(min=torch.finfo(torch.float32).tiny).copysign(blocks)
    shares = torch.where((scales.unsqueeze(-1) > 0) & (blocks != 0), shares, 0)
    codes = form.to_code(shares, _blocks(dither) if isinstance(dither, Tensor) else dither)
    return _unblocked(codes, values.shape).to(form.dtype), scales


def decode(codes: Tensor, scales: Tensor, form: Form = LINEAR) -> Tensor:
    """The values, float32 in the shape of `codes`; the largest code is its block's scale, exactly.

    Example:
        >>> decode(torch.tensor([[127, -127, 0]], dtype=torch.int8), torch.tensor([[0.7]]))
        tensor([[ 0.7000, -0.7000,  0.0000]])
    """
    # The share first: no intermediate result overflows or vanishes, whatever the scale.
    values = _unblocked(form.to_share(_blocks(codes.to(torch.float32))) * scales.unsqueeze(-1), codes.shape)
    return values.square() if form.root else values


def _blocks(values: Tensor) -> Tensor:
    """`[rows, blocks of a row, BLOCK]`, the last block of a row filled up with zeros."""
    rows, blocks = scales_shape(values.shape)
    row = values.reshape(rows, math.prod(values.shape[1:]))
    return torch.nn.functional.pad(row, (0, blocks * BLOCK - row.shape[1])).view(rows, blocks, BLOCK)


def _unblocked(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_blocks`."""
    return blocks.flatten(1)[:, : math.prod(shape[1:])].reshape(shape)
