"""State in few bits: blocks of 256 values that share a scale, the largest magnitude of the block.

A block is within one row, in the row's logical order for any memory order; the last block of a row is shorter. So
a shard of whole rows has the same blocks as the whole tensor, and a checkpoint fits any memory format. A row is all of
an index of dim 0, or of several leading dims: scales have these dims, and one for the blocks of a row. CAME's rows are
the rows of the matrices that it factors. Tensors of short rows need a scale per row, and are better kept in float32.

The code of a value represents its share of the scale, by one of the forms below (measurements:
workbench/benchmarks/results/precision.md). Arithmetic is in float32.

In a step codes are dithered. A step changes a moment by less than the distance of two codes, so that rounding to the
nearest one would never change it: where the gradients of some elements of a block stop, their first moment would stay
while their second one fades, and their updates would grow without bound.

Codes of 4 bits are packed: a byte has two neighbours of a row, the first one in its lower bits, each as its two's
complement. Such a row has an even number of elements, and codes are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bighorn._kernels.arithmetic import bits_as, with_signs

BLOCK = 256
TOP = 127


Dither = Tensor | int
"""The offset that is added to a code, in 2^-16ths, before it is rounded down: evenly spread from 0 to 2^16 - 1, or
`NEAREST`."""

NEAREST = 1 << 15


@dataclass(frozen=True)
class Form:
    """A mapping of a value's share of its block's scale to a code.

    Attributes:
        dtype: The dtype of codes.
        to_code: The function from magnitudes of shares, 0 to 1, to magnitudes of codes, in float32, in the same memory.
        to_share: The inverse, from codes with signs; the share of the largest code is exactly 1.
        int4: Whether codes have 4 bits; a byte then has two, and codes are `[rows, bytes of a row]`.
        relative: The name of the moment by whose root, as it is stored, values are divided before they are coded; "" if
            they are not.
        least: The least code of a value that is not 0, since another number may be divided by it; 0 if it may become 0.
    """

    dtype: torch.dtype
    to_code: Callable[[Tensor, Dither], Tensor]
    to_share: Callable[[Tensor], Tensor]
    int4: bool = False
    relative: str = ""
    least: float = 0.0


def _root(dtype: torch.dtype, end: int, halvings: int) -> Form:
    """Return a form with codes below `end` for a root of shares: a square root if halved once, a fourth root if twice.

    The root is computed by shifting the bits of a float. As an integer, they are its logarithm at powers of 2 and
    linear between them. Half of that integer is the bits of a number that grows like the square root but is linear from
    code to code. A position between two codes is therefore the same position between their values, and dither does not
    change the mean. (The lowest codes are more than a factor of 2 apart, and linear in the logarithm only: for second
    moments, those below 1e-7 of the largest.)
    """
    # So `end` would represent 64, and the largest code represents 63, which is a share of 1.
    root_end, share_end = (int(bits_as(torch.tensor(float(of)), torch.int32)) for of in (end, 64))
    to_root = root_end - (share_end >> halvings)

    def to_code(share: Tensor, dither: Dither) -> Tensor:
        root = bits_as(share.mul_(63), torch.int32).bitwise_right_shift_(halvings).add_(to_root)
        return bits_as(root, torch.float32).mul_(2**16).round_().add_(dither).div_(2**16).floor_()

    def to_share(code: Tensor) -> Tensor:
        share = bits_as(code.abs(), torch.int32).bitwise_left_shift_(halvings).sub_(to_root << halvings)
        return bits_as(share, torch.float32).div_(63).mul_(code.sign_())

    return Form(dtype, to_code, to_share, least=0 if dtype.is_signed else 1)


def _linear(dtype: torch.dtype, top: int, int4: bool = False) -> Form:
    """Return a form with codes from -`top` to `top` at equal distances."""

    def to_code(share: Tensor, dither: Dither) -> Tensor:
        return share.mul_(top << 16).round_().add_(dither).div_(2**16).floor_()

    return Form(dtype, to_code, lambda code: code.div_(top), int4)


LINEAR = _linear(torch.int8, TOP)
"""The form of CAME's momentum, whose values have similar magnitudes, since the updates that it averages do."""

INT4 = _linear(torch.uint8, 7, int4=True)
"""The form of CAME's and LARS's momentum in 4 bits. To the nearest code CAME lost 0.2% to 0.4% of its loss
(workbench/benchmarks/results/four-bits.json)."""

SIGNED = _root(torch.int8, 128, 1)
"""The form of LAMB's first moment and LARS's momentum, by its square root: codes are closer for smaller values."""

UNSIGNED = _root(torch.uint8, 256, 2)
"""The form of LAMB's second moment, by its fourth root."""

Forms = Mapping[str, Mapping[torch.dtype, Form]]
"""The forms of an algorithm's moments, by name and by the dtype of codes; a relative one follows its moment, and
the first moment is the last."""


def form_of(forms: Forms, name: str, state: Mapping[str, Tensor]) -> Form | None:
    """Return the form in which a moment of a parameter's state is stored, or None if it is stored as floats."""
    return forms[name].get(state[name].dtype) if f"{name}_scale" in state else None


def quantize(
    forms: Forms, name: str, values: Tensor, like: Mapping[str, Tensor], dither: Dither = NEAREST
) -> dict[str, Tensor]:
    """Return the stored form of a moment, by state name: rounded to its dtype, or as codes and scales.

    `like` has the state's dtypes and dims, and for a form that is relative the other moment as it is stored.
    """
    form = form_of(forms, name, like)
    if form is None:
        return {name: values.to(like[name].dtype)}
    if form.relative:
        root = _stored_root(forms, form, like, values)
        values = (values / root).masked_fill_(root == 0, 0.0)
    codes, scales = encode(values, form, dither, like[f"{name}_scale"].dim() - 1)
    return {name: codes, f"{name}_scale": scales}


def dequantize(forms: Forms, name: str, state: Mapping[str, Tensor], shape: torch.Size | None = None) -> Tensor:
    """Return a stored moment in a floating dtype, in the shape of its parameter, which packed codes do not have."""
    form = form_of(forms, name, state)
    values = state[name] if form is None else decode(state[name], state[f"{name}_scale"], form)
    if form is not None and form.relative:
        values.mul_(_stored_root(forms, form, state, values))
    return values if shape is None else values.view(shape)


def _stored_root(forms: Forms, form: Form, state: Mapping[str, Tensor], like: Tensor) -> Tensor:
    return dequantize(forms, form.relative, state).sqrt_().view(like.shape)


def never_written(form: Form, codes: Tensor) -> Tensor:
    """Return where codes have a value that no form has: the least number of their bits, where these are signed."""
    if codes.dtype == torch.int8:
        return codes == -128
    if form.int4:
        return (codes & 15 == 8) | (codes >> 4 == 8)
    return torch.zeros((), dtype=torch.bool)


def scales_shape(shape: Sequence[int], leading: int = 1) -> tuple[int, ...]:
    """Return the shape of the scales of values whose rows are indexed by the leading dims.

    Example:
        >>> scales_shape((64, 3, 7, 20)), scales_shape((64, 3, 7, 20), 3), scales_shape((5, 0)), scales_shape(())
        ((64, 2), (64, 3, 7, 1), (5, 0), (1, 1))
    """
    rows = tuple(shape[:leading]) or (1,)
    return *rows, -(-math.prod(shape[leading:]) // BLOCK)


def pack_int4(codes: Tensor) -> Tensor:
    """Return codes of 4 bits, integers in any dtype, two to a byte: `[rows, an even number]` to `[rows, half of it]`.

    Example:
        >>> pack_int4(torch.tensor([[1, -1, 7, 0]]))
        tensor([[241,   7]], dtype=torch.uint8)
    """
    low = codes.to(torch.int16) & 15
    return (low[..., ::2] | low[..., 1::2] << 4).to(torch.uint8)


def unpack_int4(codes: Tensor) -> Tensor:
    """Return the inverse of `pack_int4`, int8."""
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int8)
    return both.bitwise_xor_(8).sub_(8)


def encode(values: Tensor, form: Form = LINEAR, dither: Dither = NEAREST, leading: int = 1) -> tuple[Tensor, Tensor]:
    """Return codes, in the shape of `values` unless they are packed, and scales, float32 in the shape `scales_shape`.

    A linear value's error is at most 1/254 of its block's scale. A block of zeros has scale 0. A block that has a value
    beyond float32, an infinity or a NaN has scale NaN, and all of its values decode to NaN: the original values cannot
    be recovered, and a NaN is noticed.

    Example:
        >>> encode(torch.tensor([[1.0, -0.5, 0.0]]))
        (tensor([[127, -64,   0]], dtype=torch.int8), tensor([[1.]]))
        >>> encode(torch.tensor([[1.0, 0.0625, 1e-30]]), UNSIGNED)
        (tensor([[255, 128,   1]], dtype=torch.uint8), tensor([[1.]]))
    """
    shape, rows = scales_shape(values.shape, leading), _in_rows(values, leading)
    codes, scales = to_codes(rows, form, _in_rows(dither, leading) if isinstance(dither, Tensor) else dither)
    codes = _unblocked(codes, rows.shape)
    if form.int4:
        return pack_int4(codes).view(*shape[:-1], rows.shape[1] // 2), scales.view(shape)
    return codes.to(form.dtype).view(values.shape), scales.view(shape)


def to_codes(values: Tensor, form: Form, dither: Dither) -> tuple[Tensor, Tensor]:
    """Return codes in float32, `[rows, blocks of a row, BLOCK]`, and scales, of values in rows."""
    blocks = _blocks(values.to(torch.float32))
    del values
    codes = blocks.abs()
    scales = codes.amax(dim=-1)
    scales.masked_fill_(scales == math.inf, math.nan)
    # The shares of zeros and of values that are not finite are 0, since the conversion of a NaN is undefined.
    codes.div_(scales.unsqueeze(-1)).nan_to_num_(nan=0.0)
    codes = form.to_code(codes, _blocks(dither) if isinstance(dither, Tensor) else dither)
    del dither  # it is as large as the codes
    if form.least:
        codes.clamp_(min=form.least).mul_((blocks != 0).logical_and_(scales.unsqueeze(-1) > 0))
    return with_signs(codes, blocks), scales


def decode(codes: Tensor, scales: Tensor, form: Form = LINEAR) -> Tensor:
    """Return the values, float32 in the shape of the codes; the largest code gives exactly its block's scale.

    Example:
        >>> decode(torch.tensor([[127, -127, 0]], dtype=torch.int8), torch.tensor([[0.7]]))
        tensor([[ 0.7000, -0.7000,  0.0000]])
    """
    rows = _in_rows(codes, scales.dim() - 1)
    rows = unpack_int4(rows) if form.int4 else rows
    blocks = from_codes(_blocks(rows.to(torch.float32)), scales.flatten(0, -2), form)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if form.int4 else codes.shape
    return _unblocked(blocks, rows.shape).view(shape)


def from_codes(codes: Tensor, scales: Tensor, form: Form) -> Tensor:
    """Return the values of codes in float32, in blocks, in whose memory it computes."""
    # The share is computed first, so that no intermediate result overflows or underflows at any scale.
    return form.to_share(codes).mul_(scales.unsqueeze(-1))


CODES_AT_ONCE = 1 << 20
"""The codes that `expected_error` decodes at a time, in whole rows, since a moment as floats can be too large."""


def expected_error(codes: Tensor, scales: Tensor, form: Form) -> Tensor:
    """Return the norm of the error of rounding a moment to codes, relative to the moment's norm: 0-dim float64.

    It is the expectation for values that are evenly spread between codes and dithered: a sixth of the squared distance
    of two codes. A moment of zeros loses 0, one that is not finite NaN.

    Example:
        >>> codes, scales = encode(torch.tensor([[1.0, -0.5, 0.0, 0.25]]), INT4)
        >>> round(float(expected_error(codes, scales, INT4)), 3)
        0.098
    """
    codes, scales = _in_rows(codes, scales.dim() - 1), scales.flatten(0, -2)
    low, high = (-7, 7) if form.int4 else (-TOP, TOP) if form.dtype.is_signed else (0, 255)
    shares = form.to_share(torch.arange(low, high + 1, dtype=torch.float32, device=codes.device))
    squares = torch.gradient(shares)[0].square() / 6
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")
    rows = max(1, CODES_AT_ONCE * len(scales) // max(codes.numel(), 1))
    for part, scale in zip(torch.split(codes, rows), torch.split(scales, rows), strict=True):
        index = (unpack_int4(part) if form.int4 else part.int()).long() - low
        of_blocks = [_blocks(each[index]).sum(dim=-1) for each in (squares, shares.square())]
        sums += torch.stack([(each.double() * scale.double().square()).sum().cpu() for each in of_blocks])
    lost, whole = sums
    return torch.where(whole == 0, whole, (lost / whole).sqrt())  # NaN if a value is not finite


def _in_rows(values: Tensor, leading: int) -> Tensor:
    """Return values, or codes, as `[rows, elements or bytes of a row]`."""
    return values.reshape(math.prod(values.shape[:leading]), math.prod(values.shape[leading:]))


def _blocks(rows: Tensor) -> Tensor:
    """Return rows as `[rows, blocks of a row, BLOCK]`, with the last block of a row padded with zeros."""
    count, blocks = scales_shape(rows.shape)
    size = blocks * BLOCK
    whole = rows if rows.shape[1] == size else torch.nn.functional.pad(rows, (0, size - rows.shape[1]))
    return whole.view(count, blocks, BLOCK)


def _unblocked(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Return the inverse of `_blocks`, contiguous."""
    return blocks.flatten(1)[:, : shape[1]].reshape(shape)
