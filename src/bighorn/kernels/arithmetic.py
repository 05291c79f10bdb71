"""Dtypes, norms and conditional writes of the backends in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bighorn.capabilities import wide


def write(out: Tensor, value: Tensor, apply_mask: Tensor | None) -> None:
    """Store `value`, rounded to the dtype of `out`, unless `apply_mask` is False."""
    out.copy_(value if apply_mask is None else torch.where(apply_mask, value.to(out.dtype), out))


PAST_COUNTING = 1.5 * 2.0**-24
"""A float32 above 2^24 that grows by this fraction of itself becomes the next float32."""


def count_step(counts: list[Tensor], apply_mask: Tensor | None) -> None:
    """Count a step: by 1 up to 2^24, and to the next float32 above, where float32 does not represent every integer.

    A count that did not change would give the same random bits at every step, so that some weights would never change.
    """
    if not counts:
        return
    growth = torch._foreach_mul(counts, PAST_COUNTING)
    torch._foreach_clamp_min_(growth, 1.0)
    if apply_mask is not None:  # a list, because on CUDA the host would wait for a single tensor (torch 2.11)
        torch._foreach_mul_(growth, [apply_mask.to(growth[0].dtype)] * len(growth))
    torch._foreach_add_(counts, growth)


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


def square_sum_on(device: torch.device, square_sum: Tensor) -> Tensor:
    """Return the sum of squares of one tensor on another device, in the form that it has there."""
    if square_sum.dtype == wide(device):
        return square_sum.to(device)
    return square_sums([root(square_sum).float().to(device)], device)[0]


def rsqrt_of_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 / sqrt(a / b), also if the ratio underflows: for a row of zeros beside large ones it is 1e-42."""
    ratio = a / b
    return torch.where(ratio < torch.finfo(ratio.dtype).tiny, b.sqrt() * a.rsqrt(), ratio.rsqrt())


def one_minus_power(beta: float, t: Tensor) -> Tensor:
    """Return 1 - beta^t; in float32 the difference itself would be 0.1% off for beta 0.9999 at the first step."""
    return torch.ones_like(t) if beta == 0 else -torch.expm1(t * math.log(beta))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: at least float32, whatever the parameter's dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
