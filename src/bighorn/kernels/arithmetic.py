"""Dtypes, norms and conditional writes: what the backends in plain torch share."""

from __future__ import annotations

import torch
from torch import Tensor


def write(out: Tensor, value: Tensor, apply_mask: Tensor | None) -> None:
    """Store `value`, rounded to the dtype of `out`."""
    out.copy_(value if apply_mask is None else torch.where(apply_mask, value.to(out.dtype), out))


PAST_COUNTING = 1.5 * 2.0**-24
"""A float32 above 2^24 that grows by this part of itself becomes the next float32."""


def count_step(counts: list[Tensor], apply_mask: Tensor | None) -> None:
    """Count a step: by 1 up to 2^24, from where on float32 does not hold every integer, to the next float32.

    A count that stands still would draw the same random bits at every step, so that some weights never move.
    """
    if not counts:
        return
    growth = torch._foreach_mul(counts, PAST_COUNTING)
    torch._foreach_clamp_min_(growth, 1.0)
    if apply_mask is not None:  # as a list, since the host would wait for a tensor alone on CUDA (torch 2.11)
        torch._foreach_mul_(growth, [apply_mask.to(growth[0].dtype)] * len(growth))
    torch._foreach_add_(counts, growth)


def square_sum(x: Tensor) -> Tensor:
    """The sum of squares of all elements, 0-dim, in float64: squares neither overflow nor vanish."""
    return x.to(wide(x)).square().sum()


def square_sums(tensors: list[Tensor], like: Tensor) -> Tensor:
    """The sum of squares of each tensor, `[tensors]`, in float64."""
    sums = [square_sum(tensor) for tensor in tensors]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=wide(like), device=like.device)


def rsqrt_of_ratio(a: Tensor, b: Tensor) -> Tensor:
    """1 / sqrt(a / b), also where the ratio is too small: of a row of zeros beside large ones it is 1e-42."""
    ratio = a / b
    return torch.where(ratio < torch.finfo(ratio.dtype).tiny, b.sqrt() * a.rsqrt(), ratio.rsqrt())


def compute_dtype(x: Tensor) -> torch.dtype:
    """At least float32, whatever the parameter's dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> torch.dtype:
    """The dtype for norms and for powers of beta: float64, but on Apple's GPUs, which have none."""
    return torch.float32 if x.device.type == "mps" else torch.float64
