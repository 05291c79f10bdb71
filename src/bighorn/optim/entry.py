"""A parameter in a step: the options that hold for it, its memory, and the rows of a bucket that it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bighorn.distributed import sharding
from bighorn.distributed.flat import FlatGroup
from bighorn.distributed.sharding import Layout, ShardedDims
from bighorn.kernels.bucket import Shard
from bighorn.optim.algorithm import Variant
from bighorn.optim.centring import Centred
from bighorn.optim.flat_tensors import FlatView
from bighorn.optim.state import StateSpec, is_dense, local_view, overlaps, real_view, refuse_freed, same_layout


@dataclass
class Entry:
    """A parameter that takes part in a step, or its fragment in a flat tensor."""

    param: Tensor
    """The parameter, or the flat tensor."""
    label: str
    variant: Variant
    spec: StateSpec
    """The state tensors of `param`, besides `step`."""
    shape: tuple[int, ...]
    """The shape of the whole parameter, as a real tensor."""
    shard: Shard | None = None
    """The shard of the parameter on this rank; None if this rank holds all of it."""
    ranks: ShardedDims | FlatGroup | None = None
    """The ranks over which sums are added up; None if this rank holds the whole parameter."""
    layout: Layout | None = None
    """The layout of a distributed parameter, else None."""
    stacked: bool = False
    leading: int = 0
    """The number of leading dims that must be outermost in memory, since kernels split the tensor along them."""
    symmetric: bool = False
    """Whether a matrix and its transpose have the same step, with the averages of rows and columns exchanged."""
    fragment: FlatView | None = None
    """The part of `param` that is stepped, if that is a flat tensor."""
    state_parts: Mapping[str, FlatView] = field(default_factory=dict)
    """The same of each tensor of its state."""

    index: int = -1
    """The index of `param` in the plan, as are all fields from here on."""
    view: Tensor = field(init=False)
    """This rank's shard of the parameter, as a real tensor in the same memory; only while the plan is filled."""
    dense: Tensor = field(init=False)
    """The tensor that kernels use: `view`, or a dense copy of it, which is kept."""
    copied: bool = False
    """Whether `dense` is a copy."""
    step: Tensor = field(init=False)
    counts: bool = True
    """Whether this entry counts the step; the parameters in a flat tensor share a step count."""
    rows: range = range(0)
    """The rows of the bucket that the parameter becomes."""
    turned: bool = False
    """Whether kernels step the transpose of the parameter, since only that is contiguous in memory."""
    views: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    """The functions that make a gradient one of `dense`, in this order."""
    copy_dtype: torch.dtype | None = None
    """The dtype in which gradients are copied, if kernels cannot read them where they are; else None."""
    arriving: tuple[Tensor, Tensor] | None = None
    """The memory of this step's copy, and the gradient, which may not be there yet."""

    @property
    def holders(self) -> list[int] | None:
        """The ranks that hold the parameter, or shards or copies of it; None for a plain tensor."""
        if isinstance(self.ranks, FlatGroup):
            return self.ranks.ranks
        return self.layout.holders if self.layout else None

    @property
    def row_shard(self) -> Shard | None:
        """The shard of the parameter, or of the slices of a stacked one; None if this rank holds all of it."""
        return self.shard.of_slice(here=True) if self.shard and self.stacked else self.shard

    def local(self) -> Tensor:
        """Return this rank's part of the parameter, as a real tensor in the same memory."""
        return self.part(local_view(self.param))

    def part(self, tensor: Tensor) -> Tensor:
        """Return the fragment in a flat tensor, or in its gradient; any other tensor unchanged."""
        return self.fragment.of(tensor) if self.fragment else tensor

    def state_part(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameter's parts of the state of a flat tensor; any other state unchanged."""
        return {name: part.of(state[name]) for name, part in self.state_parts.items()} if self.fragment else {**state}

    def moments(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a state, of this rank's shard, as kernels use them."""
        moments: dict[str, Tensor] = {name: sharding.local(state[name]) for name in self.spec}
        if self.fragment:
            moments = self.state_part(moments)
        return _transposed(moments) if self.turned else moments

    def turns(self, view: Tensor) -> bool:
        """Whether kernels step the transpose of the parameter."""
        return self.symmetric and not view.is_contiguous() and view.mT.is_contiguous()

    def fits_kernels(self, view: Tensor) -> bool:
        """Whether kernels can step the parameter in its own memory, without a dense copy."""
        return is_dense(view, self.leading) or self.turns(view)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def take_memory(self) -> Tensor:
        """Set `view` and `dense`, and return the tensor that the state is like.

        Raises:
            ValueError: Elements of the parameter share memory, or its memory was freed.
        """
        view = self.local()
        if not self.fits_kernels(view):
            refuse_freed(view, self.label)
            if overlaps(view):
                raise ValueError(f"{self.label} has elements that share memory (an expanded tensor): clone() it first")
            self.dense, self.copied = view.clone(memory_format=torch.contiguous_format), True
        else:
            self.dense, self.turned = view, self.turns(view)
        like = self.dense
        if self.turned:
            view = self.dense = view.detach().mT
        self.view = view
        return self.param if self.fragment else like

    def take(self, shard: Tensor) -> None:
        """Set `view` and `dense` from this rank's shard of `param`."""
        view = self.part(real_view(shard))
        self.view = view.detach().mT if self.turned else view
        if not self.copied:
            self.dense = self.view

    def copy_in(self) -> None:
        """Copy the parameter to its dense copy, if it has one."""
        if self.copied:
            copy(self.dense, self.view)

    def copy_out(self) -> None:
        """Copy the dense copy, if there is one, to the parameter."""
        if self.copied:
            copy(self.view, self.dense)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def expect(self, grad: Tensor, copies: bool = True) -> None:
        """Prepare for gradients like this one, of all of `param` on this rank.

        Gradients in another memory order than `dense`, or in float64 beside narrower weights, are copied. Gradients of
        wrappers are not, since they may not allow it.
        """
        self.views = []
        if grad.is_complex() or grad.is_neg():
            self.views.append(real)
        if self.fragment is not None:
            self.views.append(self.fragment.of)
        if self.turned:
            self.views.append(transposed)
        grad = self.viewed(grad)
        dtype = torch.float32 if grad.dtype == torch.float64 != self.dense.dtype else grad.dtype
        in_place = self.variant.centres or (same_layout(grad, self.dense) and dtype == grad.dtype)
        self.copy_dtype = dtype if copies and not in_place else None

    @property
    def direct(self) -> bool:
        """Whether the gradient is the row, and the parameter needs no copy."""
        converted = self.views or self.copy_dtype is not None or self.variant.centres
        return not (converted or self.stacked or self.copied)

    def grad_rows(self, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the rows of a gradient."""
        if grad is None:
            return (None,) * len(self.rows)
        if self.variant.centres:
            return self.slices(self.centred_grad)
        grad = self.viewed(grad)
        if self.copy_dtype is not None:
            memory = torch.empty_strided(grad.shape, self.dense.stride(), dtype=self.copy_dtype, device=grad.device)
            self.arriving, grad = (memory, grad), memory
        return self.slices(grad)

    def viewed(self, grad: Tensor) -> Tensor:
        """Return a gradient as `dense` is of the parameter."""
        for view in self.views:
            grad = view(grad)
        return grad

    def read_grad(self) -> None:
        """Copy the gradient, which is there now, if kernels cannot read it where it is."""
        if self.arriving is not None:
            memory, grad = self.arriving
            copy(memory, grad)
            self.arriving = None

    @cached_property
    def centred_grad(self) -> Tensor:
        """The memory of the gradient without the means of its rows, in the dtype of the arithmetic."""
        return torch.empty_like(self.dense, dtype=torch.promote_types(self.dense.dtype, torch.float32))

    def centred(self, grad: Tensor | None) -> Centred:
        """Return a gradient whose means are to be subtracted."""
        shard = self.shard or Shard.whole(tuple(self.dense.shape))
        return Centred(grad if grad is None else self.viewed(grad), self.centred_grad, shard, 1 + self.stacked)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def slices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor that has dims of the parameter as rows; slices on other ranks are empty here."""
        if not self.stacked:
            return (tensor,)
        tensor = tensor.detach()  # as all views that plans keep: torch swaps no parameter that has others
        if self.shard is None:
            return tensor.unbind()
        elsewhere = (tensor.new_empty((0,) * (tensor.dim() - 1)),)
        before = self.shard.offset[0]
        return elsewhere * before + tensor.unbind() + elsewhere * (self.shard.shape[0] - before - tensor.shape[0])

    @property
    def row_size(self) -> int:
        """The number of elements of a whole row."""
        shape = self.shard.shape if self.shard else self.dense.shape
        return math.prod(shape[1:] if self.stacked else shape)

    def row_shards(self) -> list[Shard]:
        """The box of each row that this rank holds; empty if all rows are whole."""
        if self.shard is None or not self.stacked:
            return [self.shard] if self.shard else []
        first = self.shard.offset[0]
        return [self.shard.of_slice(first <= i < first + self.shard.size[0]) for i in range(self.shard.shape[0])]


EXCHANGED = {
    f"exp_avg_{of}_{line}": f"exp_avg_{of}_{other}"
    for of in ("sq", "res")
    for line, other in (("row", "col"), ("col", "row"))
}
"""The names of a matrix's averages by their names in its transpose."""


def _transposed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the transpose of a parameter, in the same memory."""
    return {name: state[EXCHANGED[name]] if name in EXCHANGED else tensor.mT for name, tensor in state.items()}


def real(grad: Tensor) -> Tensor:
    """Return a complex gradient as a real one, and without a bit that negates or conjugates it."""
    return real_view(grad.resolve_conj()).resolve_neg()


def copy(to: Tensor, source: Tensor) -> None:
    """Copy a tensor in the memory order of its copy, which otherwise takes up to 4 times as long (torch 2.13)."""
    order = sorted(range(to.dim()), key=to.stride, reverse=True)
    to.permute(order).copy_(source.permute(order))


def transposed(grad: Tensor) -> Tensor:
    """Return the gradient of the transpose."""
    return grad.mT
