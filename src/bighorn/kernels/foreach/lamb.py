"""LAMB in plain torch, for any device: the reference's mathematics on pieces of bounded size.

u is kept in a workspace until its norm is known. For a tensor too large for that, phase 1 works on copies of the
moments and phase 2 computes u again. The lines tagged `LAMB-...` follow `reference/lamb.py`, which has the details.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bighorn.capabilities import wide
from bighorn.kernels.arithmetic import write
from bighorn.kernels.bucket import Bucket
from bighorn.kernels.foreach.layerwise import WIDE, Batch, LayerwiseStepper, Piece, U, X
from bighorn.kernels.foreach.lists import Group, chosen
from bighorn.kernels.foreach.pieces import Workspace, aligned_size, piece_bytes
from bighorn.kernels.options import LambOptions
from bighorn.kernels.reference import lamb as reference
from bighorn.kernels.reference.lamb import bias_corrections, trust_ratio
from bighorn.square_sums import no_square_sums, root, square_sums


class LambBatch(Batch[LambOptions]):
    """Consecutive rows of a bucket, whose norms are computed together."""

    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(self, bucket: Bucket[LambOptions], rows: slice) -> None:
        super().__init__(bucket, rows)
        size = sum(x.numel() for x in bucket.params[rows]) * self.dtype.itemsize
        self.keeps = bucket.options.cautious or size <= (U[1] - U[0]) * piece_bytes()

    @property
    def divides_rows(self) -> bool:
        """Whether a piece can be a part of a large row: not if the mask's mean over the row is needed."""
        return not self.bucket.options.cautious

    def step(self, space: Workspace, grad_scale: Tensor | float, apply_mask: Tensor | None) -> None:
        """Run both phases: moments and norms of all pieces, then the parameters of all pieces."""
        o, norms = self.bucket.options, self.bucket.metrics[self.rows]
        t = torch.stack(self.bucket.steps[self.rows]) + 1
        corrections = bias_corrections(t.to(wide(t.device)), o)
        sums = no_square_sums(len(t), 2, device=t.device)
        decay = 1 - o.lr * o.weight_decay if o.decay_mode == "decoupled" else 1.0

        updates = []
        for piece, u in self._updates(space, t, corrections, grad_scale, apply_mask, discard=not self.keeps):
            updates.append((piece, u))
            x = self._weights(piece)
            sums[piece.rows] += torch.stack([space.square_sums(WIDE, each) for each in (x, u)], dim=1)

        weight_norm, update_norm = root(sums).unbind(dim=1)
        weight_norm = weight_norm * (abs(decay) if isinstance(decay, float) else decay.abs())
        q = torch.ones_like(weight_norm)
        if o.adapt:
            q = trust_ratio(weight_norm, update_norm, o.weight_norm_bounds, o.trust_ratio_bounds)
        write(norms, torch.stack([weight_norm, update_norm, q], dim=1), apply_mask)

        step = (corrections[2] * q * o.lr).to(self.dtype).unbind()
        for piece, u in updates if self.keeps else self._updates(space, t, corrections, grad_scale, apply_mask):
            x = space.load(X, self._weights(piece), self.dtype, copy=apply_mask is not None)
            if o.decay_mode == "decoupled":
                torch._foreach_mul_(x, decay)
            torch._foreach_addcmul_(x, u, step[piece.rows], value=-1)  # LAMB-x
            self._store_weights(piece, x, t, apply_mask)

    def _updates(
        self,
        space: Workspace,
        t: Tensor,
        corrections: tuple[Tensor, Tensor, Tensor | float],
        grad_scale: Tensor | float,
        apply_mask: Tensor | None,
        discard: bool = False,
    ) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Advance the moments of each piece, or copies of them, and compute its u."""
        o = self.bucket.options
        fused = self.fused()
        offset = 0
        gradients = self._gradients(space, -grad_scale if o.maximize else grad_scale, copy=o.decay_mode == "l2")
        for piece, g in zip(self.pieces, gradients, strict=True):
            if o.decay_mode == "l2" and o.weight_decay != 0:
                torch._foreach_add_(g, self._weights(piece), alpha=o.weight_decay)
            m, v, peak = self._moments(space, piece, discard or (apply_mask is not None and not fused))
            u = space.views(U, piece.x, self.dtype, offset)
            if self.keeps:
                offset += sum(map(aligned_size, u)) * self.dtype.itemsize
            if fused:
                fused_update(u, g, m, v, peak, t[piece.rows], o, apply_mask)
            else:
                advance(g, m, v, o)
                if peak:
                    self._round(space, v)  # the peak is that of stored averages
                    torch._foreach_maximum_(peak, v)
            self._store_moments(space, piece, [m, v, peak], t, apply_mask, discard)
            if not fused:
                ratio(u, m, peak or v, [c[piece.rows] for c in corrections[:2]], o)
            if o.cautious:
                masks = [(u * g > 0).to(self.dtype) for u, g in zip(u, g, strict=True)]
                torch._foreach_mul_(u, [mask / mask.mean().clamp(min=1e-3) for mask in masks])
            if o.decay_mode == "ratio":
                torch._foreach_add_(u, self._weights(piece), alpha=o.weight_decay)  # LAMB-u
            yield piece, u

    def fused(self) -> bool:
        """Whether torch's fused Adam computes this variant, from moments as they are stored."""
        o = self.bucket.options
        return (
            o.grad_averaging
            and o.second_moment != "adagrad"
            # In float64 its last bits depend on an element's address, and 1 - 0.9999^t loses four digits (torch 2.13).
            and self.stored == self.dtype == torch.float32
        )


def fused_update(
    u: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    peak: list[Tensor],
    t: Tensor,
    o: LambOptions,
    apply_mask: Tensor | None,
) -> None:
    """Compute moments and r in one pass: for a parameter that is 0, Adam with lr -1 computes r."""
    torch._foreach_zero_(u)
    torch._fused_adam_(  # LAMB-m, LAMB-v
        u,
        g,
        m,
        v,
        peak,
        list((t if o.bias_correction is True else torch.full_like(t, math.inf)).unbind()),  # for infinity beta^t is 0
        lr=-1.0,
        beta1=o.betas[0],
        beta2=o.betas[1],
        weight_decay=0.0,
        eps=o.eps,
        amsgrad=bool(peak),
        maximize=False,
        found_inf=None if apply_mask is None else (~apply_mask).to(torch.float32),
    )


def advance(g: list[Tensor], m: list[Tensor], v: list[Tensor], o: LambOptions) -> None:
    """Advance the moments in place, in many passes, for every option and dtype."""
    beta1, beta2 = o.betas
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, g, alpha=1 - beta1 if o.grad_averaging else 1.0)  # LAMB-m
    if o.second_moment != "adagrad":
        torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, value=1.0 if o.second_moment == "adagrad" else 1 - beta2)  # LAMB-v


def ratio(u: list[Tensor], m: list[Tensor], v: list[Tensor], corrections: list[Tensor], o: LambOptions) -> None:
    """Compute r from the stored moments: m / c1 / (sqrt(v / c2) + eps), with c1 and c2 moved to scalar factors."""
    correction1, correction2 = corrections
    root = correction2.sqrt()
    torch._foreach_copy_(u, v)
    torch._foreach_sqrt_(u)
    torch._foreach_add_(u, list((root * o.eps).to(u[0].dtype).unbind()))
    torch._foreach_reciprocal_(u)
    torch._foreach_mul_(u, m)
    torch._foreach_mul_(u, list((root / correction1).to(u[0].dtype).unbind()))


class LambGroup(Group[LambOptions]):
    """Rows on an accelerator, or this rank's shards of them."""

    def step(self, scale: Tensor | float, apply_mask: Tensor | None) -> Iterator[Tensor]:
        """Advance the moments, add up the norms, and move the weights."""
        o, t = self.bucket.options, self.counts()
        x, corrections = self.weights(), bias_corrections(t, o)
        u, agree = self._ratio(x, t, corrections, scale, apply_mask)
        if o.cautious:
            torch._foreach_mul_(u, agree)
            kept = torch.stack(torch._foreach_norm(agree, 1, dtype=t.dtype))
            del agree
            yield kept
            shares = torch._foreach_div(list(kept.unbind()), [float(shard.numel) for shard in self.shards])
            torch._foreach_clamp_min_(shares, 1e-3)
            torch._foreach_div_(u, self.each(torch.stack(shares)))
        if o.decay_mode == "ratio":
            torch._foreach_add_(u, x, alpha=o.weight_decay)  # LAMB-u
        sums = square_sums([*x, *u], self.device)
        yield sums.view(-1)

        weight_norm, update_norm = root(sums).chunk(2)
        if o.decay_mode == "decoupled":
            decay = 1 - o.lr * o.weight_decay
            weight_norm = weight_norm * (abs(decay) if isinstance(decay, float) else decay.abs())
            torch._foreach_mul_(x, self.unless(apply_mask, decay, 1.0))
        if o.adapt:
            q = trust_ratio(weight_norm, update_norm, o.weight_norm_bounds, o.trust_ratio_bounds)
        else:
            q = torch.ones_like(weight_norm)
        self.write_metrics([weight_norm, update_norm, q], apply_mask)
        step = q * o.lr
        if isinstance(corrections[2], Tensor):
            step = step * corrections[2]
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
        g = self.gradients(scale, copy=decays or apply_mask is not None)
        if decays:
            torch._foreach_add_(g, x, alpha=o.weight_decay)
        self.blank(g, apply_mask)
        m = self.load("exp_avg") if o.packed else []  # in 4 bits it is relative to v as it was stored
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
        agree: list[Tensor] = []
        if o.cautious:
            agree = list(torch._foreach_sign(g))
            torch._foreach_mul_(agree, m)
            torch._foreach_sign_(agree)
            torch._foreach_clamp_min_(agree, 0.0)
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


class Lamb(LayerwiseStepper[LambOptions], reference.Lamb):
    """LAMB for some buckets on one device."""

    batch = LambBatch
    group = LambGroup
