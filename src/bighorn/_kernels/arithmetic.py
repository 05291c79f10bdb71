"""Dtypes, counts and conditional writes of the backends in plain torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def write(out: Tensor, value: Tensor, apply_mask: Tensor | None) -> None:
    """Store `value`, rounded to the dtype of `out`, unless `apply_mask` is False."""
    out.copy_(value if apply_mask is None else torch.where(apply_mask, value.to(out.dtype), out))


PAST_COUNTING = 1.5 * 2.0**-24
"""A float32 above 2^24 that grows by this fraction of itself becomes the next float32."""

LEAST_NORM = 2.0**-80
"""A smaller norm of an update counts as 0.

Where all gradients of a layer stop, its first moment fades. Below 2^-110 the ratio of norms could overflow float32, and
infinity times 0 is NaN; in bfloat16 the moment stays at 4 times the least number, 2^-131, which eps has divided: the
ratio would make steps of full size of it for ever.
"""


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


def rsqrt_of_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 / sqrt(a / b), also if the ratio underflows: for a row of zeros beside large ones it is 1e-42."""
    ratio = a / b
    return torch.where(ratio < torch.finfo(ratio.dtype).tiny, b.sqrt() * a.rsqrt(), ratio.rsqrt())


def one_minus_power(beta: float, t: Tensor) -> Tensor:
    """Return 1 - beta^t; in float32 the difference itself would be 0.1% off for beta 0.9999 at the first step."""
    return one_minus_powers([beta], t)[0]


def one_minus_powers(betas: Sequence[float], t: Tensor) -> list[Tensor]:
    """Return `one_minus_power` of each beta, in as many calls as of one."""
    powers = torch._foreach_mul([t] * len(betas), [math.log(beta) if beta else -math.inf for beta in betas])
    torch._foreach_expm1_(powers)
    torch._foreach_neg_(powers)
    return list(powers)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: the parameter's, but at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def bits_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of `x` as float32 or int32, without a copy where the device has memory to view."""
    return _xla_bitcast()(x, to_type=XLA_NAMES[dtype]) if x.device.type == "xla" else x.view(dtype)


def with_signs(magnitudes: Tensor, of: Tensor) -> Tensor:
    """Return magnitudes, in their memory, with the signs of other numbers; torch_xla 2.9 has no copysign."""
    return magnitudes.mul_(of.sign()) if of.device.type == "xla" else magnitudes.copysign_(of)


XLA_NAMES = {torch.float32: "f32", torch.int32: "s32"}


@functools.cache
def _xla_bitcast() -> Any:
    """Return XLA's own cast: torch_xla 2.9 computes a view in another dtype on the host, which ends the graph."""
    from torch_xla.core.xla_op_registry import register

    return register("bitcast", lambda x, to_type: x.bitcast(to_type))
