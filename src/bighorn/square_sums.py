"""Sums of squares and the norms from them: in float64, or where a device has none, in float32 at two scales."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bighorn.capabilities import capabilities, wide

SCALES = (2.0**40, 2.0**-64)
"""Where a device has no float64, a sum of squares is two sums in float32: those of x times each of these.

They add up like one sum, over tensors and over ranks. The first overflows for norms above 2^24, and the second has full
precision there. Elements below 2^-103, about 1e-31, vanish in both; norms are right up to the end of float32.
"""


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares of all elements: 0-dim float64, or `[2]` float32 by :data:`SCALES`."""
    if wide(x.device) == torch.float64:  # a sum in pairs, more accurate than a norm of many elements
        return x.to(torch.float64).square().sum()
    return square_sums([x], x.device)[0]


def square_sums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of each tensor: `[tensors]` in float64, or `[tensors, 2]` by :data:`SCALES`."""
    if not tensors:
        return no_square_sums(0, device=device)
    if wide(device) == torch.float64:
        if not capabilities(device).float64_norms:
            tensors = [tensor.to(torch.float64) for tensor in tensors]
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()
    scaled = (torch._foreach_mul([tensor.float() for tensor in tensors], scale) for scale in SCALES)
    return torch.stack([torch.stack(torch._foreach_norm(each)) for each in scaled], dim=-1).square()


def no_square_sums(*shape: int, device: torch.device) -> Tensor:
    """Return sums of squares that are 0, of this shape before that of one sum."""
    one = () if wide(device) == torch.float64 else (len(SCALES),)
    return torch.zeros((*shape, *one), dtype=wide(device), device=device)


def root(square_sums: Tensor) -> Tensor:
    """Return the norms: the roots of sums of squares, in float64 or float32."""
    roots = square_sums.sqrt()
    if roots.dtype == torch.float64:
        return roots
    small, large = roots.unbind(dim=-1)
    return torch.where(small < math.inf, small / SCALES[0], large / SCALES[1])


def square_sum_on(device: torch.device, sum_there: Tensor) -> Tensor:
    """Return a sum of squares on a device where it has the other form."""
    return square_sum(root(sum_there).float().to(device))
