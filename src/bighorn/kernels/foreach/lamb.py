"""LAMB in plain torch, for any device: the reference's mathematics on pieces of bounded size.

u is kept in a workspace until its norm is known. For a tensor too large for that, phase 1 works on copies of the
moments and phase 2 computes u again. The lines tagged `LAMB-...` follow `reference/lamb.py`, which has the details.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bighorn.kernels import reference
from bighorn.kernels.arithmetic import compute_dtype, count_step, wide, write
from bighorn.kernels.bucket import Bucket, rows_with_grad
from bighorn.kernels.codec import NEAREST, dequantize, quantize
from bighorn.kernels.foreach.pieces import (
    PIECE_BYTES,
    Slot,
    Workspace,
    aligned_size,
    groups,
    memory_order,
    pieces,
    store_pieces,
    workspace,
)
from bighorn.kernels.options import LambOptions
from bighorn.kernels.reference.lamb import bias_corrections, trust_ratio
from bighorn.kernels.reference.stepper import needs_rng_key
from bighorn.kernels.rounding import AUX_STATE, dither, load_weight, random_bits, rng_key, store_weight

# The slots of the workspace, in units of PIECE_BYTES. WIDE and X overlap, as x follows all norms.
WIDE: Slot = (0, 2)
X: Slot = (0, 1)
G: Slot = (2, 3)
M: Slot = (3, 4)
V: Slot = (4, 5)
PEAK: Slot = (5, 6)
U: Slot = (6, 16)
SIZE = 16  # of the workspace

BATCH = 1 << 20
"""Elements of the rows whose norms are computed together: few enough for phase 2 to find x and u in cache."""


@dataclass
class Piece:
    """Whole rows, or a part of one, as flat tensors in their memory order."""

    rows: slice
    x: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    peak: list[Tensor]
    state: list[dict[str, Tensor]]
    """The state of each tensor, in its own shape."""
    row_offsets: list[int]
    """The position of each tensor's first element in its parameter."""


class Lamb(reference.Lamb):
    """LAMB for some buckets on one device."""

    def __init__(self, buckets: list[Bucket[LambOptions]]) -> None:
        super().__init__(buckets)
        self.refresh()

    def refresh(self) -> None:
        """Divide the tensors into pieces."""
        self.batches = [batches(bucket) for bucket in self.buckets]

    def prepare(self) -> None:
        """Do everything that can fail, before any kernel of a step writes."""
        workspace(SIZE, self.buckets[0].metrics.device)

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares, a 0-dim float64 tensor."""
        grads = [grad for bucket in self.buckets for grad in bucket.grads if grad is not None]
        norms = self.buckets[0].metrics
        space = workspace(SIZE, norms.device)
        sums = [space.square_sums(WIDE, piece) for _, piece in pieces(grads, PIECE_BYTES // 8)]
        return torch.cat(sums).sum() if sums else norms.new_zeros((), dtype=wide(norms))

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of every bucket, as `reference.Lamb.step`."""
        for bucket, all_rows in zip(self.buckets, self.batches, strict=True):
            present = bucket.with_grad()
            for batch in all_rows if present is bucket else batches(present):
                batch.step(grad_scale, apply_mask)
            if present is not bucket:
                bucket.metrics[rows_with_grad(bucket.grads)] = present.metrics
            count_step(bucket.unique_steps, apply_mask)


def batches(bucket: Bucket[LambOptions]) -> list[Batch]:
    """Return the rows of a bucket in batches."""
    return [Batch(bucket, rows) for rows in groups(bucket.params, BATCH)]


class Batch:
    """Consecutive rows of a bucket, whose norms are computed together."""

    def __init__(self, bucket: Bucket[LambOptions], rows: slice) -> None:
        self.bucket, self.rows = bucket, rows
        self.dtype = compute_dtype(bucket.params[0])
        self.orders = [memory_order(x) for x in bucket.params[rows]]
        self.stored = bucket.state["exp_avg"][0].dtype
        size = sum(x.numel() for x in bucket.params[rows])
        self.keeps = bucket.options.cautious or size * self.dtype.itemsize <= (U[1] - U[0]) * PIECE_BYTES
        self.needs_rng_key = needs_rng_key(bucket)
        self.pieces = list(self._cut())

    def _cut(self) -> Iterator[Piece]:
        """Yield the pieces of the parameters and their state, whose addresses are the same at each step."""
        params, state = self.bucket.params[self.rows], self.bucket.state
        row_starts = self.bucket.row_offsets[self.rows] or [0] * len(params)
        moments = [self._flat(state.get(name)) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
        like_params = {name: self._pieces(each[self.rows]) for name, each in state.items() if "scale" not in name}
        scales = {name: each[self.rows] for name, each in state.items() if "scale" in name}
        for (rows, x), m, v, peak in zip(self._pieces(params), *moments, strict=False):
            starts = [
                int(part.storage_offset()) - int(whole.storage_offset())
                for part, whole in zip(x, params[rows], strict=True)
            ]
            parts = {name: next(rest)[1] for name, rest in like_params.items()}
            parts |= {name: scales_of(x, starts, each[rows]) for name, each in scales.items()}
            yield Piece(
                rows,
                [each.view(-1) for each in x],
                m,
                v,
                peak,
                [{name: part[i] for name, part in parts.items()} for i in range(len(x))],
                [start + first for start, first in zip(starts, row_starts[rows], strict=True)],
            )

    @property
    def space(self) -> Workspace:
        """The memory for temporaries."""
        return workspace(SIZE, self.bucket.metrics.device)

    def _pieces(self, tensors: list[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield pieces of this batch's tensors, which are shaped like parameters, in the parameters' memory order."""
        o = self.bucket.options
        ordered = [x.permute(order) for x, order in zip(tensors, self.orders, strict=True)]
        return pieces(ordered, PIECE_BYTES // self.dtype.itemsize, cut=not o.cautious, deep=not o.blocks)

    def _flat(self, tensors: list[Tensor] | None) -> Iterator[list[Tensor]]:
        if tensors is None:
            return itertools.repeat([])
        return ([x.view(-1) for x in piece] for _, piece in self._pieces(tensors[self.rows]))

    def step(self, grad_scale: Tensor | float, apply_mask: Tensor | None) -> None:
        """Run both phases: moments and norms of all pieces, then the parameters of all pieces."""
        o, norms = self.bucket.options, self.bucket.metrics[self.rows]
        t = torch.stack(self.bucket.steps[self.rows]) + 1
        corrections = bias_corrections(t.to(wide(t)), o)
        sums = torch.zeros(len(t), 2, dtype=wide(t), device=t.device)
        decay = 1 - o.lr * o.weight_decay if o.decay_mode == "decoupled" else 1.0

        updates = []
        for piece, u in self._updates(t, corrections, grad_scale, apply_mask, discard=not self.keeps):
            updates.append((piece, u))
            x = self._weights(piece)
            sums[piece.rows] += torch.stack([self.space.square_sums(WIDE, each) for each in (x, u)], dim=1)

        weight_norm, update_norm = sums.sqrt().unbind(dim=1)
        weight_norm = weight_norm * (abs(decay) if isinstance(decay, float) else decay.abs())
        q = torch.ones_like(weight_norm)
        if o.adapt:
            q = trust_ratio(weight_norm, update_norm, o.weight_norm_bounds, o.trust_ratio_bounds)
        write(norms, torch.stack([weight_norm, update_norm, q], dim=1), apply_mask)

        step = (corrections[2] * q * o.lr).to(self.dtype).unbind()
        for piece, u in updates if self.keeps else self._updates(t, corrections, grad_scale, apply_mask):
            x = self.space.load(X, self._weights(piece), self.dtype, copy=apply_mask is not None)
            if o.decay_mode == "decoupled":
                torch._foreach_mul_(x, decay)
            torch._foreach_addcmul_(x, u, step[piece.rows], value=-1)  # LAMB-x
            self._store_weights(piece, x, t, apply_mask)

    def _weights(self, piece: Piece) -> list[Tensor]:
        """Return the values that the parameters of a piece stand for: themselves, or float32 from their aux state."""
        kept = AUX_STATE[self.bucket.options.weight_rounding]
        if not kept:
            return piece.x
        beside = [{name: state[name].view(-1) for name in kept} for state in piece.state]
        return [load_weight(x, each) for x, each in zip(piece.x, beside, strict=True)]

    def _store_weights(self, piece: Piece, values: list[Tensor], t: Tensor, apply_mask: Tensor | None) -> None:
        """Round the parameters of a piece, and store the aux state of their rounding mode."""
        rounding = self.bucket.options.weight_rounding
        if rounding == "nearest":
            store_pieces(piece.x, values, apply_mask)
            return
        for i, (x, value) in enumerate(zip(piece.x, values, strict=True)):
            bits = random_bits(*self._positions(piece, i, t)) if rounding == "stochastic" else None
            for name, new in store_weight(value, x.dtype, rounding, bits).items():
                target = x if name == "x" else piece.state[i][name].view(-1)
                write(target, new, apply_mask)

    def _moments(self, piece: Piece, copy: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the moments of a piece to compute in: themselves, or copies if their dtype or `copy` requires that."""
        if self.bucket.options.blocks:
            m, v = ([dequantize(name, state).flatten() for state in piece.state] for name in ("exp_avg", "exp_avg_sq"))
            return m, v, []
        slots = ((M, piece.m), (V, piece.v), (PEAK, piece.peak))
        m, v, peak = (self.space.load(slot, tensors, self.dtype, copy) for slot, tensors in slots)
        return m, v, peak

    def _encode(
        self, piece: Piece, m: list[Tensor], v: list[Tensor], t: Tensor, apply_mask: Tensor | None, discard: bool
    ) -> None:
        """Store moments in blocks unless `discard` is set; round them to the values that are (or would be) stored."""
        for i, state in enumerate(piece.state):
            shifts = dither(*self._positions(piece, i, t)).view_as(state["exp_avg"]) if self.needs_rng_key else NEAREST
            for name, values, shift in (("exp_avg", m[i], NEAREST), ("exp_avg_sq", v[i], shifts)):
                new = quantize(name, values.view_as(state[name]), state, shift)
                values.copy_(dequantize(name, {**state, **new}).flatten())
                for key, value in new.items() if not discard else ():
                    write(state[key], value, apply_mask)

    def _positions(self, piece: Piece, i: int, t: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return the arguments of `random_bits` for tensor `i` of a piece, at the steps `t` of the batch's rows."""
        row = piece.rows.start + i
        key = rng_key(self.bucket.options.rounding_seed, self.bucket.param_ids[self.rows][row])
        first = piece.row_offsets[i]
        return key, t[row], torch.arange(first, first + piece.x[i].numel(), device=t.device)

    def _gradients(self, scale: Tensor | float) -> Iterator[list[Tensor]]:
        """Yield the gradients of each piece as the moments use them, without l2 decay; only copies are written to."""
        o, grads = self.bucket.options, [grad for grad in self.bucket.grads[self.rows] if grad is not None]
        plain = o.decay_mode != "l2" and isinstance(scale, float) and scale == 1
        for _, piece in self._pieces(grads):
            g = self.space.load(G, [each.contiguous().view(-1) for each in piece], self.dtype, copy=not plain)
            if not plain:
                torch._foreach_mul_(g, scale)
            yield g

    def _updates(
        self,
        t: Tensor,
        corrections: tuple[Tensor, Tensor, Tensor],
        grad_scale: Tensor | float,
        apply_mask: Tensor | None,
        discard: bool = False,
    ) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Advance the moments of each piece, or copies of them, and compute its u."""
        o, space = self.bucket.options, self.space
        fused = self.fused()
        offset = 0
        for piece, g in zip(self.pieces, self._gradients(-grad_scale if o.maximize else grad_scale), strict=True):
            if o.decay_mode == "l2" and o.weight_decay != 0:
                torch._foreach_add_(g, self._weights(piece), alpha=o.weight_decay)
            m, v, peak = self._moments(piece, discard or (apply_mask is not None and not fused))
            u = space.views(U, piece.x, self.dtype, offset)
            if self.keeps:
                offset += sum(map(aligned_size, u)) * self.dtype.itemsize
            if fused:
                fused_update(u, g, m, v, peak, t[piece.rows], o, apply_mask)
            else:
                advance(g, m, v, o)
                if o.blocks:
                    self._encode(piece, m, v, t, apply_mask, discard)
                else:
                    self._round(m, v, peak)
                ratio(u, m, peak or v, [c[piece.rows] for c in corrections], o)
            if not discard and not o.blocks:
                for tensors, values in ((piece.m, m), (piece.v, v), (piece.peak, peak)):
                    store_pieces(tensors, values, apply_mask)
            if o.cautious:
                masks = [(u * g > 0).to(self.dtype) for u, g in zip(u, g, strict=True)]
                torch._foreach_mul_(u, [mask / mask.mean().clamp(min=1e-3) for mask in masks])
            if o.decay_mode == "ratio":
                torch._foreach_add_(u, self._weights(piece), alpha=o.weight_decay)  # LAMB-u
            yield piece, u

    def _round(self, m: list[Tensor], v: list[Tensor], peak: list[Tensor]) -> None:
        """Round moments to the dtype that they are stored in."""
        for moment in (*m, *v) if self.stored != self.dtype else ():
            moment.copy_(moment.to(self.stored))
        if peak:
            torch._foreach_maximum_(peak, v)

    def fused(self) -> bool:
        """Whether torch's fused Adam computes this variant, from moments as they are stored."""
        o = self.bucket.options
        return (
            o.grad_averaging
            and o.second_moment != "adagrad"
            # In float64 its last bits depend on an element's address, and 1 - 0.9999^t loses four digits (torch 2.13).
            and self.stored == self.dtype == torch.float32
            # On CUDA it computes 1 - beta2 in float32 (torch 2.11), 1e-5 off.
            and self.bucket.metrics.device.type == "cpu"
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
    correction1, correction2, _ = corrections
    root = correction2.sqrt()
    torch._foreach_copy_(u, v)
    torch._foreach_sqrt_(u)
    torch._foreach_add_(u, list((root * o.eps).to(u[0].dtype).unbind()))
    torch._foreach_reciprocal_(u)
    torch._foreach_mul_(u, m)
    torch._foreach_mul_(u, list((root / correction1).to(u[0].dtype).unbind()))


def scales_of(parts: list[Tensor], starts: list[int], scales: list[Tensor]) -> list[Tensor]:
    """Return the scales that belong to parts of tensors: all of them, or those of some rows of a single tensor."""
    return [
        scale
        if start == 0 and len(part) == len(scale)
        else scale.narrow(0, start // max(part[0].numel(), 1), len(part))
        for part, start, scale in zip(parts, starts, scales, strict=True)
    ]
