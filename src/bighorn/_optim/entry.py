"""A parameter in a step: what holds for it, whatever its memory is. `placed.py` has its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bighorn._distributed.flat import FlatGroup
from bighorn._distributed.sharding import Layout, ShardedDims
from bighorn._kernels.bucket import Shard
from bighorn._optim.algorithm import Variant
from bighorn._optim.flat_tensors import FlatView
from bighorn._optim.state import StateSpec, is_dense, local_view


@dataclass(frozen=True)
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
    exchanged: Mapping[str, str] | None = None
    """As `Algorithm.exchanged`, if the step of the transpose is the same; else None."""
    fragment: FlatView | None = None
    """The part of `param` that is stepped, if that is a flat tensor."""
    state_parts: Mapping[str, FlatView] = field(default_factory=dict)
    """By name, the part of each state tensor that is stepped, if `param` is a flat tensor."""

    @property
    def holders(self) -> list[int] | None:
        """The ranks that hold the parameter, or shards or copies of it; None for a plain tensor."""
        if isinstance(self.ranks, FlatGroup):
            return self.ranks.ranks
        return self.layout.holders if self.layout else None

    @property
    def slot_shard(self) -> Shard | None:
        """The shard of the parameter, or of the slices of a stacked one; None if this rank holds all of it."""
        return self.shard.of_slice(on_this_rank=True) if self.shard and self.stacked else self.shard

    def local(self) -> Tensor:
        """Return this rank's part of the parameter, as a real tensor in the same memory."""
        return self.part(local_view(self.param))

    def part(self, tensor: Tensor) -> Tensor:
        """Return the fragment in a flat tensor, or in its gradient; any other tensor unchanged."""
        return self.fragment.of(tensor) if self.fragment else tensor

    def state_part(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameter's parts of the state of a flat tensor; any other state unchanged."""
        return {name: part.of(state[name]) for name, part in self.state_parts.items()} if self.fragment else {**state}

    def turns(self, view: Tensor) -> bool:
        """Whether kernels step the transpose of the parameter."""
        return self.exchanged is not None and not view.is_contiguous() and view.mT.is_contiguous()

    def fits_kernels(self, view: Tensor) -> bool:
        """Whether kernels can step the parameter in its own memory, without a dense copy."""
        return is_dense(view, self.leading) or self.turns(view)

    def slices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor that has dims of the parameter as rows; slices on other ranks are empty here."""
        if not self.stacked:
            return (tensor,)
        tensor = tensor.detach()  # as all views that plans keep: torch swaps no parameter that has others
        if self.shard is None or len(tensor) == self.shard.shape[0]:  # every rank has a number for each slice
            return tensor.unbind()
        elsewhere = (tensor.new_empty((0,) * (tensor.dim() - 1)),)
        before = self.shard.offset[0]
        return elsewhere * before + tensor.unbind() + elsewhere * (self.shard.shape[0] - before - tensor.shape[0])

    def slot_shards(self) -> list[Shard]:
        """The box of each slot that this rank holds; empty if all slots are whole."""
        if self.shard is None or not self.stacked:
            return [self.shard] if self.shard else []
        first = self.shard.offset[0]
        return [self.shard.of_slice(first <= i < first + self.shard.size[0]) for i in range(self.shard.shape[0])]
