"""The input of a kernel: tensors that share a device, dtypes and options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor
from torch.nn.functional import pad

from bighorn._kernels.options import Factor, Options
from bighorn._kernels.rounding import AUX_STATE, positions


def matrix_shape(shape: torch.Size, factor: Factor | None) -> tuple[int, int, int]:
    """Return the number of matrices of a slot, their height and width; an unfactored slot counts as one matrix."""
    if factor == "last_two":
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0] if shape else 1, math.prod(shape[1:])


def row_axis(dims: int, factor: Factor | None) -> int:
    """Return the dim of a matrix's rows; the dims after it are columns, those before it are batch dims.

    Example:
        >>> row_axis(4, "matrix"), row_axis(4, "last_two")
        (0, 2)
    """
    return dims - 2 if factor == "last_two" else 0


@dataclass(frozen=True)
class Shard:
    """The box of a tensor that this rank holds, possibly empty. A sum over the tensor is a sum over all ranks' shards.

    Attributes:
        shape: The shape of the whole tensor.
        size: The shape of the box.
        offset: The first index of the box in the whole tensor, per dim.
        split: The dims along which ranks hold different shards. Along the others each rank holds all of the tensor.
        elements: The positions of this rank's elements in the whole tensor, counted along its rows, if it does not hold
            all of the box: its tensors are then vectors of these elements. Default: None.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]
    split: frozenset[int]
    elements: range | None = None

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Shard:
        """Return the shard that is a whole tensor."""
        return cls(shape, shape, (0,) * len(shape), frozenset())

    @classmethod
    def around(cls, elements: range, shape: tuple[int, ...], *, cut: bool) -> Shard:
        """Return the shard with consecutive elements: a box along dim 0 or, if any rank's shard is cut, part of one."""
        inner = max(math.prod(shape[1:]), 1)
        first, end = elements.start // inner, -(-elements.stop // inner)
        inside = (end - first, *shape[1:]) if elements else (0,) * len(shape)
        split = frozenset(range(len(shape))) if cut else frozenset({0})
        offset = (first if elements else 0, *(0 for _ in shape[1:]))
        return cls(shape, inside, offset, split, elements if cut else None)

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of this rank's tensors."""
        return self.size if self.elements is None else (len(self.elements),)

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def first(self) -> int:
        """The position of this rank's first element in the whole tensor."""
        if self.elements is not None:
            return self.elements.start
        return sum(offset * math.prod(self.shape[dim + 1 :]) for dim, offset in enumerate(self.offset))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The extents of this rank's elements, and their distances in the whole tensor, from the innermost on.

        The first extent has distance 1: elements that follow one another, which may be one.

        Example:
            >>> Shard((8, 5, 4), (2, 5, 4), (6, 0, 0), frozenset({0})).runs
            [(40, 1)]
            >>> Shard((8, 5, 4), (8, 2, 4), (0, 2, 0), frozenset({1})).runs
            [(8, 1), (8, 20)]
        """
        if self.elements is not None or 0 in self.size:
            return [(math.prod(self.held), 1)]
        runs = [(1, 1)]
        for dim, size in reversed(list(enumerate(self.size))):
            count, step = runs[-1]
            stride = math.prod(self.shape[dim + 1 :])
            if size != 1 and stride == count * step:
                runs[-1] = count * size, step
            elif size != 1:
                runs.append((size, stride))
        return runs

    def of_slice(self, on_this_rank: bool) -> Shard:
        """Return the shard of a slice along dim 0: the box without that dim, or an empty one if not `on_this_rank`."""
        size, offset = (self.size[1:], self.offset[1:]) if on_this_rank else ((0,) * (len(self.shape) - 1),) * 2
        return Shard(self.shape[1:], size, offset, frozenset(dim - 1 for dim in self.split if dim))

    def splits(self, dims: Iterable[int]) -> bool:
        """Whether a sum over these dims is a sum over shards."""
        return not self.split.isdisjoint(dims)

    def leads(self, dims: Iterable[int]) -> bool:
        """Whether the box begins at index 0 of these dims. Among boxes that differ only along them, exactly one does.

        An empty box may be at index 0 as well as the one after it, and does not count.
        """
        return 0 not in self.size and all(self.offset[dim] == 0 for dim in dims)

    def led(self, average: Tensor, over: Iterable[int]) -> Tensor:
        """Return an average over some dims (kept, as 1) that several shards keep, with zeros on all of them but one."""
        if not self.leads(over):
            return torch.zeros_like(average)
        if self.elements is None:
            return average
        size = [1 if dim in over else count for dim, count in enumerate(self.size)]
        first = positions(size, self.offset, self.shape, average.device)
        return average * ((first >= self.elements.start) & (first < self.elements.stop))

    def box(self, values: Tensor) -> Tensor:
        """Return this rank's elements in the shape of the box, with zeros for elements of other ranks."""
        if self.elements is None:
            return values
        before = self._before
        return pad(values, (before, math.prod(self.size) - before - len(values))).view(self.size)

    def unbox(self, box: Tensor) -> Tensor:
        """Return this rank's elements of a box."""
        return box if self.elements is None else box.flatten()[self._before :][: len(self.elements)]

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each of this rank's elements in the whole tensor, counted along its rows; int64."""
        if self.elements is None:
            return positions(self.size, self.offset, self.shape, device)
        return torch.arange(self.elements.start, self.elements.stop, device=device)

    def positions_along(self, dims: Sequence[int], like: Tensor | None = None) -> Tensor:
        """Return the positions of the box in the whole tensor along these dims alone, in the memory order of `like`."""
        size, offset, shape = ([extent[dim] for dim in dims] for extent in (self.size, self.offset, self.shape))
        at = positions(size, offset, shape, torch.device("cpu")).expand(size)
        if like is not None:
            at = torch.empty_like(like, dtype=torch.int64, device="cpu").copy_(at.view(like.shape))
        return at.as_strided((at.numel(),), (1,))

    @property
    def _before(self) -> int:
        """The number of elements of the box before this rank's."""
        return self.elements.start - self.offset[0] * math.prod(self.shape[1:]) if self.elements else 0

    def spread(self, part: Tensor, over: Iterable[int]) -> Tensor:
        """Return sums over some dims (kept, as 1) of the box at their positions in the sums of the whole tensor."""
        sums = part.new_zeros([1 if dim in over else size for dim, size in enumerate(self.shape)])
        sums[self._at(over)] = part
        return sums

    def cut(self, sums: Tensor, over: Iterable[int]) -> Tensor:
        """Return the part of such sums that belongs to the box: the inverse of `spread`."""
        return sums[self._at(over)]

    def _at(self, over: Iterable[int]) -> tuple[slice, ...]:
        return tuple(
            slice(0, 1) if dim in over else slice(start, start + size)
            for dim, (start, size) in enumerate(zip(self.offset, self.size, strict=True))
        )


@dataclass
class Bucket(Generic[Options]):
    """One slot per tensor (or per slice of a stacked one).

    The parameter, the gradient and the state of a slot are dense, in one memory order.

    Attributes:
        options: The options that the slots share.
        params: The slots' parameters; kernels write them.
        state: Name to one tensor per slot; every slot has the same names. LAMB: `exp_avg`, `exp_avg_sq`, and
            `max_exp_avg_sq` for amsgrad, or `exp_avg_scale` and `exp_avg_sq_scale` if they are kept in blocks. CAME:
            `exp_avg` (with `exp_avg_scale` if it is int8), and either `exp_avg_sq_row`, `exp_avg_sq_col`,
            `exp_avg_res_row`, `exp_avg_res_col`, or `exp_avg_sq` unfactored. Both: the names in `rounding.AUX_STATE`.
        steps: One 0-dim float32 tensor per slot: the steps taken so far. Slices of one parameter share the same tensor.
        unique_steps: `steps` of the slots that have a gradient, without repetition; kernels advance each
            (`arithmetic.count_step`).
        metrics: Float32, `[slots, options.metrics]`; kernels write the values that telemetry shows.
        grads: One gradient per slot, new for each step, of 16 or 32 bits, or float64 for a parameter of float64;
            kernels only read them. None for a slot that takes no part in this step: its parameter, state, step count
            and metrics do not change. Slices of one parameter take part together. The gradients of a slot have the
            same dtype until `refresh`.
        grad_addresses: A list of gradients, and their addresses, 0 for None. They belong to this step if the list is
            `grads`, and a kernel that reads the pair has both of one step, also while another thread binds others.
        shards: Each slot's shard of the whole tensor, also for its gradient; empty if every slot is whole. A tensor of
            the state has some of its parameter's dims, and is sharded along these as the parameter is.
        param_ids: One 32-bit number per slot, the same for all slots of a parameter, from which its random bits derive.
        slot_offsets: The position of each slot's first element in its parameter, from which random bits derive, too.
    """

    options: Options
    params: list[Tensor]
    state: dict[str, list[Tensor]]
    steps: list[Tensor]
    unique_steps: list[Tensor]
    metrics: Tensor
    grads: list[Any] = field(default_factory=list)
    grad_addresses: tuple[list[Any], list[int]] = ([], [])
    shards: list[Shard] = field(default_factory=list)
    param_ids: list[int] = field(default_factory=list)
    slot_offsets: list[int] = field(default_factory=list)

    def addresses(self, i: int) -> dict[str, int]:
        """Return the addresses of slot `i`: of its state by names, `aux` (0 without one), `step` and `metrics`."""
        state = {name: tensors[i].data_ptr() for name, tensors in self.state.items()}
        aux = sum([state.pop(name) for name in AUX_STATE[self.options.weight_rounding]])
        metrics = self.metrics.data_ptr() + i * self.metrics.stride(0) * self.metrics.itemsize
        return {**state, "aux": aux, "step": self.steps[i].data_ptr(), "metrics": metrics}

    def first_position(self, i: int) -> int:
        """Return the position of the first element of slot `i` in its parameter."""
        return self.slot_offsets[i] + (self.shards[i].first if self.shards else 0)

    def first_moment(self, i: int) -> Tensor:
        """Return the first moment of slot `i`, for kernels that are compiled for its dtype."""
        return self.state[str(self.options.first_moment)][i]

    def read_addresses(self) -> tuple[list[Any], list[int]]:
        """Return `grads` and their addresses, if they are not known."""
        grads = self.grads
        return grads, [0 if grad is None else grad.data_ptr() for grad in grads]


def slots_with_grad(grads: list[Any]) -> list[int]:
    """Return the indices of the slots that take part in a step."""
    return [i for i, grad in enumerate(grads) if grad is not None]
