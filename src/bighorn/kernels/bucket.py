"""What a kernel works on: tensors that share a device, dtypes and options."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from torch import Tensor

from bighorn.kernels.options import Factor, Options


def matrix_shape(shape: torch.Size, factor: Factor | None) -> tuple[int, int, int]:
    """How many matrices a row is, and their height and width; an unfactored row is cut up as if it were one."""
    if factor == "last_two":
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0] if shape else 1, math.prod(shape[1:])


@dataclass(frozen=True)
class Shard:
    """What of a tensor lies here: a box, empty perhaps. Sums over all of it are sums over the shards of all ranks.

    Attributes:
        shape: Of the whole tensor.
        size: Of the box.
        offset: Where in the whole tensor the box begins.
        split: The dims along which the whole tensor is cut up. Along the others each rank has all of it.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]
    split: frozenset[int]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Shard:
        """A tensor that lies here altogether."""
        return cls(shape, shape, (0,) * len(shape), frozenset())

    @property
    def numel(self) -> int:
        """How many elements the whole tensor has."""
        return math.prod(self.shape)

    def of_slice(self, here: bool) -> Shard:
        """Where a slice along dim 0 lies: the same box, less that dim, or nothing of it if another rank has it."""
        size, offset = (self.size[1:], self.offset[1:]) if here else ((0,) * (len(self.shape) - 1),) * 2
        return Shard(self.shape[1:], size, offset, frozenset(dim - 1 for dim in self.split if dim))

    def splits(self, dims: Iterable[int]) -> bool:
        """Whether a sum over these dims is a sum over shards."""
        return not self.split.isdisjoint(dims)

    def leads(self, dims: Iterable[int]) -> bool:
        """Whether the box begins where these dims do: of boxes that differ only along them, one does."""
        return all(self.offset[dim] == 0 for dim in dims)

    def spread(self, part: Tensor, over: Iterable[int]) -> Tensor:
        """Sums over some dims (kept, as 1), taken in the box, in their place among those of the whole tensor."""
        sums = part.new_zeros([1 if dim in over else size for dim, size in enumerate(self.shape)])
        sums[self._at(over)] = part
        return sums

    def cut(self, sums: Tensor, over: Iterable[int]) -> Tensor:
        """The part of such sums that belongs to the box: the inverse of `spread`."""
        return sums[self._at(over)]

    def _at(self, over: Iterable[int]) -> tuple[slice, ...]:
        return tuple(
            slice(0, 1) if dim in over else slice(start, start + size)
            for dim, (start, size) in enumerate(zip(self.offset, self.size, strict=True))
        )


@dataclass
class Bucket(Generic[Options]):
    """One row per tensor (or per slice of a stacked one); parameters are dense, and their state lies in their order.

    Attributes:
        options: What the rows share.
        params: The rows' parameters; kernels write them.
        state: Name to one tensor per row; every row has the same names. LAMB: `exp_avg`, `exp_avg_sq`, and
            `max_exp_avg_sq` for amsgrad, or `exp_avg_scale` and `exp_avg_sq_scale` where they are kept in blocks.
            CAME: `exp_avg` (with `exp_avg_scale` where it is int8), and either `exp_avg_sq_row`, `exp_avg_sq_col`,
            `exp_avg_res_row`, `exp_avg_res_col`, or `exp_avg_sq` unfactored. Both: what `rounding.AUX_STATE` names.
        steps: One 0-dim float32 tensor per row: the steps taken so far. Slices of one parameter share theirs.
        unique_steps: `steps` of the rows that have a gradient, without repetition; kernels advance each
            (`arithmetic.count_step`).
        metrics: Float32, `[rows, 3]`; kernels write what telemetry shows. LAMB: weight norm, update norm, trust ratio.
            CAME: RMS of u before it is clipped, what clipping multiplied it with, mean confidence.
        grads: One gradient per row, new for each step, of any floating dtype and any strides; kernels only read them.
            None for a row that takes no part in this step: its parameter, state, step count and norms stay as they
            are. Slices of one parameter take part together. When a kernel is made every row has a gradient, and
            whenever a row has one later, its dtype and strides are those.
        shards: Where each row, with its gradient, lies in the whole tensor; empty if every row is whole. A tensor of
            the state has some of its parameter's dims, and is cut up along these as the parameter is.
        param_ids: One 32-bit number per row, its parameter's, which tells the random bits of parameters apart.
        row_offsets: The position of each row's first element in its parameter, for the same end.
    """

    options: Options
    params: list[Tensor]
    state: dict[str, list[Tensor]]
    steps: list[Tensor]
    unique_steps: list[Tensor]
    metrics: Tensor
    grads: list[Any] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    param_ids: list[int] = field(default_factory=list)
    row_offsets: list[int] = field(default_factory=list)

    def with_grad(self) -> Bucket[Options]:
        """The rows that have a gradient, with norms of their own: the bucket itself if all rows have one."""
        rows = rows_with_grad(self.grads)
        if len(rows) == len(self.params):
            return self

        def of(values: list[Any]) -> list[Any]:
            return [values[i] for i in rows] if values else values

        return replace(
            self,
            params=of(self.params),
            state={name: of(tensors) for name, tensors in self.state.items()},
            steps=of(self.steps),
            metrics=self.metrics[rows],
            grads=of(self.grads),
            shards=of(self.shards),
            param_ids=of(self.param_ids),
            row_offsets=of(self.row_offsets),
        )


def rows_with_grad(grads: list[Any]) -> list[int]:
    """The rows that take part in a step."""
    return [i for i, grad in enumerate(grads) if grad is not None]
