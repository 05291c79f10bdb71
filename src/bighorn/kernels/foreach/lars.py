"""LARS in plain torch, for any device: the reference's mathematics on pieces of bounded size.

The lines tagged `LARS-...` follow `reference/lars.py`, which has the details.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bighorn.kernels.arithmetic import write
from bighorn.kernels.foreach.layerwise import WIDE, Batch, LayerwiseStepper, Piece, X
from bighorn.kernels.foreach.lists import Group
from bighorn.kernels.foreach.pieces import Workspace
from bighorn.kernels.options import LarsOptions
from bighorn.kernels.reference import lars as reference
from bighorn.kernels.reference.lars import trust_ratio
from bighorn.square_sums import no_square_sums, square_sums


class LarsBatch(Batch[LarsOptions]):
    """Consecutive rows of a bucket, whose norms are computed together."""

    moments = ("exp_avg",)

    def step(self, space: Workspace, grad_scale: Tensor | float, apply_mask: Tensor | None) -> None:
        """Run both phases: the norms of all pieces, then momentum and parameters of all pieces."""
        o = self.bucket.options
        t = torch.stack(self.bucket.steps[self.rows]) + 1
        scale = -grad_scale if o.maximize else grad_scale
        sums = no_square_sums(len(t), 2, device=t.device)
        for piece, g in self._updates(space, scale, decayed=o.denominator == "joint"):
            x = self._weights(piece)
            sums[piece.rows] += torch.stack([space.square_sums(WIDE, each) for each in (x, g)], dim=1)
        weight_norm, update_norm, q = trust_ratio(sums[:, 0], sums[:, 1], o)
        write(self.bucket.metrics[self.rows], torch.stack([weight_norm, update_norm, q], dim=1), apply_mask)

        before, after = (o.lr * q, 1.0) if o.lr_in_momentum else (q, o.lr)
        factors = before.to(self.dtype).unbind()
        for piece, u in self._updates(space, scale, decayed=True, copy=True):
            torch._foreach_mul_(u, factors[piece.rows])
            (m,) = self._moments(space, piece, copy=apply_mask is not None)
            torch._foreach_mul_(m, o.momentum)
            torch._foreach_add_(m, u)  # LARS-m
            self._store_moments(space, piece, [m], t, apply_mask)
            if o.nesterov:
                torch._foreach_add_(u, m, alpha=o.momentum)
            x = space.load(X, self._weights(piece), self.dtype, copy=apply_mask is not None)
            if isinstance(after, Tensor):
                torch._foreach_addcmul_(x, u if o.nesterov else m, [after.to(self.dtype)] * len(x), value=-1)
            else:
                torch._foreach_add_(x, u if o.nesterov else m, alpha=-after)  # LARS-x
            self._store_weights(piece, x, t, apply_mask)

    def _updates(
        self, space: Workspace, scale: Tensor | float, *, decayed: bool, copy: bool = False
    ) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Yield each piece and its gradients, scaled, with the decay if that is asked for."""
        decay = self.bucket.options.weight_decay if decayed else 0.0
        for piece, u in zip(self.pieces, self._gradients(space, scale, copy=copy or decay != 0), strict=True):
            if decay != 0:
                torch._foreach_add_(u, self._weights(piece), alpha=decay)  # LARS-u
            yield piece, u


class LarsGroup(Group[LarsOptions]):
    """Rows on an accelerator, or this rank's shards of them."""

    def step(self, scale: Tensor | float, apply_mask: Tensor | None) -> Iterator[Tensor]:
        """Add up the norms, and advance momentum and weights."""
        o, t = self.bucket.options, self.counts()
        x, u = self.weights(), self.gradients(scale, copy=True)
        if o.denominator == "joint":
            torch._foreach_add_(u, x, alpha=o.weight_decay)  # LARS-u
        sums = square_sums([*x, *u], self.device)
        yield sums.view(-1)

        weight_sums, norm_sums = sums.chunk(2)
        weight_norm, update_norm, q = trust_ratio(weight_sums, norm_sums, o)
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


class Lars(LayerwiseStepper[LarsOptions], reference.Lars):
    """LARS for some buckets on one device."""

    batch = LarsBatch
    group = LarsGroup
