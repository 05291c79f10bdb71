"""CAME in plain torch, for any device: the reference's mathematics on pieces of tensors of bounded size.

Temporaries are a few pieces and the factors of one tensor, never copies of the model. The lines tagged `CAME-...`
follow `reference/came.py`, which has the details.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bighorn.capabilities import wide
from bighorn.kernels.arithmetic import (
    compute_dtype,
    count_step,
    one_minus_power,
    rsqrt_of_ratio,
    square_sums,
    write,
)
from bighorn.kernels.bucket import Bucket, rows_with_grad
from bighorn.kernels.codec import dequantize, quantize
from bighorn.kernels.foreach import pieces
from bighorn.kernels.options import CameOptions
from bighorn.kernels.reference import came as reference
from bighorn.kernels.reference.came import row_axis
from bighorn.kernels.rounding import AUX_STATE, load_weight, positions, random_bits, rng_key, store_weight

SMALL = 16
"""Tensors up to 1 / SMALL of a piece are copied together, since calls cost more than copies; others stay in place."""

Index = tuple[slice, ...]
Values = Callable[[Index], Tensor]
"""A function that computes a piece of a tensor that exists only in pieces."""

ALL = slice(None)


class Came(reference.Came):
    """CAME for some buckets on one device."""

    def __init__(self, buckets: list[Bucket[CameOptions]]) -> None:
        super().__init__(buckets)
        self.scratch = Scratch(piece_size(buckets[0].metrics.device))

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares."""
        grads = [grad for bucket in self.buckets for grad in bucket.grads if grad is not None]
        parts = [part for grad in grads for part in pieces.pieces_of(grad, self.scratch.limit)]
        return square_sums(parts, self.buckets[0].metrics.device).sum(dim=0)

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of every bucket, as `reference.Came.step`."""
        for bucket in self.buckets:
            present = {i: bucket.params[i] for i in rows_with_grad(bucket.grads)}
            for rows in batches(present, self.scratch.limit):
                Batch(bucket, rows, self.scratch, grad_scale, apply_mask).step()
            count_step(bucket.unique_steps, apply_mask)


def piece_size(device: torch.device) -> int:
    """Return the elements of a piece, in float32."""
    return pieces.piece_bytes(device) // 4


def batches(params: dict[int, Tensor], limit: int) -> Iterator[list[int]]:
    """Yield rows to process together: small ones of one shape, up to `limit` elements in all, or a single one."""
    small, most = defaultdict[torch.Size, list[int]](list), limit // SMALL
    for i, x in params.items():
        if x.numel() > most:
            yield [i]
        else:
            small[x.shape].append(i)
    for shape, rows in small.items():
        count = limit // max(shape.numel(), 1)
        yield from (rows[i : i + count] for i in range(0, len(rows), count))


class Scratch:
    """Memory that is kept from step to step, since fresh memory costs a CPU a page fault for every 4 KB.

    Attributes:
        limit: The elements of a piece, which it has memory for.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.memory: dict[str, Tensor] = {}
        self.sent: dict[tuple[object, ...], tuple[list[int], Tensor]] = {}

    def numbers(self, key: tuple[object, ...], values: list[int], device: torch.device) -> Tensor:
        """Return numbers on the device; those of a key are sent to it when they change."""
        kept = self.sent.get(key)
        if kept is None or kept[0] != values:
            kept = self.sent[key] = values, pieces.sent(values, device)
        return kept[1]

    def like(self, name: str, a: Tensor) -> Tensor:
        """Return memory under a name, uninitialized, in the shape, order and dtype of `a`."""
        strides = torch.empty_like(a, device="meta").stride()
        memory = self.memory.get(name)
        if memory is None or memory.numel() < a.numel() or memory.dtype != a.dtype:
            memory = self.memory[name] = torch.empty(a.numel(), dtype=a.dtype, device=a.device)
        return memory.as_strided(a.shape, strides)


class Batch:
    """One step of tensors of one shape: a single one in place, or several that are stacked.

    Dim 0 of every array counts the tensors; a piece of an array has all of them.
    """

    def __init__(
        self,
        bucket: Bucket[CameOptions],
        rows: list[int],
        scratch: Scratch,
        grad_scale: Tensor | float,
        apply_mask: Tensor | None,
    ) -> None:
        o, x = bucket.options, as_vector(bucket.params[rows[0]])
        columns = {"x": bucket.params, **bucket.state, "metrics": list(bucket.metrics)}
        self.scratch = scratch
        self.options, self.apply_mask, self.dtype, self.size = o, apply_mask, compute_dtype(x), x.numel()
        self.targets = {name: [as_vector(tensors[i]) for i in rows] for name, tensors in columns.items()}
        self.arrays = {name: together(tensors) for name, tensors in self.targets.items()}
        self.g = together([as_vector(grad) for i in rows if (grad := bucket.grads[i]) is not None])
        self.grad_scale = -grad_scale if o.maximize else grad_scale
        self.t = torch.stack([bucket.steps[i] for i in rows]).to(wide(x.device)) + 1
        self.axis = row_axis(x, o.factor) if o.factor else -1
        if o.weight_rounding == "stochastic":
            batch, keys = (id(bucket), rows[0]), [rng_key(o.rounding_seed, bucket.param_ids[i]) for i in rows]
            self.keys = scratch.numbers(("keys", *batch), keys, x.device)
            self.row_offsets = scratch.numbers(("offsets", *batch), [bucket.row_offsets[i] for i in rows], x.device)
        # Quantization blocks are not divided, since they run along a row.
        deep = "exp_avg_scale" not in bucket.state
        self.pieces = [(ALL, *at) for at in slices(x.shape, scratch.limit, deep)]

    def step(self) -> None:
        """Make four passes: the second moment, the RMS of u, the average with its residual, the parameter."""
        metrics = [torch.zeros_like(self.t), torch.ones_like(self.t), torch.ones_like(self.t)]
        if self.size:
            update = self.second_moment()
            if len(self.pieces) == 1:
                update = kept(update(self.pieces[0]))
            rms_u = self.rms(update)
            excess = (rms_u / self.options.clip_threshold).clamp(min=1)
            r, c = self.confidence(update, excess)
            self.move(r, c)
            metrics = [rms_u, 1 / excess, self.mean_of_product(r, c).to(rms_u.dtype)]
        write(self.arrays["metrics"], torch.stack(metrics, dim=1), self.apply_mask)
        if len(self.targets["x"]) > 1:
            for name, array in self.arrays.items():
                torch._foreach_copy_(self.targets[name], list(array.unbind()))

    def second_moment(self) -> Values:
        """Advance the second moment, and return a function that computes a piece of u."""
        o = self.options
        if o.decay_rate is None:
            b2, gain = self.beta_pair(o.betas[1])
        else:
            gain = self.t**-o.decay_rate
            b2 = 1 - gain
        if o.factor is None:
            v = self.arrays["exp_avg_sq"]
            for at in self.pieces:
                q = self.square(self.gradient(at)).add_(o.eps[0])
                write(v[at], q.mul_(each(gain, q)).addcmul_(v[at], each(b2, q)), self.apply_mask)  # CAME-v
            return lambda at: torch.rsqrt(v[at], out=self.scratch.like("u", v[at])).mul_(self.gradient(at))  # CAME-u
        r, c = self.factors("exp_avg_sq", self.gradient, (b2, gain), o.eps[0])  # CAME-row, CAME-col
        return lambda at: self.times(self.gradient(at), r, at).mul_(part(c, at))  # CAME-u

    def confidence(self, update: Values, excess: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the average and the averages of its residual, and return r and c, whose product is the confidence."""
        o = self.options

        def residual(at: Index) -> Tensor:
            u = update(at)
            u.div_(each(excess, u))  # CAME-clip
            return u.sub_(self.advance(at, u))

        if o.factor is None:
            for at in self.pieces:
                residual(at)
            one = self.g.new_ones([1] * self.g.dim(), dtype=self.dtype)
            return one, one
        correction = one_minus_power(o.betas[2], self.t) if o.bias_correction else None
        return self.factors("exp_avg_res", residual, self.beta_pair(o.betas[2]), o.eps[1], correction)

    def beta_pair(self, beta: float) -> tuple[Tensor, Tensor]:
        """Return beta and 1 - beta for each tensor; in float32, the difference of tensors would be 6e-4 off."""
        return torch.full_like(self.t, beta), torch.full_like(self.t, 1 - beta)

    def factors(
        self, name: str, values: Values, betas: tuple[Tensor, Tensor], eps: float, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Advance the averages of rows and columns of squared values, and return r and c of `rsqrt_factors`."""
        axis, columns, shape = self.axis, tuple(range(self.axis + 1, 0)), self.g.shape
        beta, gain = betas
        row = self.g.new_zeros([*shape[: axis + 1], *[1] * len(columns)], dtype=self.dtype)
        col = self.g.new_zeros([*shape[:axis], 1, *shape[axis + 1 :]], dtype=self.dtype)
        for at in self.pieces:
            q = self.square(values(at))
            part(row, at).add_(q.sum(dim=columns, keepdim=True))
            part(col, at).add_(q.sum(dim=axis, keepdim=True))

        old_row, old_col = self.arrays[f"{name}_row"], self.arrays[f"{name}_col"]
        row = (row / math.prod(shape[axis + 1 :]) + eps).view_as(old_row)
        col = (col / shape[axis] + eps).view_as(old_col)
        row = each(beta, row) * old_row + each(gain, row) * row  # CAME-row, CAME-res
        col = each(beta, col) * old_col + each(gain, col) * col  # CAME-col, CAME-res
        write(old_row, row, self.apply_mask)
        write(old_col, col, self.apply_mask)
        if correction is not None:
            row, col = row / each(correction, row), col / each(correction, col)
        return rsqrt_factors(row, col, axis)

    def advance(self, at: Index, u: Tensor) -> Tensor:
        """Advance a piece of the average, and return it as it is (or would be) stored."""
        beta1 = self.options.betas[0]
        m = self.average(at).to(self.dtype, copy=self.apply_mask is not None)
        m = m.mul_(beta1).add_(u, alpha=1 - beta1)  # CAME-m
        array = self.arrays["exp_avg"]
        if array.dtype == self.dtype and self.apply_mask is None:
            return m  # it was computed in place
        new = quantize("exp_avg", m.flatten(0, 1), self.arrays)
        for name, value in new.items():
            target = self.arrays[name][at if name == "exp_avg" else at[:2]]
            write(target, value.view(target.shape), self.apply_mask)
        return dequantize("exp_avg", {**self.arrays, **new}).view(u.shape).to(self.dtype)

    def average(self, at: Index) -> Tensor:
        """Return a piece of the average as it is stored."""
        m = self.arrays["exp_avg"][at]
        if m.dtype != torch.int8:
            return m
        scales = self.arrays["exp_avg_scale"][at[:2]]
        in_rows = {**self.arrays, "exp_avg": m.flatten(0, 1), "exp_avg_scale": scales.flatten(0, 1)}
        return dequantize("exp_avg", in_rows).view(m.shape)

    def move(self, r: Tensor, c: Tensor) -> None:
        """Step the parameter, with the confidence r c."""
        o = self.options
        lr = torch.ones_like(self.t) * o.lr
        if o.scale_parameter:
            lr = lr * self.rms(self.weight).clamp(min=o.scale_eps)
        r = r * each(lr, r)
        for at in self.pieces:
            target = self.arrays["x"][at]
            x = load_weight(target, self.beside(at))
            if x is target and self.apply_mask is not None:
                x = x.clone()
            x.addcmul_(x, each(lr * o.weight_decay, x), value=-1)
            x.addcmul_(self.times(self.average(at).to(self.dtype), r, at), part(c, at), value=-1)  # CAME-x
            if x is not target:
                for name, value in store_weight(x, target.dtype, o.weight_rounding, self.bits(at)).items():
                    write(self.arrays[name][at], value, self.apply_mask)

    def weight(self, at: Index) -> Tensor:
        """Return the values that a piece of the parameter stands for; the piece itself if no conversion is needed."""
        return load_weight(self.arrays["x"][at], self.beside(at))

    def beside(self, at: Index) -> dict[str, Tensor]:
        """Return a piece of the parameter's aux state."""
        return {name: self.arrays[name][at] for name in AUX_STATE[self.options.weight_rounding]}

    def bits(self, at: Index) -> Tensor | None:
        """Return random bits for a piece, if its rounding mode uses any."""
        if self.options.weight_rounding != "stochastic":
            return None
        whole, piece = self.g.shape[1:], self.g[at].shape[1:]
        within = positions(piece, [along.start or 0 for along in at[1:]], whole, self.g.device)
        index = within + self.row_offsets.view(-1, *[1] * len(whole))
        return random_bits(each(self.keys, index), each(self.t, index), index)

    def gradient(self, at: Index) -> Tensor:
        """Return a piece of the gradient as the equations use it; it can be the gradient itself, so it is read-only."""
        g = self.g[at].to(self.dtype)
        if isinstance(self.grad_scale, float) and self.grad_scale == 1:
            return g
        return torch.mul(g, self.grad_scale, out=self.scratch.like("gradient", g))

    def rms(self, values: Values) -> Tensor:
        """Return the root of the mean square of each tensor, float64."""
        dims = tuple(range(1, self.g.dim()))
        squares = [self.square(values(at)).sum(dim=dims).to(self.t.dtype) for at in self.pieces]
        return torch.stack(squares).sum(dim=0).div(self.size).sqrt()

    def square(self, a: Tensor) -> Tensor:
        """Return the squares of a piece, which the next call overwrites."""
        return torch.mul(a, a, out=self.scratch.like("square", a))

    def times(self, a: Tensor, r: Tensor, at: Index) -> Tensor:
        """Return a piece times its part of r, which the next call overwrites."""
        return torch.mul(a, part(r, at), out=self.scratch.like("u", a))

    def mean_of_product(self, r: Tensor, c: Tensor) -> Tensor:
        """Return the mean of r c over each tensor, as the mean of mean(r) mean(c) over its matrices."""
        columns = tuple(range(self.axis + 1, 0))
        if not columns:
            return torch.ones_like(self.t)
        return (r.mean(dim=self.axis, keepdim=True) * c.mean(dim=columns, keepdim=True)).flatten(1).mean(dim=1)


def rsqrt_factors(row: Tensor, col: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return factors r and c whose product is 1 / sqrt(row col / mean(row)) in the shape of the parameter."""
    r = rsqrt_of_ratio(row, row.mean(dim=-1, keepdim=True))
    return r.view(*r.shape, *[1] * (-axis - 1)), col.rsqrt().unsqueeze(axis)


def slices(shape: torch.Size, limit: int, deep: bool) -> Iterator[Index]:
    """Yield the indices of pieces of about `limit` elements along the outermost dims; if not `deep`, of dim 0."""
    size = math.prod(shape[1:])
    count = max(limit // max(size, 1), 1)
    for i in range(0, shape[0], count):
        if deep and size > limit:
            yield from ((slice(i, i + 1), *inner) for inner in slices(shape[1:], limit, deep))
        else:
            yield (slice(i, i + count), *[ALL] * (len(shape) - 1))


def part(a: Tensor, at: Index) -> Tensor:
    """Return the part of an array that belongs to a piece of the parameter; dims of the array may be 1 instead."""
    return a[tuple(ALL if size == 1 else index for index, size in zip(at, a.shape, strict=True))]


def as_vector(a: Tensor) -> Tensor:
    """Return a 0-dim tensor as a vector of one element, and any other tensor unchanged."""
    return a if a.dim() else a.view(1)


def together(tensors: list[Tensor]) -> Tensor:
    """Return tensors of one shape along a new dim 0: a view of a single one, copies of several."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def each(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per tensor in a shape that can be multiplied with `like`."""
    return values.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def kept(value: Tensor) -> Values:
    """Return a function that returns the only piece of a tensor."""
    return lambda _: value
