"""CAME in plain torch, for any device: the reference's mathematics on pieces of tensors of bounded size.

Temporaries are a few pieces and the factors of one tensor, never copies of the model. The lines tagged `CAME-...`
follow `reference/came.py`, which has the details.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bighorn.capabilities import wide
from bighorn.kernels.arithmetic import compute_dtype, count_step, one_minus_power, write
from bighorn.kernels.bucket import Bucket, row_axis, rows_with_grad
from bighorn.kernels.codec import NEAREST, Dither, dequantize, quantize
from bighorn.kernels.foreach import pieces
from bighorn.kernels.foreach.came_lists import CameGroup
from bighorn.kernels.foreach.lists import ListStepper
from bighorn.kernels.foreach.stacks import ALL, Index, Stack, batches, slices, stacked
from bighorn.kernels.options import CameOptions
from bighorn.kernels.reference import came as reference
from bighorn.kernels.rounding import (
    AUX_STATE,
    dither,
    load_weight,
    positions,
    random_bits,
    rng_key,
    spread,
    store_weight,
)
from bighorn.square_sums import square_sums

Values = Callable[[Index], Tensor]
"""A function that computes a piece of a tensor that exists only in pieces."""


class Came(ListStepper[CameOptions], reference.Came):
    """CAME for some buckets on one device."""

    group = CameGroup

    def __init__(self, buckets: list[Bucket[CameOptions]]) -> None:
        super().__init__(buckets)
        self.scratch = Scratch()

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares."""
        if self.in_lists:
            return super().square_sum()
        grads = [grad for bucket in self.buckets for grad in bucket.grads if grad is not None]
        parts = [part for grad in grads for part in pieces.pieces_of(grad, self.scratch.limit)]
        return square_sums(parts, self.buckets[0].metrics.device).sum(dim=0)

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of every bucket, as `reference.Came.step`."""
        if self.in_lists:
            super().step(grad_scale, apply_mask)
            return
        for bucket in self.buckets:
            present = {i: bucket.params[i] for i in rows_with_grad(bucket.grads)}
            grads = [x if grad is None else grad for x, grad in zip(bucket.params, bucket.grads, strict=True)]
            columns = {"g": grads, "x": bucket.params, **bucket.state, "metrics": list(bucket.metrics)}
            for rows in batches(present, self.scratch.limit, self.scratch.small):
                Batch(bucket, columns, rows, self.scratch, grad_scale, apply_mask).step()
            count_step(bucket.unique_steps, apply_mask)


class Scratch:
    """Memory that is kept from step to step, since fresh memory costs a CPU a page fault for every 4 KB.

    Attributes:
        limit: The elements of a piece, which it has memory for.
        small: Tensors up to this size are copied together, since calls cost more than copies; others stay in place.
    """

    def __init__(self) -> None:
        self.limit = pieces.piece_bytes() // 4
        self.small = self.limit // 16
        self.memory: dict[str, Tensor] = {}

    def like(self, name: str, a: Tensor) -> Tensor:
        """Return memory under a name, uninitialized, in the shape, order and dtype of `a`."""
        strides = torch.empty_like(a, device="meta").stride()
        memory = self.memory.get(name)
        if memory is None or memory.numel() < a.numel() or memory.dtype != a.dtype:
            memory = self.memory[name] = torch.empty(a.numel(), dtype=a.dtype, device=a.device)
        return memory.as_strided(a.shape, strides)


class Batch:
    """One step of a single tensor, in pieces, or of several small ones together."""

    def __init__(
        self,
        bucket: Bucket[CameOptions],
        columns: dict[str, list[Tensor]],
        rows: list[list[int]],
        scratch: Scratch,
        grad_scale: Tensor | float,
        apply_mask: Tensor | None,
    ) -> None:
        o, self.counts = bucket.options, list(map(len, rows))
        self.bucket, self.rows = bucket, [i for of_shape in rows for i in of_shape]
        self.scratch, self.options, self.apply_mask = scratch, o, apply_mask
        self.stacks = stacked(columns, rows, bucket.params[self.rows[0]].numel() > scratch.small)
        self.wholes = {name: stack.whole for name, stack in self.stacks.items()}
        self.g = self.stacks.pop("g")
        self.dtype, self.device = compute_dtype(self.wholes["x"]), self.wholes["x"].device
        self.grad_scale = -grad_scale if o.maximize else grad_scale
        self.t = torch.stack([bucket.steps[i] for i in self.rows]).to(wide(self.device)) + 1
        arrays = self.arrays(self.g.whole)
        dims = [array.dim() - 1 for array in arrays]
        self.axes = [row_axis(count, o.factor) - count if o.factor else -1 for count in dims]
        self.in_blocks = "exp_avg_scale" in bucket.state
        self.pieces: list[Index] = [(ALL,)]
        if len(arrays) == 1:  # Quantization blocks are not divided, since they run along a row.
            self.pieces = [(ALL, *at) for at in slices(arrays[0].shape[1:], scratch.limit, not self.in_blocks)]

    def step(self) -> None:
        """Make four passes: the second moment, the RMS of u, the average with its residual, the parameter."""
        if self.g.whole.numel():
            update = self.second_moment()
            if len(self.pieces) == 1:
                update = kept(update(self.pieces[0]))
            rms_u = self.rms(update)
            excess = (rms_u / self.options.clip_threshold).clamp(min=1)
            r, c = self.confidence(update, excess)
            mean = self.mean_of_product(r, c)
            self.move(r, c)
            metrics = [rms_u, 1 / excess, mean.to(rms_u.dtype)]
        else:
            metrics = [torch.zeros_like(self.t), torch.ones_like(self.t), torch.ones_like(self.t)]
        table = self.wholes["metrics"]
        write(table, torch.stack(metrics, dim=1).view(table.shape), self.apply_mask)
        for stack in self.stacks.values():
            if stack.copied:
                arrays = self.arrays(stack.whole, stack)
                torch._foreach_copy_(stack.tensors, [each for array in arrays for each in array.unbind()])

    def arrays(self, whole: Tensor, stack: Stack | None = None) -> list[Tensor]:
        """Return the part of each shape, whose dim 0 counts its tensors. For one shape this is a piece as it is."""
        shapes = (stack or self.g).shapes
        if len(shapes) == 1:
            return [whole]
        parts = whole.split_with_sizes([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def second_moment(self) -> Values:
        """Advance the second moment, and return a function that computes a piece of u."""
        o = self.options
        if o.decay_rate is None:
            betas = self.beta_pair(o.betas[1])
        else:
            gain = self.t**-o.decay_rate
            betas = (1 - gain).to(self.dtype), gain.to(self.dtype)
        if o.factor is None:
            v = self.wholes["exp_avg_sq"]
            for at in self.pieces:
                q = self.square(self.gradient(at)).add_(o.eps[0])
                write(v[at], self.average(self.g, v[at], q, betas), self.apply_mask)  # CAME-v
            return lambda at: torch.rsqrt(v[at], out=self.scratch.like("u", v[at])).mul_(self.gradient(at))  # CAME-u
        r, c = self.factors("exp_avg_sq", self.gradient, betas, o.eps[0])  # CAME-row, CAME-col

        def update(at: Index) -> Tensor:
            u = self.times(self.gradient(at), r, at)
            torch._foreach_mul_(self.arrays(u), self.parts(c, at))  # CAME-u
            return u

        return update

    def confidence(self, update: Values, excess: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Advance the average and the averages of its residual, and return r and c, whose product is the confidence."""
        o, excess = self.options, excess.to(self.dtype)

        def residual(at: Index) -> Tensor:
            u = update(at)
            arrays = self.arrays(u)
            torch._foreach_div_(arrays, self.each(excess, arrays))  # CAME-clip
            return u.sub_(self.advance(at, u))

        if o.factor is None:
            for at in self.pieces:
                residual(at)
            arrays = self.arrays(self.g.whole)
            r, c = torch.ones(2, len(self.rows), dtype=self.dtype, device=self.device)
            return self.each(r, arrays), self.each(c, arrays)
        correction = one_minus_power(o.betas[2], self.t).to(self.dtype) if o.bias_correction else None
        return self.factors("exp_avg_res", residual, self.beta_pair(o.betas[2]), o.eps[1], correction)

    def beta_pair(self, beta: float) -> tuple[Tensor, Tensor]:
        """Return beta and 1 - beta for each tensor; in float32, the difference of tensors would be 6e-4 off."""
        pair = [torch.full(self.t.shape, b, dtype=self.dtype, device=self.device) for b in (beta, 1 - beta)]
        return pair[0], pair[1]

    def average(self, stack: Stack, old: Tensor, new: Tensor, betas: tuple[Tensor, Tensor]) -> Tensor:
        """Return beta old + (1 - beta) new, in the memory of `new`."""
        olds, news = self.arrays(old, stack), self.arrays(new, stack)
        beta, gain = (self.each(values, news) for values in betas)
        torch._foreach_mul_(news, gain)
        torch._foreach_addcmul_(news, olds, beta)
        return new

    def factors(
        self, name: str, values: Values, betas: tuple[Tensor, Tensor], eps: float, correction: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Advance the averages of rows and columns of squared values.

        Return r and c of each array, whose product is 1 / sqrt(row col / mean(row)) in the shape of the parameter.
        """
        stacks = self.stacks[f"{name}_row"], self.stacks[f"{name}_col"]
        averages = [torch.zeros_like(stack.whole, dtype=self.dtype) for stack in stacks]
        rows, cols = (self.arrays(new, stack) for stack, new in zip(stacks, averages, strict=True))
        self.add_means(values, *self.spread(rows, cols))
        for stack, new in zip(stacks, averages, strict=True):
            self.average(stack, stack.whole, new.add_(eps), betas)  # CAME-row, CAME-col, CAME-res
            write(stack.whole, new, self.apply_mask)
        means = [row.mean(dim=-1, keepdim=True) for row in rows]
        if correction is not None:
            torch._foreach_mul_(means, self.each(correction, means))
        torch._foreach_sqrt_(means)
        for new in averages:
            new.rsqrt_()
        torch._foreach_mul_(rows, means)
        return self.spread(rows, cols)

    def spread(self, rows: list[Tensor], cols: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return averages of rows and of columns with dims of 1 in place of those over which they are averages."""
        r = [row.view(*row.shape, *[1] * (-axis - 1)) for row, axis in zip(rows, self.axes, strict=True)]
        return r, [col.unsqueeze(axis) for col, axis in zip(cols, self.axes, strict=True)]

    def add_means(self, values: Values, rows: list[Tensor], cols: list[Tensor]) -> None:
        """Add the means of squared values over columns and over rows."""
        for at in self.pieces:
            arrays = self.arrays(self.square(values(at)))
            sums, shares = [], []
            for q, axis, shape in zip(arrays, self.axes, self.g.shapes, strict=True):
                across = tuple(range(axis + 1, 0))
                sums += [q.sum(dim=across, keepdim=True), q.sum(dim=axis, keepdim=True)]
                shares += [1 / math.prod(shape[axis + 1 :]), 1 / shape[axis]]
            torch._foreach_mul_(sums, shares)
            torch._foreach_add_(self.parts(rows, at), sums[::2])
            torch._foreach_add_(self.parts(cols, at), sums[1::2])

    def advance(self, at: Index, u: Tensor) -> Tensor:
        """Advance a piece of the average, and return it as it is (or would be) stored."""
        beta1 = self.options.betas[0]
        m = self.momentum(at).to(self.dtype, copy=self.apply_mask is not None)
        m = m.mul_(beta1).add_(u, alpha=1 - beta1)  # CAME-m
        if self.wholes["exp_avg"].dtype == self.dtype and self.apply_mask is None:
            return m  # it was computed in place
        rows = zip(self.in_rows("x", m), self.shifts(at), strict=False)
        new = [quantize("exp_avg", each, self.wholes, shifts) for each, shifts in rows]
        for name in new[0]:
            target = self.wholes[name][at if name == "exp_avg" and not self.in_blocks else at[:2]]
            write(target, joined([each[name] for each in new], target), self.apply_mask)
        return joined([dequantize("exp_avg", {**self.wholes, **each}) for each in new], u).to(self.dtype)

    def momentum(self, at: Index) -> Tensor:
        """Return a piece of the average as it is stored."""
        if not self.in_blocks:
            return self.wholes["exp_avg"][at]
        codes, scales = (self.in_rows(name, self.wholes[name][at[:2]]) for name in ("exp_avg", "exp_avg_scale"))
        stored = [{"exp_avg": each, "exp_avg_scale": scale} for each, scale in zip(codes, scales, strict=True)]
        return joined([dequantize("exp_avg", {**self.wholes, **each}) for each in stored], self.wholes["x"][at])

    def in_rows(self, name: str, values: Tensor) -> list[Tensor]:
        """Return what is encoded by itself: the rows of the tensors of each shape, or all values without blocks."""
        return [each.flatten(0, 1) for each in self.arrays(values, self.stacks[name])] if self.in_blocks else [values]

    def move(self, r: list[Tensor], c: list[Tensor]) -> None:
        """Step the parameter, with the confidence r c; r is overwritten."""
        o = self.options
        lr = torch.ones_like(self.t) * o.lr
        if o.scale_parameter:
            lr = lr * self.rms(self.weight).clamp(min=o.scale_eps)
        torch._foreach_mul_(r, self.each(lr.to(self.dtype), r))
        decay = (lr * o.weight_decay).to(self.dtype)
        for at in self.pieces:
            target = self.wholes["x"][at]
            x = load_weight(target, self.beside(at))
            if x is target and self.apply_mask is not None:
                x = x.clone()
            arrays = self.arrays(x)
            torch._foreach_addcmul_(arrays, arrays, self.each(decay, arrays), value=-1)
            m = self.times(self.momentum(at).to(self.dtype), r, at)
            torch._foreach_addcmul_(arrays, self.arrays(m), self.parts(c, at), value=-1)  # CAME-x
            if x is not target:
                for name, value in store_weight(x, target.dtype, o.weight_rounding, self.bits(at)).items():
                    write(self.wholes[name][at], value, self.apply_mask)

    def weight(self, at: Index) -> Tensor:
        """Return the values that a piece of the parameter stands for; the piece itself if no conversion is needed."""
        return load_weight(self.wholes["x"][at], self.beside(at))

    def beside(self, at: Index) -> dict[str, Tensor]:
        """Return a piece of the parameter's aux state."""
        return {name: self.wholes[name][at] for name in AUX_STATE[self.options.weight_rounding]}

    def shifts(self, at: Index) -> Iterator[Dither]:
        """Return the dither of a piece, for each of `in_rows`."""
        if not self.options.packed:
            return itertools.repeat(NEAREST)
        return iter(self.in_rows("x", dither(*self.positions(at)).view(self.wholes["x"][at].shape)))

    def bits(self, at: Index) -> Tensor | None:
        """Return random bits for a piece, if its rounding mode uses any."""
        if self.options.weight_rounding != "stochastic":
            return None
        return random_bits(*self.positions(at)).view(self.wholes["x"][at].shape)

    def positions(self, at: Index) -> tuple[Tensor | int, Tensor, Tensor]:
        """Return the arguments of `random_bits` for the elements of a piece."""
        keys = [rng_key(self.options.rounding_seed, self.bucket.param_ids[i]) for i in self.rows]
        firsts = [self.bucket.row_offsets[i] for i in self.rows]
        if len(self.rows) == 1:
            whole, piece = self.g.whole.shape[1:], self.g.whole[at].shape[1:]
            index = positions(piece, [along.start or 0 for along in at[1:]], whole, self.device) + firsts[0]
            return keys[0], self.t, index
        sizes = [tensor.numel() for tensor in self.g.tensors]
        each = [torch.arange(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
        return spread(torch.tensor(keys), sizes), spread(self.t, sizes), torch.cat(each)

    def gradient(self, at: Index) -> Tensor:
        """Return a piece of the gradient as the equations use it; it can be the gradient itself, so it is read-only."""
        g = self.g.whole[at].to(self.dtype)
        if isinstance(self.grad_scale, float) and self.grad_scale == 1:
            return g
        return torch.mul(g, self.grad_scale, out=self.scratch.like("gradient", g))

    def rms(self, values: Values) -> Tensor:
        """Return the root of the mean square of each tensor, in the widest dtype."""
        means = torch.zeros_like(self.t)
        for at in self.pieces:
            arrays = self.arrays(self.square(values(at)))
            sums = torch.cat([q.flatten(1).mean(dim=1) for q in arrays]).to(self.t.dtype)
            means.add_(sums, alpha=sum(q.numel() for q in arrays) / self.g.whole.numel())
        return means.sqrt()

    def square(self, a: Tensor) -> Tensor:
        """Return the squares of a piece, which the next call overwrites."""
        return torch.mul(a, a, out=self.scratch.like("square", a))

    def times(self, a: Tensor, r: list[Tensor], at: Index) -> Tensor:
        """Return a piece times its part of r, which the next call overwrites."""
        product = self.scratch.like("u", a)
        if len(r) == 1:
            torch.mul(self.arrays(a)[0], self.parts(r, at)[0], out=self.arrays(product)[0])
        else:
            torch._foreach_mul_(self.arrays(product.copy_(a)), r)
        return product

    def parts(self, factors: list[Tensor], at: Index) -> list[Tensor]:
        """Return the parts of the factors of each array that belong to a piece."""
        return [part(factors[0], at)] if len(factors) == 1 else factors

    def each(self, values: Tensor, arrays: list[Tensor]) -> list[Tensor]:
        """Return one value per tensor in shapes that can be multiplied with the arrays."""
        of_shapes = values.split_with_sizes(self.counts)
        return [of.view(-1, *[1] * (array.dim() - 1)) for of, array in zip(of_shapes, arrays, strict=True)]

    def mean_of_product(self, r: list[Tensor], c: list[Tensor]) -> Tensor:
        """Return the mean of r c over each tensor, as the mean of mean(r) mean(c) over its matrices."""
        if self.options.factor is None:
            return torch.ones_like(self.t)
        means = []
        for row, col, axis in zip(r, c, self.axes, strict=True):
            of_rows = row.mean(dim=axis, keepdim=True)
            product = (of_rows * col.mean(dim=tuple(range(axis + 1, 0)), keepdim=True)).flatten(1)
            means.append(product.mean(dim=1) if product.shape[1] > 1 else product[:, 0])
        return torch.cat(means)


def part(a: Tensor, at: Index) -> Tensor:
    """Return the part of an array that belongs to a piece of the parameter; dims of the array may be 1 instead."""
    return a[tuple(ALL if size == 1 else index for index, size in zip(at, a.shape, strict=True))]


def joined(values: list[Tensor], like: Tensor) -> Tensor:
    """Return the values of all arrays as one tensor in the shape of `like`."""
    return values[0].reshape(like.shape) if len(values) == 1 else torch.cat([each.flatten() for each in values])


def kept(value: Tensor) -> Values:
    """Return a function that returns the only piece of a tensor."""
    return lambda _: value
