"""LAMB in plain torch, for any device: the reference's mathematics on lists of tensors.

The lines tagged `LAMB-...` follow `reference/lamb.py`, which has the details.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bighorn._kernels.foreach.lists import Group, ListStepper, chosen
from bighorn._kernels.options import LambOptions
from bighorn._kernels.reference import lamb as reference
from bighorn._kernels.reference.lamb import ball_step, bias_corrections, trust_ratio
from bighorn._square_sums import inner, product_sums, root, square_sums


class LambGroup(Group[LambOptions]):
    """Rows that are stepped together, or this rank's shards of them."""

    def step(self, scale: Tensor | float, apply_mask: Tensor | None) -> Iterator[Tensor]:
        """Advance the moments, add up the norms, and move the weights."""
        o, t = self.bucket.options, self.counts()
        x, corrections = self.weights(), bias_corrections(t, o)
        u, agree = self._ratio(x, t, corrections, scale, apply_mask)
        if o.cautious:
            yield from self.keep(agree, u)
        if o.decay_mode == "ratio":
            torch._foreach_add_(u, x, alpha=o.weight_decay)  # LAMB-u
        sums = square_sums([*x, *u], self.device)
        if o.hyperball:
            sums = torch.cat([sums, product_sums(x, u, self.device)])
        yield sums.view(-1)

        weight_norm, update_norm = root(sums[: 2 * len(x)]).chunk(2)
        if o.decay_mode == "decoupled":
            decay = 1 - o.lr * o.weight_decay
            weight_norm = weight_norm * (abs(decay) if isinstance(decay, float) else decay.abs())
            torch._foreach_mul_(x, self.unless(apply_mask, decay, 1.0))
        if o.adapt and not o.hyperball:
            q = trust_ratio(weight_norm, update_norm, o.weight_norm_bounds, o.trust_ratio_bounds)  # LAMB-q
        else:
            q = torch.ones_like(weight_norm)
        lr = o.lr * corrections[2]
        if o.hyperball:
            old = torch.stack(self.state["radius"])
            radius = torch.where(old == 0, weight_norm.to(old.dtype), old)
            a, q = ball_step(radius, lr, weight_norm, update_norm, inner(sums[2 * len(x) :]))
            torch._foreach_mul_(x, self.each(chosen(apply_mask, a, 1.0)))  # LAMB-ball
            torch._foreach_copy_(self.state["radius"], list(chosen(apply_mask, radius, old).unbind()))
        self.write_metrics([weight_norm, update_norm, q], apply_mask)
        step = q * lr
        if o.eps == 0:  # then r is 0 / 0 where moments are 0, as before the first step that is applied
            self.blank(u, apply_mask)
        torch._foreach_addcmul_(x, u, self.each(chosen(apply_mask, step, 0.0)), value=-1)  # LAMB-x
        del u
        self.store_weights(x, t, apply_mask)

    def _ratio(
        self,
        x: list[Tensor],
        t: Tensor,
        corrections: tuple[Tensor, Tensor, Tensor | float],
        scale: Tensor | float,
        apply_mask: Tensor | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Advance the moments. Return r, and for `cautious` 1 where it has the gradient's sign and 0 elsewhere."""
        o, (beta1, beta2) = self.bucket.options, self.bucket.options.betas
        decays = o.decay_mode == "l2" and o.weight_decay != 0
        g = self.gradients(scale, copy=decays or not (apply_mask is None or self.fuses))
        if decays:
            torch._foreach_add_(g, x, alpha=o.weight_decay)
        if self.fuses:
            u = self._fused_ratio(g, t, apply_mask)
            return u, self.agreement(g, self.state["exp_avg"])
        self.blank(g, apply_mask)
        m = self.load("exp_avg") if o.int4 else []  # in 4 bits it is relative to v as it was stored
        v = self.load("exp_avg_sq")
        if o.second_moment != "adagrad":
            torch._foreach_mul_(v, self.unless(apply_mask, beta2, 1.0))
        torch._foreach_addcmul_(v, g, g, value=1.0 if o.second_moment == "adagrad" else 1 - beta2)  # LAMB-v
        v = self.store("exp_avg_sq", v, t, apply_mask)
        if o.second_moment == "amsgrad":
            peak = self.load("max_exp_avg_sq")
            torch._foreach_maximum_(peak, v)
            v = self.store("max_exp_avg_sq", peak, t, apply_mask)
        m = m or self.load("exp_avg")
        torch._foreach_mul_(m, self.unless(apply_mask, beta1, 1.0))
        torch._foreach_add_(m, g, alpha=1 - beta1 if o.grad_averaging else 1.0)  # LAMB-m
        m = self.store("exp_avg", m, t, apply_mask)
        agree = self.agreement(g, m)
        del g
        u = v
        if v is self.state["exp_avg_sq"] or v is self.state.get("max_exp_avg_sq"):
            u = list(torch._foreach_sqrt(v))
        else:
            torch._foreach_sqrt_(u)
        correction1, correction2, _ = corrections
        root2 = correction2.sqrt()
        torch._foreach_add_(u, self.each(root2 * o.eps))
        torch._foreach_reciprocal_(u)
        torch._foreach_mul_(u, m)
        torch._foreach_mul_(u, self.each(root2 / correction1))
        return u, agree

    @property
    def fuses(self) -> bool:
        """Whether torch's fused Adam computes the ratio, from moments as they are stored: on a CPU in half the time.

        In float64 its last bits depend on an element's address, and 1 - 0.9999^t loses four digits (torch 2.13).
        """
        o, dtypes = self.bucket.options, {self.dtype, self.state["exp_avg"][0].dtype}
        exact = o.grad_averaging and o.second_moment != "adagrad" and dtypes == {torch.float32}
        return exact and self.device.type == "cpu"

    def _fused_ratio(self, g: list[Tensor], t: Tensor, apply_mask: Tensor | None) -> list[Tensor]:
        """Advance the moments, and return r: for a parameter that is 0, Adam with lr -1 computes r."""
        o, u = self.bucket.options, [torch.zeros_like(each) for each in g]
        t = t.to(torch.float32) if o.bias_correction is True else torch.full_like(t, math.inf, dtype=torch.float32)
        torch._fused_adam_(  # LAMB-m, LAMB-v
            u,
            g,
            self.state["exp_avg"],
            self.state["exp_avg_sq"],
            self.state.get("max_exp_avg_sq", []),
            list(t.unbind()),  # for infinity beta^t is 0
            lr=-1.0,
            beta1=o.betas[0],
            beta2=o.betas[1],
            weight_decay=0.0,
            eps=o.eps,
            amsgrad=o.second_moment == "amsgrad",
            maximize=False,
            found_inf=None if apply_mask is None else (~apply_mask).to(torch.float32),
        )
        return u


class Lamb(ListStepper[LambOptions], reference.Lamb):
    """LAMB for some buckets on one device."""

    group = LambGroup
