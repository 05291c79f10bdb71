"""LAMB in plain torch, for any device: the reference's mathematics on batches of tensors of bounded size.

Temporaries are a handful of 1 MB chunks, which stay in cache, never copies of the model (a cautious step alone takes
whole tensors, since its mask is averaged over them). Where the lines tagged
`LAMB-...` leave a question open, `reference/lamb.py` answers it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bighorn.kernels import reference
from bighorn.kernels.arithmetic import compute_dtype, square_sums, wide, write
from bighorn.kernels.bucket import Bucket, LambOptions
from bighorn.kernels.foreach.pieces import CHUNK, borrow, chunks, flat, give_back, in_order_of, per_row
from bighorn.kernels.reference.lamb import bias_corrections, trust_ratio


class Lamb(reference.Lamb):
    """LAMB for some buckets on one device."""

    def square_sum(self) -> Tensor:
        """The sum of all gradients' squares, a 0-dim float64 tensor."""
        pieces = [piece for bucket in self.buckets for grad in bucket.grads for piece in chunks(grad)]
        return square_sums(pieces, self.buckets[0].norms).sum()

    def step(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> None:
        """One step of every bucket, as `reference.Lamb.step`."""
        for bucket in self.buckets:
            for batch in batches(bucket):
                lamb_batch(batch, grad_scale, commit)
            torch._foreach_add_(bucket.counts, 1.0 if commit is None else commit.to(torch.float32))


class Batch:
    """Rows of a bucket that are worked on together: many small ones, or a single one that is cut into pieces."""

    def __init__(self, bucket: Bucket[LambOptions], rows: list[int]) -> None:
        self.options = bucket.options
        self.norms = bucket.norms[rows[0] : rows[-1] + 1]
        self.steps = bucket.steps[rows[0] : rows[-1] + 1]
        self.arrays = {
            name: [tensors[i] for i in rows]
            for name, tensors in {"x": bucket.params, "g": bucket.grads, **bucket.state}.items()
        }
        x = self.arrays["x"][0]
        self.cut = len(rows) == 1 and x.numel() > CHUNK and not bucket.options.cautious
        self.fan = x.numel() // max(x.shape[0], 1) if bucket.options.centre else 1

    def pieces(self) -> Iterator[dict[str, list[Tensor]]]:
        """The batch as it is, or its one row in flat pieces of whole slices along dim 0 (where these matter)."""
        if not self.cut:
            yield self.arrays
            return
        size = max(CHUNK // self.fan, 1) * self.fan
        whole = {name: tensors[0] for name, tensors in self.arrays.items()}
        whole["g"] = in_order_of(whole["x"], whole["g"])
        splits = {name: torch.split(flat(tensor), size) for name, tensor in whole.items()}
        for i in range(len(splits["x"])):
            yield {name: [split[i].view(-1, self.fan)] for name, split in splits.items()}


def batches(bucket: Bucket[LambOptions]) -> Iterator[Batch]:
    """Consecutive rows up to CHUNK elements in all, at least one row each."""
    rows: list[int] = []
    total = 0
    for i, x in enumerate(bucket.params):
        if rows and total + x.numel() > CHUNK:
            yield Batch(bucket, rows)
            rows, total = [], 0
        rows.append(i)
        total += x.numel()
    if rows:
        yield Batch(bucket, rows)


def lamb_batch(batch: Batch, grad_scale: Tensor | float, commit: Tensor | None) -> None:
    """Both phases of a batch: moments and norms of all its pieces, then the parameters of all its pieces."""
    o = batch.options
    t = torch.stack(batch.steps) + 1
    corrections = bias_corrections(t.to(wide(t)), o)
    sums = torch.zeros(len(t), 2, dtype=wide(t), device=t.device)
    decay = 1 - o.lr * o.weight_decay if o.decay_mode == "decoupled" else 1.0
    u: list[Tensor] = []

    for piece in batch.pieces():
        u = moments(piece, o, corrections, grad_scale, commit)
        sums += torch.stack([square_sums(tensors, sums) for tensors in (piece["x"], u)], dim=1)

    weight_norm, update_norm = sums.sqrt().unbind(dim=1)
    weight_norm = weight_norm * (abs(decay) if isinstance(decay, float) else decay.abs())
    q = torch.ones_like(weight_norm)
    if o.adapt:
        q = trust_ratio(weight_norm, update_norm, o.weight_norm_bounds, o.trust_ratio_bounds)
    write(batch.norms, torch.stack([weight_norm, update_norm, q], dim=1), commit)

    step = per_row(corrections[2] * q * o.lr, batch.arrays["x"][0])
    for piece in batch.pieces():
        if batch.cut:
            u = update(piece, o, corrections)
        x = borrow(piece["x"], compute_dtype(piece["x"][0]), commit)
        if o.decay_mode == "decoupled":
            torch._foreach_mul_(x, decay)
        torch._foreach_mul_(u, step)
        torch._foreach_sub_(x, u)  # LAMB-x
        give_back(piece["x"], x, commit)


def moments(
    piece: dict[str, list[Tensor]],
    o: LambOptions,
    corrections: tuple[Tensor, Tensor, Tensor],
    grad_scale: Tensor | float,
    commit: Tensor | None,
) -> list[Tensor]:
    """Advance the moments of a piece and return its u."""
    beta1, beta2 = o.betas
    dtype = compute_dtype(piece["x"][0])
    scale = -grad_scale if o.maximize else grad_scale
    g = [g.to(dtype) if isinstance(scale, float) and scale == 1 else g.to(dtype) * scale for g in piece["g"]]
    if o.centre:
        g = [g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True) for g in g]
    if o.decay_mode == "l2":
        g = list(torch._foreach_add(g, [x.to(dtype) for x in piece["x"]], alpha=o.weight_decay))

    names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if o.second_moment == "amsgrad" else [])
    work = {name: borrow(piece[name], dtype, commit) for name in names}
    m, v = work["exp_avg"], work["exp_avg_sq"]
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, g, alpha=1 - beta1 if o.grad_averaging else 1.0)  # LAMB-m
    if o.second_moment != "adagrad":
        torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, value=1.0 if o.second_moment == "adagrad" else 1 - beta2)  # LAMB-v
    for name in names:
        if name == "max_exp_avg_sq":
            torch._foreach_maximum_(work[name], work["exp_avg_sq"])
        work[name] = give_back(piece[name], work[name], commit)
    return update({**piece, **work}, o, corrections, g)


def update(
    piece: dict[str, list[Tensor]],
    o: LambOptions,
    corrections: tuple[Tensor, Tensor, Tensor],
    g: list[Tensor] | None = None,
) -> list[Tensor]:
    """The u of a piece, from its moments as stored; `g` is needed by a cautious update alone."""
    dtype = compute_dtype(piece["x"][0])
    correction1, correction2, _ = corrections
    v = piece["max_exp_avg_sq"] if o.second_moment == "amsgrad" else piece["exp_avg_sq"]
    # m / c1 / (sqrt(v / c2) + eps), with both corrections moved where they cost a pass less.
    denominator = torch._foreach_sqrt([v.to(dtype) for v in v])
    torch._foreach_add_(denominator, per_row(correction2.sqrt() * o.eps, piece["x"][0]))
    u = list(torch._foreach_div([m.to(dtype) for m in piece["exp_avg"]], denominator))
    torch._foreach_mul_(u, per_row(correction2.sqrt() / correction1, piece["x"][0]))
    if o.cautious and g is not None:
        masks = [(u * g > 0).to(dtype) for u, g in zip(u, g, strict=True)]
        u = [u * mask / mask.mean().clamp(min=1e-3) for u, mask in zip(u, masks, strict=True)]
    if o.decay_mode == "ratio":
        torch._foreach_add_(u, [x.to(dtype) for x in piece["x"]], alpha=o.weight_decay)  # LAMB-u
    return u
