"""LARS as its specification: one tensor at a time, any floating dtype, any device, written for readers.

Symbols follow You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888v3,
Algorithm 1. The lines tagged `LARS-...` have the same tag in every backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bighorn._kernels.arithmetic import LEAST_NORM
from bighorn._kernels.bucket import Shard
from bighorn._kernels.codec import Dither, dequantize, quantize
from bighorn._kernels.options import LarsOptions
from bighorn._kernels.reference.stepper import Rule, Stepper
from bighorn._square_sums import root, square_sum


def lars(
    x: Tensor, g: Tensor, state: dict[str, Tensor], t: Tensor, dither: Dither, options: LarsOptions, shard: Shard
) -> Rule:
    """Make one step of one tensor: the new x, its new state, and [weight norm, update norm, trust ratio]."""
    del t, shard
    o, dtype = options, x.dtype

    if o.maximize:
        g = -g
    u = g + o.weight_decay * x if o.weight_decay != 0 else g  # LARS-u

    weight_sum, norm_sum = yield [square_sum(x), square_sum(g if o.denominator == "sum" else u)]
    weight_norm, update_norm, q = trust_ratio(weight_sum, norm_sum, o)

    before, after = (o.lr * q, 1.0) if o.lr_in_momentum else (q, o.lr)
    u = before.to(dtype) * u
    m = o.momentum * dequantize(o.forms, "exp_avg", state, u.shape).to(dtype) + u  # LARS-m
    new_state = quantize(o.forms, "exp_avg", m, state, dither)
    m = dequantize(o.forms, "exp_avg", new_state, u.shape).to(
        dtype
    )  # as it is stored, so that every backend may read it back
    x = x - after * (u + o.momentum * m if o.nesterov else m)  # LARS-x
    return x, new_state, torch.stack([weight_norm, update_norm, q])


def trust_ratio(weight_sum: Tensor, norm_sum: Tensor, options: LarsOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return ||x||, the denominator, and the step size of a layer relative to its learning rate, of any shape.

    Args:
        weight_sum: The sum of squares of x.
        norm_sum: The sum of squares of the gradient; with its decay for `denominator="joint"`.
        options: The options of the bucket.
    """
    o = options
    weight_norm, norm = root(weight_sum), root(norm_sum)
    update_norm = norm + o.weight_decay * weight_norm if o.denominator == "sum" else norm
    q = o.trust_coefficient * weight_norm / (update_norm + o.eps)  # LARS-q
    q = q.masked_fill((weight_norm == 0) | (norm < LEAST_NORM), 1.0)
    if o.trust_clip:
        q = torch.where(q >= o.lr, torch.ones_like(q), q / o.lr)
    return weight_norm, update_norm, q if o.adapt else torch.ones_like(q)


class Lars(Stepper[LarsOptions]):
    """LARS for some buckets on one device."""

    rule = staticmethod(lars)
