"""CAME as its specification: one tensor at a time, any floating dtype, any device, written to be read.

Symbols are those of Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", arXiv:2307.02047v2,
Algorithm 2; what it leaves open is as in came-pytorch 0.1.3. The lines tagged `CAME-...` stand under the same tag in
every backend. The averages of rows and columns are kept as means, as in came-pytorch, where the paper writes sums.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bighorn.kernels import codec
from bighorn.kernels.arithmetic import compute_dtype, norm
from bighorn.kernels.bucket import Bucket, CameOptions, Factor
from bighorn.kernels.reference.stepper import Stepper


class Came(Stepper[CameOptions]):
    """CAME for some buckets on one device."""

    def __init__(self, buckets: list[Bucket[CameOptions]]) -> None:
        super().__init__(buckets, came)


def came(
    x: Tensor, g: Tensor, state: dict[str, Tensor], t: Tensor, options: CameOptions
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Step `t` (from 1) of one tensor: the new x, its new state, and [RMS of u, its clip factor, mean confidence]."""
    o, (beta1, beta2, beta3), (eps1, eps2) = options, options.betas, options.eps
    dtype = compute_dtype(x)
    x = x.to(dtype)
    if x.numel() == 0:
        return x, state, torch.tensor([0.0, 1.0, 1.0], device=x.device)

    if o.maximize:
        g = -g
    if o.centre:
        g = g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)
    b2 = beta2 if o.decay_rate is None else 1 - t**-o.decay_rate

    q = g * g + eps1
    axis = 0 if o.factor is None else row_axis(x, o.factor)
    if o.factor is None:
        v = b2 * state["exp_avg_sq"] + (1 - b2) * q
        new_state = {"exp_avg_sq": v}
        u = g * v.rsqrt()  # CAME-u
    else:
        q_row, q_col = means(q, axis)
        row = b2 * state["exp_avg_sq_row"] + (1 - b2) * q_row  # CAME-row
        col = b2 * state["exp_avg_sq_col"] + (1 - b2) * q_col  # CAME-col
        new_state = {"exp_avg_sq_row": row, "exp_avg_sq_col": col}
        r, c = rsqrt_factors(row, col, axis)
        u = g * r * c  # CAME-u
    rms_u = rms(u)
    excess = (rms_u / o.clip_threshold).clamp(min=1)
    u = u / excess.to(dtype)  # CAME-clip

    m = beta1 * stored(state).to(dtype) + (1 - beta1) * u  # CAME-m
    new_state |= rounded(m, state["exp_avg"].dtype)
    # From here on the average as it is stored, in the residual too, so that every backend may read it back.
    m = stored(new_state).to(dtype)

    confidence = torch.ones_like(m)
    if o.factor is not None:
        w_row, w_col = means((u - m) ** 2 + eps2, axis)
        row = beta3 * state["exp_avg_res_row"] + (1 - beta3) * w_row  # CAME-res
        col = beta3 * state["exp_avg_res_col"] + (1 - beta3) * w_col  # CAME-res
        new_state |= {"exp_avg_res_row": row, "exp_avg_res_col": col}
        correction = (1 - beta3**t).to(dtype) if o.bias_correction else 1.0
        r, c = rsqrt_factors(row / correction, col / correction, axis)
        confidence = r * c

    lr = o.lr * rms(x).clamp(min=o.scale_eps) if o.scale_parameter else o.lr
    x = x - lr * o.weight_decay * x
    x = x - lr * m * confidence  # CAME-x
    figures = torch.stack([rms_u, 1 / excess, confidence.mean().to(rms_u.dtype)])
    return x, new_state, figures


def row_axis(x: Tensor, factor: Factor) -> int:
    """The dim (from the end) that counts the rows of a matrix; those behind it are its columns, those before it batch.

    Example:
        >>> x = torch.zeros(64, 3, 7, 7)
        >>> row_axis(x, "matrix"), row_axis(x, "last_two")
        (-4, -2)
    """
    return -x.dim() if factor == "matrix" else -2


def means(a: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The mean of each row and of each column."""
    return a.mean(dim=tuple(range(axis + 1, 0))), a.mean(dim=axis)


def rsqrt_factors(row: Tensor, col: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Factors r and c whose product is 1 / sqrt(row col / mean(row)) in the shape of the parameter."""
    r = (row / row.mean(dim=-1, keepdim=True)).rsqrt()
    return r.view(*r.shape, *[1] * (-axis - 1)), col.rsqrt().unsqueeze(axis)


def rms(a: Tensor) -> Tensor:
    """The root of the mean square of all elements, 0-dim float64."""
    return norm(a) / math.sqrt(a.numel())


def rounded(m: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The average as it is stored, under its names: in a floating dtype, or in int8 with a scale for each block."""
    if dtype == torch.int8:
        codes, scales = codec.encode(m)
        return {"exp_avg": codes, "exp_avg_scale": scales}
    return {"exp_avg": m.to(dtype)}


def stored(state: dict[str, Tensor]) -> Tensor:
    """The average as it was stored, in a floating dtype."""
    m = state["exp_avg"]
    return codec.decode(m, state["exp_avg_scale"]) if m.dtype == torch.int8 else m
