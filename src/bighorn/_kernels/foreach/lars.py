"""LARS in plain torch, for any device: the reference's mathematics on lists of tensors.

The lines tagged `LARS-...` follow `reference/lars.py`, which has the details.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bighorn._kernels.foreach.lists import Group, ListStepper
from bighorn._kernels.options import LarsOptions
from bighorn._kernels.reference import lars as reference
from bighorn._kernels.reference.lars import trust_ratio
from bighorn._square_sums import square_sums


class LarsGroup(Group[LarsOptions]):
    """Rows that are stepped together, or this rank's shards of them."""

    def step(self, scale: Tensor | float, apply_mask: Tensor | None) -> Iterator[Tensor]:
        """Add up the norms, and advance momentum and weights."""
        o, t = self.bucket.options, self.counts()
        x, u = self.weights(), self.gradients(scale, copy=True)
        if o.denominator == "joint" and o.weight_decay != 0:
            torch._foreach_add_(u, x, alpha=o.weight_decay)  # LARS-u
        sums = square_sums([*x, *u], self.device)
        yield sums.view(-1)

        weight_sums, norm_sums = sums.chunk(2)
        weight_norm, update_norm, q = trust_ratio(weight_sums, norm_sums, o)  # LARS-q
        self.write_metrics([weight_norm, update_norm, q], apply_mask)
        if o.denominator == "sum" and o.weight_decay != 0:
            torch._foreach_add_(u, x, alpha=o.weight_decay)  # LARS-u
        before, after = (o.lr * q, 1.0) if o.lr_in_momentum else (q, o.lr)
        torch._foreach_mul_(u, self.each(before))
        self.blank(u, apply_mask)
        m = self.load("exp_avg")
        torch._foreach_mul_(m, self.unless(apply_mask, o.momentum, 1.0))
        torch._foreach_add_(m, u)  # LARS-m
        m = self.store("exp_avg", m, t, apply_mask)
        if o.nesterov:
            torch._foreach_add_(u, m, alpha=o.momentum)
        self.subtract(x, u if o.nesterov else m, after, apply_mask)  # LARS-x
        del u, m
        self.store_weights(x, t, apply_mask)


class Lars(ListStepper[LarsOptions], reference.Lars):
    """LARS for some buckets on one device."""

    group = LarsGroup
