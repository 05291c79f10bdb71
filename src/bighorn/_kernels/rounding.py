"""Weights in 16 bits: the values that stored parameters stand for, and the rounding of new values.

Arithmetic is in float32, and storing rounds. With rounding to the nearest, a step of less than half an ulp is lost,
each time anew. The other modes lose nothing, on average ("stochastic") or at all:

* "kahan" keeps the bits that rounding cut off, in int16, as the difference of two float32s' bit patterns. bfloat16
  lacks just 16 bits, so the two together are float32, except for one of its ulps at ties. A compensation in bfloat16,
  as is usual, has 8 bits, and itself loses smaller values. The difference is at most half an ulp of the parameter, so
  that a value that a program writes into the parameter takes effect.
* "kahan8" keeps the upper 8 of these bits, in int8, and loses steps of less than 2^-17 of a bfloat16 weight.
* "master" keeps the float32 value. If the parameter is no longer the rounding of its master, a program has written the
  parameter, and the parameter's value is used. Masters can therefore start as zeros.

Random bits are a hash of a seed, the step, the parameter and the element's position in it. Every backend therefore uses
the same bits, with any number of threads and shards, and there is no generator whose state could be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from bighorn._kernels.arithmetic import bits_as, compute_dtype

Rounding = Literal["nearest", "stochastic", "kahan", "kahan8", "master"]
ROUNDING_MODES: tuple[Rounding, ...] = get_args(Rounding)

LOW = (torch.bfloat16, torch.float16)
"""The dtypes of parameters that can be stored with another rounding mode than the nearest."""

DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""The bits of a float32 that the dtype lacks, above float16's subnormals."""

SMALLEST_NORMAL = 2.0**-14
"""Float16's smallest normal number. Smaller numbers have the same spacing as those just above it."""

SMALLEST_NORMAL_BITS, SIGN_BIT = 0x38800000, -(1 << 31)  # of float32, as int32

WORD = 0xFFFFFFFF


AUX_STATE: Mapping[str, Mapping[str, torch.dtype]] = {
    "nearest": {},
    "stochastic": {},
    "kahan": {"compensation": torch.int16},
    "kahan8": {"compensation": torch.int8},
    "master": {"master": torch.float32},
}
"""The state that a rounding mode adds, in the shape and memory order of the parameter, with its dtypes."""


def load_weight(x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
    """Return the value that a parameter stands for, in the dtype of the arithmetic; `x` itself if it is equal."""
    if "master" in kept:
        same = kept["master"].to(x.dtype) == x
        value = x.to(torch.float32)
        return torch.where(same, kept["master"], value, out=value)
    value = x.to(compute_dtype(x))
    if "compensation" in kept:
        shift = raised(value, x.dtype)
        near = value.add_(shift)
        # A bfloat16 that a program has set to 0 keeps its compensation, and the bit patterns below 0's are NaN.
        lost = recoded(kept["compensation"], torch.int16, x.dtype).masked_fill(near == 0, 0)
        return bits_as(bits_as(near, torch.int32).add_(lost), torch.float32).sub_(shift)
    return value


def store_weight(value: Tensor, dtype: torch.dtype, rounding: Rounding, bits: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors to store for a value: the parameter under "x", and its aux state.

    Args:
        value: In the dtype of the arithmetic. Its memory may be overwritten.
        dtype: The dtype of the parameter.
        rounding: The rounding mode.
        bits: From `random_bits`, in the shape of `value`, for "stochastic". Their memory may be overwritten.
    """
    if rounding == "stochastic" and bits is not None:
        return {"x": stochastic(value, dtype, bits)}
    x = value.to(dtype)
    if rounding == "kahan":
        infinite = x.isfinite().logical_not_()
        near = x.to(torch.float32)
        shift = raised(near, dtype)
        lost = bits_as(value.add_(shift), torch.int32).sub_(bits_as(near.add_(shift), torch.int32))
        lost.masked_fill_(infinite, 0).clamp_(-(2**15), 2**15 - 1)
        del near
        return {"x": x, "compensation": lost.to(torch.int16)}
    if rounding == "kahan8":
        return _with_8_bits(value, dtype)
    return {"x": x, "master": value} if rounding == "master" else {"x": x}


def _with_8_bits(value: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    unit, half, shift = DROPPED[dtype] - 8, 1 << (DROPPED[dtype] - 1), raised(value, dtype)
    bits = ((bits_as(value + shift, torch.int32) + (1 << (unit - 1))) >> unit) << unit
    # A half is rounded up, so that the lost part of a bfloat16 is -128 to 127 of its units.
    near = (bits_as((bits + half) & -2 * half, torch.float32) - shift).copysign(value)
    x = torch.where(value.isfinite(), near, value).to(dtype)
    above = raised(x.to(torch.float32), dtype)
    lost = bits_as(bits_as(bits, torch.float32) - shift + above, torch.int32)
    lost = (lost - bits_as(x.to(torch.float32) + above, torch.int32)) >> unit
    return {"x": x, "compensation": torch.where(x.isfinite(), lost, 0).clamp(-128, 127).to(torch.int8)}


def recoded(compensation: Tensor, kept: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return a compensation of a parameter of `dtype` as "kahan" (int16) or "kahan8" (int8) keeps it.

    Example:
        >>> recoded(torch.tensor([3, -128], dtype=torch.int8), torch.int16, torch.bfloat16)
        tensor([   768, -32768], dtype=torch.int16)
    """
    unit = DROPPED[dtype] - 8
    if compensation.dtype == kept:
        return compensation
    if kept == torch.int16:
        return compensation.to(kept) << unit
    return ((compensation.to(torch.int32) + (1 << (unit - 1))) >> unit).clamp(-128, 127).to(kept)


def raised(x: Tensor, dtype: torch.dtype) -> Tensor | float:
    """Return the addend after which the dtype lacks exactly float32's last `DROPPED` bits: mostly 0."""
    if dtype != torch.float16:
        return 0.0
    normal = bits_as(x, torch.int32) & SIGN_BIT | SMALLEST_NORMAL_BITS
    return torch.where(x.abs() < SMALLEST_NORMAL, bits_as(normal, torch.float32), 0)


def stochastic(value: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Return one of the two neighbours in a 16-bit dtype, each more likely the nearer it is; the mean is the value.

    Args:
        value: Float32.
        dtype: bfloat16 or float16.
        bits: 32 random bits for each element, int64 or int32; the upper ones are used, as many as the dtype lacks. They
            are overwritten.

    Example:
        >>> third = torch.full((4,), 1 + 2**-7 / 4)  # a quarter of the way from 1 to its neighbour 1.0078125
        >>> stochastic(third, torch.bfloat16, torch.tensor([0, 1, 2, 3]) << 30)
        tensor([1.0000, 1.0000, 1.0000, 1.0078], dtype=torch.bfloat16)
    """
    dropped = DROPPED[dtype]
    shift, not_a_number = raised(value, dtype), value != value
    moved = bits.bitwise_right_shift_(32 - dropped).bitwise_and_((1 << dropped) - 1).to(torch.int32)
    # A float's magnitude is in the order of its bits, so adding to the bits and cutting them off carries correctly.
    moved.add_(bits_as(value + shift if isinstance(shift, Tensor) else value, torch.int32)).bitwise_and_(
        -(1 << dropped)
    )
    rounded = bits_as(moved, torch.float32).sub_(shift).to(dtype)
    return rounded.masked_fill_(not_a_number, math.nan)


@lru_cache(1 << 16)
def rng_key(seed: int, number: int) -> int:
    """Return the 32-bit key of a parameter's random bits, from a seed of up to 64 bits and the parameter's id."""
    return _mix_int((seed & WORD) ^ _mix_int((seed >> 32) ^ _mix_int(number)))


def random_bits(key: Tensor | int, t: Tensor, index: Tensor) -> Tensor:
    """Return 32 random bits, in int64, for elements of a parameter at step `t`.

    Args:
        key: From `rng_key`.
        t: The step, from 1, in any dtype; it broadcasts with `index`.
        index: The positions of the elements in their parameter, int64.
    """
    at_step = _mix((key + t.to(torch.int64)) & WORD)
    return _mix((index & WORD) ^ _mix((at_step + (index >> 32)) & WORD))


def dither(key: Tensor | int, t: Tensor, index: Tensor) -> Tensor:
    """Return 16 bits, in int64, that are more evenly spread than random ones; the arguments are as for `random_bits`.

    The bits are positions on a circle, which advance by one step for each element and by another step for each t, so
    that neither neighbours nor consecutive steps leave out a part of the circle. Less noise adds up than from random
    numbers.
    """
    return ((key + t.to(torch.int64) * 0x9E3779B9 + (index & WORD) * 0xC13FA9A9) & WORD) >> 16


def random_bits_of_runs(key: Tensor, t: Tensor, first: Tensor, start: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return `random_bits` in int32, which takes half of the memory, for runs of consecutive elements.

    Args:
        key: The key of each run's parameter, int64, as are the next three.
        t: The step of each.
        first: The position of each run's first element in its parameter. No run crosses a multiple of 2^32.
        start: The same in the result.
        sizes: The number of elements of each.
    """
    of_run = _mix((_mix((key + t) & WORD) + (first >> 32)) & WORD)
    index = torch.arange(sum(sizes), dtype=torch.int32, device=key.device)
    index.add_(spread(short(first - start), sizes)).bitwise_xor_(spread(short(of_run), sizes))
    # As `_mix`, where products wrap around, and the sign is not shifted in. torch_xla divides for `>>`, towards 0.
    index.bitwise_xor_(index.bitwise_right_shift(16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    index.bitwise_xor_(index.bitwise_right_shift(15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return index.bitwise_xor_(index.bitwise_right_shift(16).bitwise_and_(0xFFFF))


def dither_of_runs(key: Tensor, t: Tensor, sizes: Sequence[int], further: tuple[Tensor, Tensor]) -> Tensor:
    """Return `dither` in int32, `[runs, elements of each]`, of several parameters with some runs of elements each.

    Args:
        key: The key of each parameter, int64.
        t: The step of each, int64.
        sizes: The number of runs of each.
        further: What `dither_along` returns for the first positions of all runs, and for those within each run.
    """
    starts = spread(key + t * 0x9E3779B9, sizes) + further[0]
    return (short(starts).unsqueeze(1) + further[1]).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def dither_along(index: Tensor) -> Tensor:
    """Return what positions add to `dither`, before it is cut to 16 bits."""
    return short((index & WORD) * 0xC13FA9A9)


def short(numbers: Tensor) -> Tensor:
    """Return the lower 32 bits of numbers in int64, as int32.

    Example:
        >>> short(torch.tensor([5, 0xFFFFFFFF]))
        tensor([ 5, -1], dtype=torch.int32)
    """
    return numbers.to(torch.int32)


def spread(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Repeat each value by its size; torch_xla computes repeat_interleave() on the host."""
    return torch.cat([value.expand(size) for value, size in zip(values.unbind(), sizes, strict=True)])


def positions(size: Sequence[int], offset: Sequence[int], whole: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of each element of a box in a tensor of the shape `whole`, counted along its rows; int64.

    Args:
        size: The shape of the box.
        offset: The first index of the box in the tensor, per dim.
        whole: The tensor's shape.
        device: The device of the result.

    Example:
        >>> positions((2, 2), (1, 1), (3, 4), torch.device("cpu"))
        tensor([[ 5,  6],
                [ 9, 10]])
    """
    index = torch.zeros([1] * len(whole), dtype=torch.int64, device=device)
    for dim, (count, start) in enumerate(zip(size, offset, strict=True)):
        along = torch.arange(start, start + count, device=device) * math.prod(whole[dim + 1 :])
        index = index + along.view([-1 if i == dim else 1 for i in range(len(whole))])
    return index


def _mix(h: Tensor) -> Tensor:
    """Return a permutation of 32 bits, each of which depends on all bits of `h`: lowbias32, by Chris Wellons (2018)."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & WORD
    h = ((h ^ (h >> 15)) * 0x846CA68B) & WORD
    return h ^ (h >> 16)


def _mix_int(h: int) -> int:
    return int(_mix(torch.tensor(h & WORD)))
