"""CAME in plain torch, for any device: lists of tensors, whose matrices of one shape are added up together.

Of the temporaries only one is as large as the parameters: it is the squared gradient, the update, the squared residual
and the weighted average in turn. The lines tagged `CAME-...` follow `reference/came.py`, which has the details.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from bighorn._kernels.arithmetic import one_minus_power
from bighorn._kernels.bucket import Bucket, Shard, matrix_shape, row_axis
from bighorn._kernels.foreach.lists import Group, ListStepper, chosen, flat, parted, sent
from bighorn._kernels.options import CameOptions
from bighorn._kernels.reference import came as reference
from bighorn._kernels.rounding import spread
from bighorn._square_sums import root, square_sums


class Matrices(NamedTuple):
    """Neighbours of one shape: the number of tensors, the matrices of each, and the shape of a matrix."""

    tensors: int
    of_each: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of all matrices as one tensor."""
        return self.tensors * self.of_each, self.height, self.width


class CameGroup(Group[CameOptions]):
    """Rows that are stepped together, or this rank's shards of them. Matrices of one shape are neighbours."""

    def __init__(self, bucket: Bucket[CameOptions], slots: list[int]) -> None:
        shapes = {i: torch.Size(bucket.shards[i].shape) if bucket.shards else bucket.params[i].shape for i in slots}
        self.without_elements = [bucket.metrics[i] for i in slots if 0 in shapes[i]]
        if bucket.options.factor:
            slots = sorted(slots, key=lambda i: matrix_shape(shapes[i], bucket.options.factor))
        super().__init__(bucket, [i for i in slots if 0 not in shapes[i]])

    def step(self, scale: Tensor | float, apply_mask: Tensor | None) -> Iterator[Tensor]:
        """Advance the averages, clip the update, and move the weights."""
        for metrics in self.without_elements:
            metrics.fill_(1.0)[:1].zero_()
        if not self.slots:
            return
        o, t, x = self.bucket.options, self.counts(), self.weights()
        gain = 1 - o.betas[1] if o.decay_rate is None else t**-o.decay_rate
        arrays, u = self._memory()
        if o.factor is None:
            self._unfactored(u, gain, scale, apply_mask)
        else:
            self._fill(u, scale, apply_mask)
            r, c, _ = yield from self._factors("exp_avg_sq", arrays, u, o.eps[0], gain, None, apply_mask)
            self._fill(u, scale, apply_mask)
            torch._foreach_mul_(arrays, r)
            torch._foreach_mul_(arrays, c)  # CAME-u
        sums = square_sums([*u, *x] if o.scale_parameter else u, self.device)
        yield sums.view(-1)
        rms = root(sums) / self._root_sizes.repeat(1 + o.scale_parameter)
        excess = (rms[: len(x)] / o.clip_threshold).clamp(min=1)  # CAME-clip
        torch._foreach_div_(u, self.each(excess))  # CAME-clip

        m = self.load("exp_avg")
        torch._foreach_mul_(m, self.unless(apply_mask, o.betas[0], 1.0))
        torch._foreach_add_(m, u, alpha=1 - o.betas[0])  # CAME-m
        m = self.store("exp_avg", m, t, apply_mask)
        confidence = torch.ones_like(excess)
        if o.factor is not None:
            torch._foreach_sub_(u, m)
            correction = one_minus_power(o.betas[2], t).to(self.dtype) if o.bias_correction else None
            r, c, inverse = yield from self._factors(
                "exp_avg_res", arrays, u, o.eps[1], 1 - o.betas[2], correction, apply_mask
            )
            confidence = self._mean_product(inverse)
        if o.cautious:
            self._fill(u, scale, apply_mask)
            agree = self.agreement(u, m)
        torch._foreach_copy_(u, m)
        del m
        if o.factor is not None:
            torch._foreach_mul_(arrays, r)
            torch._foreach_mul_(arrays, c)
        if o.cautious:
            yield from self.keep(agree, u)
        self.write_metrics([rms[: len(x)], 1 / excess, confidence.to(rms.dtype)], apply_mask)
        lr = rms[len(x) :].clamp(min=o.scale_eps) * o.lr if o.scale_parameter else o.lr
        self.subtract(x, x, lr * o.weight_decay, apply_mask)
        self.subtract(x, u, lr, apply_mask)  # CAME-x
        del arrays, u
        self.store_weights(x, t, apply_mask)

    @cached_property
    def _root_sizes(self) -> Tensor:
        """The root of the number of elements of each whole tensor."""
        return sent([math.sqrt(shard.numel) for shard in self.shards], self.device, self.wide)

    def _unfactored(
        self, u: list[Tensor], gain: Tensor | float, scale: Tensor | float, apply_mask: Tensor | None
    ) -> None:
        """Advance the second moment, and compute u from it."""
        v = self.state["exp_avg_sq"]
        self._fill(u, scale, None)
        torch._foreach_mul_(u, u)
        torch._foreach_add_(u, self.bucket.options.eps[0])
        self.blank(u, apply_mask)
        if isinstance(gain, Tensor):
            torch._foreach_mul_(v, self.each(chosen(apply_mask, 1 - gain, 1.0)))
            torch._foreach_addcmul_(v, u, self.each(gain))  # CAME-v
        else:
            torch._foreach_mul_(v, self.unless(apply_mask, 1 - gain, 1.0))
            torch._foreach_add_(v, u, alpha=gain)  # CAME-v
        self._fill(u, scale, None)
        torch._foreach_div_(u, torch._foreach_sqrt(v))  # CAME-u
        self.blank(u, apply_mask)

    # ---- matrices ----------------------------------------------------------------------------------------------------

    def _matrices(self, shape: tuple[int, ...], tensors: int = 1) -> Matrices:
        return Matrices(tensors, *matrix_shape(torch.Size(shape), self.bucket.options.factor))

    @cached_property
    def boxes(self) -> list[tuple[Matrices, Matrices]]:
        """The matrices of this rank's boxes, and of the whole tensors that they belong to."""
        runs = itertools.groupby((shard.size, self._matrices(shard.shape)) for shard in self.shards)
        sized = [(size, whole, len(list(run))) for (size, whole), run in runs]
        return [(self._matrices(size, n), whole._replace(tensors=n)) for size, whole, n in sized]

    @cached_property
    def wholes(self) -> list[Matrices]:
        """The matrices of the whole tensors."""
        runs = itertools.groupby(self._matrices(shard.shape) for shard in self.shards)
        return [whole._replace(tensors=len(list(run))) for whole, run in runs]

    def _memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return new memory as the matrices of each shape, and as a tensor for each slot, like its gradient."""
        make = torch.zeros if any(shard.elements is not None for shard in self.shards) else torch.empty
        arrays = [make(box.shape, dtype=self.dtype, device=self.device) for box, _ in self.boxes]
        sizes = [box.of_each * box.height * box.width for box, _ in self.boxes]
        slots = [
            slot
            for array, (box, _), size in zip(arrays, self.boxes, sizes, strict=True)
            for slot in array.view(box.tensors, size).unbind()
        ]
        parts = [shard.unbox(slot.view(shard.size)) for slot, shard in zip(slots, self.shards, strict=True)]
        return arrays, [part.view(x.shape) for part, x in zip(parts, self.x, strict=True)]

    def _fill(self, parts: list[Tensor], scale: Tensor | float, apply_mask: Tensor | None) -> None:
        """Write the scaled gradients into memory, or zeros in a step that is not applied."""
        torch._foreach_copy_(parts, self.grads)
        self._scale(parts, scale, apply_mask)

    def _scale(self, parts: list[Tensor], scale: Tensor | float, apply_mask: Tensor | None) -> None:
        scale = -scale if self.bucket.options.maximize else scale
        if isinstance(scale, Tensor) or scale != 1:
            torch._foreach_mul_(parts, scale)
        self.blank(parts, apply_mask)

    # ---- averages of rows and columns --------------------------------------------------------------------------------

    def _factors(
        self,
        name: str,
        arrays: list[Tensor],
        parts: list[Tensor],
        eps: float,
        gain: Tensor | float,
        correction: Tensor | None,
        apply_mask: Tensor | None,
    ) -> Generator[Tensor, None, tuple[list[Tensor], list[Tensor], Tensor]]:
        """Advance the averages of rows and columns of squares; the values in `parts` become their squares.

        Return r and c, which broadcast with `arrays`, and both of the whole tensors, end to end.
        """
        if all(shard.elements is None for shard in self.shards):
            parts = arrays  # otherwise they have zeros for elements of other ranks
        torch._foreach_mul_(parts, parts)
        torch._foreach_add_(parts, eps)
        sums = [array.sum(dim=dim) for dim in (2, 1) for array in arrays]
        torch._foreach_mul_(sums, [1 / w.width for _, w in self.boxes] + [1 / w.height for _, w in self.boxes])
        state = [*self.state[f"{name}_row"], *self.state[f"{name}_col"]]
        new, old = torch.cat([each.flatten() for each in sums]), flat(state)
        first = old if self._leads is None else old * self._leads
        if isinstance(gain, Tensor):
            gains = spread(torch.cat([gain, gain]).to(self.dtype), [each.numel() for each in state])
            new = new * gains + first * (1 - gains)  # CAME-row, CAME-col, CAME-res
        else:
            new = new.mul_(gain).add_(first, alpha=1 - gain)  # CAME-row, CAME-col, CAME-res
        whole = new
        if self._leads is not None:
            whole = torch.zeros(sum(map(math.prod, self._line_shapes)), dtype=self.dtype, device=self.device)
            local = self._local_lines(whole)
            torch._foreach_copy_(
                local, [part.view_as(line) for part, line in zip(parted(new, state), local, strict=True)]
            )
            yield whole
            new = flat(local)
        torch._foreach_copy_(state, parted(chosen(apply_mask, new, old), state))

        inverse = whole.rsqrt()
        means = self._means(self._lines(whole)[: len(self.wholes)])
        if correction is not None:
            means = means * spread(correction, [each.of_each for each in self.wholes for _ in range(each.tensors)])
        roots = means.sqrt().unsqueeze(1).split_with_sizes([each.shape[0] for each in self.wholes])
        torch._foreach_mul_(self._lines(inverse)[: len(self.wholes)], list(roots))
        local_inverse = inverse if self._leads is None else flat(self._local_lines(inverse))
        boxes = [box.shape for box, _ in self.boxes]
        shapes = [(n, height, 1) for n, height, _ in boxes] + [(n, 1, width) for n, _, width in boxes]
        factors = local_inverse.split_with_sizes(list(map(math.prod, shapes)))
        r_and_c = [factor.view(shape) for factor, shape in zip(factors, shapes, strict=True)]
        return r_and_c[: len(boxes)], r_and_c[len(boxes) :], inverse

    def _lines(self, whole: Tensor) -> list[Tensor]:
        """Return a vector of all rows and columns as `[matrices, height]`, then `[matrices, width]`, by shape."""
        shapes = [each.shape for each in self.wholes]
        sizes = [(n, height) for n, height, _ in shapes] + [(n, width) for n, _, width in shapes]
        parts = whole.split_with_sizes(list(map(math.prod, sizes)))
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def _means(self, lines: list[Tensor]) -> Tensor:
        """Return the mean of each line, whose values are positive."""
        if self.bucket.options.factor == "last_two":  # tensors may have thousands of matrices
            return torch.cat([each.mean(dim=1) for each in lines])
        each_line = [line for lines_of_one_shape in lines for line in lines_of_one_shape.unbind()]
        norms = list(torch._foreach_norm(each_line, 1, dtype=self.wide))
        torch._foreach_div_(norms, [float(len(line)) for line in each_line])
        return torch.stack(norms).to(self.dtype)

    def _mean_product(self, inverse: Tensor) -> Tensor:
        """Return the mean of r c over each tensor, as the mean of mean(r) mean(c) over its matrices."""
        r, c = self._means(self._lines(inverse)).chunk(2)
        product = r * c
        if all(each.of_each == 1 for each in self.wholes):
            return product
        of_shapes = product.split_with_sizes([each.shape[0] for each in self.wholes])
        pairs = zip(of_shapes, self.wholes, strict=True)
        return torch.cat([of_shape.view(each.tensors, each.of_each).mean(dim=1) for of_shape, each in pairs])

    # ---- shards ------------------------------------------------------------------------------------------------------

    @cached_property
    def _overs(self) -> list[tuple[Shard, tuple[int, ...]]]:
        """For each tensor's averages, first of rows and then of columns, its shard and the dims that they are over."""
        axes = [row_axis(len(shard.shape), self.bucket.options.factor) for shard in self.shards]
        rows = [(s, tuple(range(axis + 1, len(s.shape)))) for s, axis in zip(self.shards, axes, strict=True)]
        return rows + [(shard, (axis,)) for shard, axis in zip(self.shards, axes, strict=True)]

    @cached_property
    def _line_shapes(self) -> list[list[int]]:
        return [[1 if dim in over else n for dim, n in enumerate(shard.shape)] for shard, over in self._overs]

    @cached_property
    def _leads(self) -> Tensor | None:
        """1 where this rank's old average counts in a sum over shards, 0 where another's does; None if not sharded."""
        if not self.bucket.shards:
            return None
        lines = []
        for shard, over in self._overs:
            size = [1 if dim in over else n for dim, n in enumerate(shard.size)]
            lines.append(shard.led(torch.ones(size, dtype=self.dtype, device=self.device), over).flatten())
        return torch.cat(lines)

    def _local_lines(self, whole: Tensor) -> list[Tensor]:
        """Return the parts of a vector of all whole rows and columns that belong to this rank's boxes."""
        parts = whole.split_with_sizes(list(map(math.prod, self._line_shapes)))
        lines = zip(parts, self._line_shapes, self._overs, strict=True)
        return [shard.cut(part.view(shape), over) for part, shape, (shard, over) in lines]


class Came(ListStepper[CameOptions], reference.Came):
    """CAME for some buckets on one device."""

    group = CameGroup
