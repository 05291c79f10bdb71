"""The memory of a parameter in a step: its tensors, this step's gradient, and the slots of a bucket that it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bighorn._distributed import sharding
from bighorn._kernels.bucket import Shard
from bighorn._optim.centring import Centred
from bighorn._optim.entry import Entry
from bighorn._optim.state import overlaps, real_view, refuse_freed, same_layout


@dataclass
class Placed:
    """The memory of an entry, in a plan."""

    entry: Entry
    index: int
    """The index of the entry's tensor in the plan."""
    view: Tensor = field(init=False)
    """This rank's shard of the parameter, as a real tensor in the same memory; only while the plan is filled."""
    dense: Tensor = field(init=False)
    """The tensor that kernels use: `view`, or a dense copy of it, which is kept."""
    copied: bool = False
    """Whether `dense` is a copy."""
    step: Tensor = field(init=False)
    counts: bool = True
    """Whether this entry counts the step; the parameters in a flat tensor share a step count."""
    slots: range = range(0)
    """The slots of the bucket that the parameter becomes."""
    turned: bool = False
    """Whether kernels step the transpose of the parameter, since only that is contiguous in memory."""
    views: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    """The functions that make a gradient one of `dense`, in this order."""
    copy_dtype: torch.dtype | None = None
    """The dtype in which gradients are copied, if kernels cannot read them where they are; else None."""
    arriving: tuple[Tensor, Tensor] | None = None
    """The memory of this step's copy, and the gradient, which may not be there yet."""

    def moments(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a state, of this rank's shard, as kernels use them."""
        moments: dict[str, Tensor] = {name: sharding.local(state[name]) for name in self.entry.spec}
        if self.entry.fragment:
            moments = self.entry.state_part(moments)
        if self.turned and self.entry.exchanged is not None:
            names = self.entry.exchanged
            return {name: moments[names[name]] if name in names else each.mT for name, each in moments.items()}
        return moments

    # ---- memory ------------------------------------------------------------------------------------------------------

    def take_memory(self) -> Tensor:
        """Set `view` and `dense`, and return the tensor that the state is like.

        Raises:
            ValueError: Elements of the parameter share memory, or its memory was freed.
        """
        view = self.entry.local()
        if not self.entry.fits_kernels(view):
            refuse_freed(view, self.entry.label)
            if overlaps(view):
                what = f"{self.entry.label} has elements that share memory (an expanded tensor)"
                raise ValueError(f"{what}: clone() it first")
            self.dense, self.copied = view.clone(memory_format=torch.contiguous_format), True
        else:
            self.dense, self.turned = view, self.entry.turns(view)
        like = self.dense
        if self.turned:
            view = self.dense = view.detach().mT
        self.view = view
        return self.entry.param if self.entry.fragment else like

    def take(self, shard: Tensor) -> None:
        """Set `view` and `dense` from this rank's shard of the entry's tensor."""
        view = self.entry.part(real_view(shard))
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
        """Prepare for gradients like this one, of all of its tensor on this rank.

        Gradients in another memory order than `dense`, or in float64 beside narrower weights, are copied. Gradients of
        wrappers are not, since they may not allow it.
        """
        self.views = []
        if grad.is_complex() or grad.is_neg():
            self.views.append(real)
        if self.entry.fragment is not None:
            self.views.append(self.entry.fragment.of)
        if self.turned:
            self.views.append(transposed)
        grad = self.viewed(grad)
        dtype = torch.float32 if grad.dtype == torch.float64 != self.dense.dtype else grad.dtype
        in_place = self.entry.variant.centres or (same_layout(grad, self.dense) and dtype == grad.dtype)
        self.copy_dtype = dtype if copies and not in_place else None

    @property
    def direct(self) -> bool:
        """Whether the gradient is the slot's, and the parameter needs no copy."""
        converted = self.views or self.copy_dtype is not None or self.entry.variant.centres
        return not (converted or self.entry.stacked or self.copied)

    def grad_slots(self, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the slots."""
        if grad is None:
            return (None,) * len(self.slots)
        if self.entry.variant.centres:
            return self.entry.slices(self.centred_grad)
        grad = self.viewed(grad)
        if self.copy_dtype is not None:
            memory = torch.empty_strided(grad.shape, self.dense.stride(), dtype=self.copy_dtype, device=grad.device)
            self.arriving, grad = (memory, grad), memory
        return self.entry.slices(grad)

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
        shard = self.entry.shard or Shard.whole(tuple(self.dense.shape))
        return Centred(grad if grad is None else self.viewed(grad), self.centred_grad, shard, 1 + self.entry.stacked)

    @property
    def slot_size(self) -> int:
        """The number of elements of a whole slot."""
        shape = self.entry.shard.shape if self.entry.shard else self.dense.shape
        return math.prod(shape[1:] if self.entry.stacked else shape)


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
