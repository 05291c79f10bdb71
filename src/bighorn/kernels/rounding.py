"""Weights in 16 bits: what a stored parameter stands for, and how a new value is stored in it.

Arithmetic is in float32 and storing rounds. To the nearest, a step of less than half an ulp is lost, each time anew.
The other ways lose nothing, on average ("stochastic") or at all:

* "kahan" keeps what rounding cut off, in int16, as the difference of two float32s' bit patterns. 16 bits are all that
  bfloat16 lacks, so the two together are float32, but for one of its ulps at ties. A compensation in bfloat16, as is
  usual, has 8 bits, and itself loses what is smaller than they are. The difference is at most half an ulp of whatever
  the parameter is, so who writes the parameter is heard.
* "master" keeps the float32 itself. Where the parameter is not its rounding any more, somebody else has written the
  parameter, and that counts. So masters can start as zeros.

Random bits are a hash of a seed, the step, the parameter and the element's place in it, so every backend draws the
same, whatever the threads and shards it runs on, and there is no generator whose state could be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from bighorn.kernels.arithmetic import compute_dtype

Rounding = Literal["nearest", "stochastic", "kahan", "master"]
ROUNDING_MODES: tuple[Rounding, ...] = get_args(Rounding)

LOW = (torch.bfloat16, torch.float16)
"""The dtypes of parameters that can be stored in another way than the nearest."""

DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""The bits of a float32 that the dtype lacks, above float16's subnormals."""

SMALLEST_NORMAL = 2.0**-14
"""Of float16. What is smaller has the spacing of what lies just above it."""

WORD = 0xFFFFFFFF


AUX_STATE: Mapping[str, Mapping[str, torch.dtype]] = {
    "nearest": {},
    "stochastic": {},
    "kahan": {"compensation": torch.int16},
    "master": {"master": torch.float32},
}
"""The state that a rounding mode adds, in the shape and memory order of the parameter, with its dtypes."""


def load_weight(x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
    """What a parameter stands for, in the dtype of the arithmetic; `x` itself where that is what it is."""
    value = x.to(compute_dtype(x))
    if "compensation" in kept:
        shift = raised(value, x.dtype)
        near = value + shift
        # A bfloat16 that a program has set to 0 keeps its compensation, and bits below those of 0 are NaN.
        lost = torch.where(near == 0, 0, kept["compensation"])
        return (near.view(torch.int32) + lost).view(torch.float32) - shift
    if "master" in kept:
        return torch.where(kept["master"].to(x.dtype) == x, kept["master"], value)
    return value


def store_weight(value: Tensor, dtype: torch.dtype, rounding: Rounding, bits: Tensor | None) -> dict[str, Tensor]:
    """What is stored for a value: the parameter under "x", and what is kept beside it.

    Args:
        value: In the dtype of the arithmetic.
        dtype: The parameter's.
        rounding: The way.
        bits: From `random_bits`, in the shape of `value`, for "stochastic".
    """
    if rounding == "stochastic" and bits is not None:
        return {"x": stochastic(value, dtype, bits)}
    x = value.to(dtype)
    if rounding == "kahan":
        near = x.to(torch.float32)
        shift = raised(near, dtype)
        lost = (value + shift).view(torch.int32) - (near + shift).view(torch.int32)
        lost = torch.where(near.isfinite(), lost, 0).clamp(-(2**15), 2**15 - 1)
        return {"x": x, "compensation": lost.to(torch.int16)}
    return {"x": x, "master": value} if rounding == "master" else {"x": x}


def raised(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What takes a number to where the bits that its dtype lacks are float32's last `DROPPED` ones: mostly 0."""
    if dtype != torch.float16:
        return torch.zeros_like(x)
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.full_like(x, SMALLEST_NORMAL).copysign(x), 0)


def stochastic(value: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """One of the two neighbours in a 16-bit dtype, each as likely as the value is near it.

    Args:
        value: Float32.
        dtype: bfloat16 or float16.
        bits: 32 random ones for each element, int64; the upper ones are used, as many as the dtype lacks.

    Example:
        >>> third = torch.full((4,), 1 + 2**-7 / 4)  # a quarter of the way from 1 to its neighbour 1.0078125
        >>> stochastic(third, torch.bfloat16, torch.tensor([0, 1, 2, 3]) << 30)
        tensor([1.0000, 1.0000, 1.0000, 1.0078], dtype=torch.bfloat16)
    """
    dropped = DROPPED[dtype]
    shift = raised(value, dtype)
    # A float's magnitude is in the order of its bits: adding to them and cutting off carries as it must.
    moved = ((value + shift).view(torch.int32) + (bits >> (32 - dropped)).to(torch.int32)) & -(1 << dropped)
    return torch.where(value.isfinite(), moved.view(torch.float32) - shift, value).to(dtype)


def rng_key(seed: int, number: int) -> int:
    """What the random bits of a parameter start from, 32 bits: a seed of up to 64, and the parameter's number."""
    return _mix_int((seed & WORD) ^ _mix_int((seed >> 32) ^ _mix_int(number)))


def random_bits(key: Tensor | int, t: Tensor, index: Tensor) -> Tensor:
    """32 random bits, in int64, for elements of a parameter at step `t`.

    Args:
        key: From `rng_key`.
        t: The step, from 1, in any dtype; it broadcasts with `index`.
        index: The positions of the elements in their parameter, int64.
    """
    at_step = _mix((key + t.to(torch.int64)) & WORD)
    return _mix((index & WORD) ^ _mix((at_step + (index >> 32)) & WORD))


def dither(key: Tensor | int, t: Tensor, index: Tensor) -> Tensor:
    """16 bits, in int64, that are as even as random ones are not, in the arguments of `random_bits`.

    Places on a circle, one step around it further for each element and another for each t, so that neither neighbours
    nor steps that follow one another leave out a part of it: less noise adds up than of random numbers.
    """
    return ((key + t.to(torch.int64) * 0x9E3779B9 + (index & WORD) * 0xC13FA9A9) & WORD) >> 16


def positions(size: Sequence[int], offset: Sequence[int], whole: Sequence[int], device: torch.device) -> Tensor:
    """The position of each element in a tensor of the shape `whole`, counted along its rows, for a box in it; int64.

    Args:
        size: Of the box.
        offset: Where in the tensor it begins.
        whole: The tensor's shape.
        device: Where the positions are needed.

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
    """A permutation of 32 bits in which each bit of the result hangs on all: lowbias32, by Chris Wellons (2018)."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & WORD
    h = ((h ^ (h >> 15)) * 0x846CA68B) & WORD
    return h ^ (h >> 16)


def _mix_int(h: int) -> int:
    return int(_mix(torch.tensor(h & WORD)))
