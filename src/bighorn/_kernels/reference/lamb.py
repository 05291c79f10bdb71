"""LAMB as its specification: one tensor at a time, any floating dtype, any device, written for readers.

Symbols follow You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
arXiv:1904.00962v5, Algorithm 2. The lines tagged `LAMB-...` have the same tag in every backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bighorn._kernels.arithmetic import LEAST_NORM, one_minus_powers
from bighorn._kernels.bucket import Shard
from bighorn._kernels.codec import Dither, dequantize, quantize
from bighorn._kernels.options import Bounds, LambOptions
from bighorn._kernels.reference.stepper import Rule, Stepper
from bighorn._square_sums import inner, product_sums, root, square_sum


def lamb(
    x: Tensor, g: Tensor, state: dict[str, Tensor], t: Tensor, dither: Dither, options: LambOptions, shard: Shard
) -> Rule:
    """Make step `t` (from 1) of one tensor: the new x, its new state, and [weight norm, update norm, trust ratio]."""
    o, (beta1, beta2) = options, options.betas
    dtype = x.dtype

    if o.maximize:
        g = -g
    if o.decay_mode == "l2" and o.weight_decay != 0:
        g = g + o.weight_decay * x

    beta3 = 1 - beta1 if o.grad_averaging else 1.0
    m = beta1 * dequantize(o.forms, "exp_avg", state, g.shape).to(dtype) + beta3 * g  # LAMB-m
    v = dequantize(o.forms, "exp_avg_sq", state).to(dtype)
    v = v + g * g if o.second_moment == "adagrad" else beta2 * v + (1 - beta2) * g * g  # LAMB-v
    # From here on the moments are used as they are stored, so that every backend may read them back.
    new_state = quantize(o.forms, "exp_avg_sq", v, state, dither)
    new_state |= quantize(o.forms, "exp_avg", m, {**state, **new_state}, dither)  # m may be relative to v
    m, v = (dequantize(o.forms, name, new_state, g.shape).to(dtype) for name in ("exp_avg", "exp_avg_sq"))
    if o.second_moment == "amsgrad":
        v = torch.maximum(state["max_exp_avg_sq"].to(dtype), v)
        new_state |= quantize(o.forms, "max_exp_avg_sq", v, state)

    correction1, correction2, lr_correction = bias_corrections(t, o)
    r = m / (correction1 * (v.sqrt() / correction2.sqrt() + o.eps))  # m / correction1 and v / correction2 can overflow
    if o.cautious:
        mask = (m * g.sign() > 0).to(dtype)  # m has the sign of r, and m * g can underflow
        (kept,) = yield [mask.sum()]
        r = r * mask / (kept / shard.numel).clamp(min=1e-3)
    if o.decay_mode == "decoupled":
        x = x * (1 - o.lr * o.weight_decay)
    u = r + o.weight_decay * x if o.decay_mode == "ratio" else r  # LAMB-u

    products = [product_sums([x], [u], x.device)] if o.hyperball else []
    weight_sum, update_sum, *products = yield [square_sum(x), square_sum(u), *products]
    weight_norm, update_norm = root(weight_sum), root(update_sum)
    if o.hyperball:
        radius = torch.where(state["radius"] == 0, weight_norm.to(state["radius"].dtype), state["radius"])
        a, q = ball_step(radius, o.lr * lr_correction, weight_norm, update_norm, inner(products[0]).squeeze())
        x = a.to(dtype) * x - (o.lr * lr_correction * q).to(dtype) * u  # LAMB-ball
        return x, new_state | {"radius": radius}, torch.stack([weight_norm, update_norm, q])
    q = torch.ones_like(weight_norm)
    if o.adapt:
        q = trust_ratio(weight_norm, update_norm, o.weight_norm_bounds, o.trust_ratio_bounds)
    x = x - (o.lr * lr_correction * q).to(dtype) * u  # LAMB-x
    return x, new_state, torch.stack([weight_norm, update_norm, q])


def trust_ratio(
    weight_norm: Tensor,
    update_norm: Tensor,
    weight_norm_bounds: Bounds | None = None,
    trust_ratio_bounds: Bounds | None = None,
) -> Tensor:
    """Return the step size of a layer relative to its learning rate: phi(||x||) / ||u||, and 1 if either norm is 0.

    Args:
        weight_norm: ||x||, any shape.
        update_norm: ||u||, the same shape.
        weight_norm_bounds: phi clamps ||x|| to them. Default: None, phi is the identity.
        trust_ratio_bounds: The ratio is clamped to them, except for a 1 that replaces a zero norm. Default: None.

    Example:
        >>> trust_ratio(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 2.0]))
        tensor([1.5000, 1.0000])
    """
    phi = weight_norm if weight_norm_bounds is None else weight_norm.clamp(*weight_norm_bounds)
    q = phi / update_norm  # LAMB-q
    if trust_ratio_bounds is not None:
        q = q.clamp(*trust_ratio_bounds)
    return q.masked_fill((weight_norm == 0) | (update_norm < LEAST_NORM), 1.0)


def ball_step(
    radius: Tensor, lr: float | Tensor, weight_norm: Tensor, update_norm: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a and q of x <- a x - lr q u, the step of Hyperball, which ends where ||x|| is R again.

    x <- R y / ||y|| with y = x - lr R u / ||u||, whose norm follows from ||x||, ||u|| and <x, u>. x stays where ||u||
    or ||y|| is 0. Wen et al., "Hyperball Optimization", arXiv:2606.16899v1.

    Args:
        radius: R, any shape.
        lr: The learning rate.
        weight_norm: ||x||, the same shape.
        update_norm: ||u||, likewise.
        inner: <x, u>, likewise.

    Example:
        >>> x, u = torch.tensor([3.0, 4.0]), torch.tensor([4.0, -3.0])  # which are orthogonal
        >>> a, q = ball_step(x.norm(), 0.1, x.norm(), u.norm(), x @ u)
        >>> (a * x - 0.1 * q * u).norm()
        tensor(5.)
    """
    radius = radius.to(weight_norm.dtype)
    p = lr * radius
    behind = p * (weight_norm - inner / update_norm)
    norm = torch.add((weight_norm - p).square(), behind, alpha=2).clamp(min=0).sqrt()
    stays = (update_norm < LEAST_NORM) | (norm == 0)
    a = (radius / norm).masked_fill(stays, 1.0)
    return a, (a * radius / update_norm).masked_fill(stays, 0.0)


def bias_corrections(t: Tensor, options: LambOptions) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return the divisors of m and v, and the factor of the learning rate, at step `t` (float64)."""
    if not options.bias_correction:
        one = torch.ones_like(t)
        return one, one, 1.0
    correction1, correction2 = one_minus_powers(options.betas, t)
    if options.second_moment == "adagrad":
        correction2 = torch.ones_like(t)
    if options.bias_correction == "lr":
        one = torch.ones_like(t)
        return one, one, correction2.sqrt() / correction1
    return correction1, correction2, 1.0


class Lamb(Stepper[LambOptions]):
    """LAMB for some buckets on one device."""

    rule = staticmethod(lamb)
