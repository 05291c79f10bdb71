"""CAME as its specification: one tensor at a time, any floating dtype, any device, written for readers.

Symbols follow Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", arXiv:2307.02047v2,
Algorithm 2; details that it leaves open follow came-pytorch 0.1.3. The lines tagged `CAME-...` have the same tag in
every backend. The averages of rows and columns are kept as means, as in came-pytorch, where the paper has sums.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bighorn._kernels.arithmetic import one_minus_power, rsqrt_of_ratio
from bighorn._kernels.bucket import Shard, row_axis
from bighorn._kernels.codec import Dither, dequantize, quantize
from bighorn._kernels.options import CameOptions, Factor
from bighorn._kernels.reference.stepper import Rule, Stepper, Sums
from bighorn._square_sums import root, square_sum


def came(
    x: Tensor, g: Tensor, state: dict[str, Tensor], t: Tensor, dither: Dither, options: CameOptions, shard: Shard
) -> Rule:
    """Make step `t` (from 1) of one tensor: new x, new state, and [RMS of u, its clip factor, mean confidence]."""
    o, (beta1, beta2, beta3), (eps1, eps2) = options, options.betas, options.eps
    dtype = x.dtype
    if shard.numel == 0:
        return x, state, torch.tensor([0.0, 1.0, 1.0], device=x.device)

    if o.maximize:
        g = -g
    b2 = beta2 if o.decay_rate is None else 1 - t**-o.decay_rate

    if o.factor is None:
        v = b2 * state["exp_avg_sq"] + (1 - b2) * (g * g + eps1)  # CAME-v
        new_state = {"exp_avg_sq": v}
        u = g * v.rsqrt()  # CAME-u
        u_sum, x_sum = yield [square_sum(u), square_sum(x)]
        u_norm = root(u_sum)
    else:
        squares = Averages("exp_avg_sq", g, eps1, b2, state, o.factor, shard)  # CAME-row, CAME-col
        u_norm, x_sum = yield from squares.update_norm(square_sum(x))
        new_state = squares.state()
        u = g * squares.rsqrt()  # CAME-u
    rms_u = u_norm.to(t.dtype) / math.sqrt(shard.numel)
    excess = (rms_u / o.clip_threshold).clamp(min=1)  # CAME-clip
    u = u / excess.to(dtype)  # CAME-clip

    m = beta1 * dequantize(o.forms, "exp_avg", state, u.shape).to(dtype) + (1 - beta1) * u  # CAME-m
    new_state |= quantize(o.forms, "exp_avg", m, state, dither)
    # From here on the average is used as it is stored, in the residual too, so that every backend may read it back.
    m = dequantize(o.forms, "exp_avg", new_state, u.shape).to(dtype)

    confidence, confidence_mean = torch.ones_like(m), torch.ones_like(rms_u)
    if o.factor is not None:
        residual = Averages("exp_avg_res", u - m, eps2, beta3, state, o.factor, shard)  # CAME-res
        correction = one_minus_power(beta3, t) if o.bias_correction else torch.ones_like(t)
        confidence_mean = (yield from residual.rsqrt_sum()) * correction.sqrt() / shard.numel
        new_state |= residual.state()
        confidence = residual.rsqrt() * correction.sqrt().to(dtype)
    if o.cautious:
        mask = (m * g.sign() > 0).to(dtype)  # m has the sign of the step, and m * g can underflow
        (kept,) = yield [mask.sum()]
        confidence = confidence * mask / (kept / shard.numel).clamp(min=1e-3)

    lr = o.lr * (root(x_sum) / math.sqrt(shard.numel)).clamp(min=o.scale_eps) if o.scale_parameter else o.lr
    x = x - lr * o.weight_decay * x
    x = x - lr * m * confidence  # CAME-x
    metrics = torch.stack([rms_u, 1 / excess, confidence_mean.to(rms_u.dtype)])
    return x, new_state, metrics


class Averages:
    """The averages of a tensor's squares over rows and over columns, after one more step.

    A shard of whole rows has the averages of its rows, and a part of each column's average; a shard of whole columns,
    the reverse. An average that is split is added up over the shards: each contributes its part of the new squares, and
    the first of the shards that keep the same old average contributes that, too. A shard that begins or ends inside a
    row has the averages of all rows and columns that it touches, and both are added up.
    """

    def __init__(
        self,
        name: str,
        a: Tensor,
        eps: float,
        beta: float | Tensor,
        state: dict[str, Tensor],
        factor: Factor,
        shard: Shard,
    ) -> None:
        q = shard.box(a * a + eps)
        axis = row_axis(q.dim(), factor)
        self.a, self.shard, self.name, self.old = a, shard, name, state
        self.down, self.across = (axis,), tuple(range(axis + 1, q.dim()))
        self.both = self.down + self.across
        self.row = self._average("row", q, beta, self.across)
        self.col = self._average("col", q, beta, self.down)
        self.mean = self.row.mean(dim=self.down, keepdim=True)
        self.split_down, self.split_across = shard.splits(self.down), shard.splits(self.across)

    def _average(self, which: str, q: Tensor, beta: float | Tensor, over: tuple[int, ...]) -> Tensor:
        """Return the average over some dims, kept as 1; this shard's part of it if these dims are split."""
        new = q.sum(dim=over, keepdim=True) / math.prod(self.shard.shape[dim] for dim in over)
        old = self.shard.led(self.old[f"{self.name}_{which}"].view(new.shape), over)
        return beta * old + (1 - beta) * new  # CAME-row, CAME-col, CAME-res

    def state(self) -> dict[str, Tensor]:
        """Return the averages in the shapes in which they are stored."""
        averages = {f"{self.name}_row": self.row, f"{self.name}_col": self.col}
        return {name: average.view(self.old[name].shape) for name, average in averages.items()}

    def rsqrt(self) -> Tensor:
        """Return 1 / sqrt(row col / mean(row)), in the shape of the tensor."""
        rsqrt = self.shard.unbox(rsqrt_of_ratio(self.row, self.mean) * self.col.rsqrt())
        return rsqrt.clamp(max=torch.finfo(rsqrt.dtype).max)  # zeros in rows and columns of zeros remain 0

    def update_norm(self, also: Tensor) -> Sums[tuple[Tensor, Tensor]]:
        """Return the norm of the tensor times `rsqrt()`, and the sum of `also`, over all shards."""
        if self.split_down != self.split_across:
            whole, split, kept = self._whole_average()
            inner, average, mean, also = yield from self._add_up_one((self.a**2 / whole).sum(split, True), split, also)
            return (mean * (inner / average).sum(kept, True)).sum().sqrt(), also
        if self.split_down:
            yield from self._add_up_both()
        update_sum, also = yield [square_sum(self.a * self.rsqrt()), also]
        return root(update_sum), also

    def rsqrt_sum(self) -> Sums[Tensor]:
        """Return the sum of `rsqrt()` over all shards."""
        if self.split_down != self.split_across:
            whole, split, kept = self._whole_average()
            inner, average, mean = yield from self._add_up_one(whole.rsqrt().sum(split, True), self.both)
            return (mean.sqrt() * inner * average.rsqrt().sum(kept, True)).sum()
        if self.split_down:
            row, col, mean = yield from self._add_up_both()
            return (mean.sqrt() * row.rsqrt().sum(self.down, True) * col.rsqrt().sum(self.across, True)).sum()
        (rsqrt_sum,) = yield [self.rsqrt().sum()]
        return rsqrt_sum

    def _whole_average(self) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        """Return the average that is not split, the dims that are split, and those that are not."""
        return (self.row, self.down, self.across) if self.split_down else (self.col, self.across, self.down)

    def _add_up_one(self, inner: Tensor, over: tuple[int, ...], *also: Tensor) -> Sums[list[Tensor]]:
        """Add up `inner`, sums over some dims, the average that is split, and `also`; return them with the mean."""
        shard, (whole, split, _) = self.shard, self._whole_average()
        part = self.col if self.split_down else self.row
        sent = [shard.spread(inner, over), shard.spread(part, split), shard.spread(whole.sum(split, True), self.both)]
        inner, average, total, *rest = yield [*sent, *also]
        if self.split_down:
            self.col, mean = shard.cut(average, split), total / shard.shape[split[0]]
        else:
            self.row, mean = shard.cut(average, split), average.mean(self.down, True)
        self.mean = shard.cut(mean, self.both)
        return [inner, average, mean, *rest]

    def _add_up_both(self) -> Sums[tuple[Tensor, Tensor, Tensor]]:
        """Add up both averages; return them and the mean."""
        shard = self.shard
        row, col = yield [shard.spread(self.row, self.across), shard.spread(self.col, self.down)]
        mean = row.mean(self.down, True)
        self.row, self.col = shard.cut(row, self.across), shard.cut(col, self.down)
        self.mean = shard.cut(mean, self.both)
        return row, col, mean


class Came(Stepper[CameOptions]):
    """CAME for some buckets on one device."""

    rule = staticmethod(came)
