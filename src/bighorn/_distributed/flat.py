"""Flat tensors: the fragments of a model's parameters in them, and the ranks that together hold all parameters.

DeepSpeed's ZeRO and Megatron's distributed optimizer copy parameters into one buffer and give each rank a part of it.
Such a part begins and ends inside parameters, so the ranks add up sums over the fragments of each parameter.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from bighorn._distributed.sharding import PLAIN, RankSums
from bighorn._kernels.bucket import Shard


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of a parameter, in row-major order, in a flat tensor.

    Attributes:
        name: The name of the parameter in the model.
        shape: The shape of the whole parameter.
        numel: The number of elements of the fragment.
        start: The position of its first element in the flat tensor. Default: 0.
        offset: The position of its first element in the parameter. Default: 0.

    Example:
        >>> Fragment("0.weight", (4, 8), numel=20, start=12)  # two and a half rows
        Fragment(name='0.weight', shape=(4, 8), numel=20, start=12, offset=0)
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    start: int = 0
    offset: int = 0


@dataclass(frozen=True)
class FlatLayout:
    """The layout of a group's flat tensors. The ranks compare their layouts when the group is added.

    Together, the flat tensors of all ranks hold each element of each parameter once. Elements in no fragment are
    padding, which no step reads or writes. A rank holds at most one fragment of a parameter; a rank that holds none
    gives an empty flat tensor.

    Attributes:
        fragments: For each flat tensor of the group, its fragments.
        process_group: The ranks. Default: None, which is all of them.

    Example:
        >>> import torch
        >>> from bighorn import FlatLayout, Fragment, Lamb
        >>> flat = torch.ones(14, requires_grad=True)
        >>> layout = FlatLayout([[Fragment("weight", (4, 3), numel=12), Fragment("bias", (2,), numel=2, start=12)]])
        >>> optimizer = Lamb([{"params": [flat], "flat_layout": layout}], lr=0.01)
        >>> flat.square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.telemetry().names, optimizer.state[flat]["exp_avg"].shape
        (('weight', 'bias'), torch.Size([14]))
    """

    fragments: Sequence[Sequence[Fragment]]
    process_group: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class FlatGroup(RankSums):
    """The ranks that add up their sums for the parameters in flat tensors."""

    process_group: Any
    device_type: str

    def _counts(self, dims: object) -> bool:
        del dims
        return True

    def _group(self) -> Any:
        return self.process_group

    def _all_reduce(self, sums: Tensor, op: Any = None) -> Tensor:
        return super()._all_reduce(sums, op) if dist.is_available() and dist.is_initialized() else sums

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        if not dist.is_available() or not dist.is_initialized():
            return [0]
        return list(dist.get_process_group_ranks(self.process_group or dist.group.WORLD))

    @property
    def order(self) -> tuple[list[int], tuple[int, ...]]:
        """The ranks."""
        return self.ranks, ()

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks."""
        everyone: list[Any] = [value] * len(self.ranks)
        if len(everyone) > 1:
            dist.all_gather_object(everyone, value, self.process_group)
        return everyone

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatGroup:
        return self

    def __reduce__(self) -> Any:
        if self.process_group is not None:
            raise TypeError(
                "an optimizer of flat tensors with a process_group cannot be pickled: save state_dict() instead"
            )
        return FlatGroup, (None, self.device_type)


class FlatParam(NamedTuple):
    """A parameter in flat tensors, and the fragment of it that this rank holds, which may be empty."""

    name: str
    shape: tuple[int, ...]
    tensor: int
    """The position of the flat tensor in its group."""
    span: slice
    """The fragment's elements in the flat tensor."""
    elements: range
    """The fragment's elements in the parameter."""
    cuts_rows: bool
    """Whether the fragment of any rank begins or ends inside a row, a slice along dim 0."""

    def shard(self, *, by_rows: bool) -> Shard:
        """The fragment as a shard of the parameter, or of its elements in one dim if rows mean nothing to a step."""
        if by_rows:
            return Shard.around(self.elements, self.shape, cut=self.cuts_rows)
        start, size = self.elements.start, len(self.elements)
        return Shard((math.prod(self.shape),), (size,), (start,), frozenset({0}))


class FlatParams(NamedTuple):
    """All parameters in the flat tensors of a group, in the same order on every rank."""

    params: tuple[FlatParam, ...]
    group: FlatGroup

    @classmethod
    def of(cls, layout: FlatLayout, tensors: Sequence[Tensor], what: str) -> FlatParams:
        """Return the parameters after the ranks have compared their layouts, which takes one collective.

        Args:
            layout: The layout on this rank.
            tensors: The flat tensors of the group on this rank.
            what: The group's name in messages.

        Raises:
            ValueError: A layout does not fit its tensors, or the ranks' fragments do not make up whole parameters.
                Every rank raises.
        """
        group = FlatGroup(layout.process_group, tensors[0].device.type)
        reason = _mistyped_reason(layout) or _unfit_reason(layout, tensors)
        lists = [] if reason is not None else list(map(list, layout.fragments))
        everyone = group.gather(_Rank(reason, lists, str(tensors[0].dtype)))
        shapes = _whole_shapes(everyone, group.ranks, what)
        cut = {each.name for its in everyone for fragments in its.fragments for each in fragments if _cuts_rows(each)}
        held = {each.name: (index, each) for index, fragments in enumerate(layout.fragments) for each in fragments}
        return cls(tuple(_param(name, shape, held, name in cut) for name, shape in shapes.items()), group)


class _Rank(NamedTuple):
    """The description of a group that a rank sends to the others."""

    reason: str | None
    fragments: list[list[Fragment]]
    dtype: str


def _param(name: str, shape: tuple[int, ...], held: dict[str, tuple[int, Fragment]], cuts_rows: bool) -> FlatParam:
    index, fragment = held.get(name, (0, Fragment(name, shape, numel=0)))
    span = slice(fragment.start, fragment.start + fragment.numel)
    elements = range(fragment.offset, fragment.offset + fragment.numel)
    return FlatParam(name, shape, index, span, elements, cuts_rows)


def _cuts_rows(fragment: Fragment) -> bool:
    row = max(math.prod(fragment.shape[1:]), 1)
    return bool(fragment.numel and (fragment.offset % row or fragment.numel % row))


def _mistyped_reason(layout: FlatLayout) -> str | None:
    """The reason why the fragments are of wrong types, or None. If one rank raised here, the others would wait."""
    lists: Any = layout.fragments
    if not isinstance(lists, Sequence) or not all(isinstance(fragments, Sequence) for fragments in lists):
        return (
            f"flat_layout.fragments is {reprlib.repr(lists)}: give a list of Fragments for each flat tensor, in a list"
        )
    for each in (fragment for fragments in lists for fragment in fragments):
        if not isinstance(each, Fragment):
            return f"{each!r} in flat_layout is no bighorn.Fragment"
        if not (
            isinstance(each.name, str)
            and isinstance(each.shape, Sequence)
            and all(isinstance(number, Integral) for number in (each.numel, each.start, each.offset, *each.shape))
        ):
            return f"{each}: name must be a string, shape a tuple of integers, and numel, start and offset integers"
    return None


def _unfit_reason(layout: FlatLayout, tensors: Sequence[Tensor]) -> str | None:
    """The reason why a layout does not fit this rank's flat tensors, or None."""
    if len(layout.fragments) != len(tensors):
        return f"flat_layout has fragments for {len(layout.fragments)} flat tensors, but params has {len(tensors)}"
    for i, (tensor, fragments) in enumerate(zip(tensors, layout.fragments, strict=True)):
        if type(tensor) not in PLAIN or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.is_complex():
            return (
                f"params[{i}] is a {type(tensor).__name__} of shape {tuple(tensor.shape)} and {tensor.dtype}: a flat "
                "tensor is a plain, contiguous, real tensor of one dim"
            )
        if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
            return f"params[{i}] has another dtype or device than params[0]: put it in a group of its own"
        end, before = 0, "the flat tensor's start"
        for each in sorted(fragments, key=lambda fragment: (fragment.start, fragment.numel)):
            if (reason := _impossible(each)) is not None:
                return f"{each}: {reason}"
            if each.start < end:
                return (
                    f"{each} overlaps {before} in params[{i}]: each element of a flat tensor belongs to one parameter"
                )
            end, before = each.start + each.numel, str(each)
        if end > len(tensor):
            return f"{before} ends beyond params[{i}], which has {len(tensor)} elements"
    return None


def _impossible(fragment: Fragment) -> str | None:
    whole = math.prod(fragment.shape)
    if min(fragment.numel, fragment.start, fragment.offset, *fragment.shape, 0) < 0:
        return "numel, start, offset and shape must be at least 0"
    if fragment.offset + fragment.numel > whole:
        return f"it ends at element {fragment.offset + fragment.numel} of a parameter that has {whole}"
    return None


def _whole_shapes(everyone: Sequence[_Rank], ranks: Sequence[int], what: str) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by name.

    Raises:
        ValueError: The fragments of all ranks do not make up whole parameters.
    """

    def fail(reason: str) -> ValueError:
        return ValueError(f"{what} cannot be optimized as flat tensors: {reason}")

    for rank, its in zip(ranks, everyone, strict=True):
        if its.reason is not None:
            raise fail(f"on rank {rank}, {its.reason}")
        if its.dtype != everyone[0].dtype:
            raise fail(f"rank {rank} has {its.dtype}, rank {ranks[0]} has {everyone[0].dtype}: use one dtype")
    found: dict[str, list[tuple[int, Fragment]]] = {}
    for rank, its in zip(ranks, everyone, strict=True):
        for each in (fragment for fragments in its.fragments for fragment in fragments):
            found.setdefault(each.name, []).append((rank, each))
    for name, pairs in found.items():
        first, shape = pairs[0][0], pairs[0][1].shape
        for rank, each in pairs:
            if tuple(each.shape) != tuple(shape):
                raise fail(
                    f"{name} has shape {tuple(each.shape)} on rank {rank} and {tuple(shape)} on rank {first}: give the "
                    "shape of the whole parameter, and each parameter a name of its own"
                )
        _check_cover(name, math.prod(shape), pairs, fail)
    return {name: tuple(pairs[0][1].shape) for name, pairs in found.items()}


def _check_cover(name: str, size: int, pairs: list[tuple[int, Fragment]], fail: Callable[[str], ValueError]) -> None:
    """Raise unless fragments hold each element of a parameter once, and each rank has at most one of them."""
    holders = [rank for rank, _ in pairs]
    if twice := [rank for rank in holders if holders.count(rank) > 1]:
        raise fail(
            f"rank {twice[0]} has {holders.count(twice[0])} fragments of {name}: one can be served, so join them"
        )
    end = 0
    for rank, each in sorted([pair for pair in pairs if pair[1].numel], key=lambda pair: pair[1].offset):
        if each.offset > end:
            raise fail(
                f"no rank holds elements {end} to {each.offset - 1} of {name}: give the fragments of all ranks, and "
                "process_group if these are not all ranks"
            )
        if each.offset < end:
            raise fail(f"rank {rank} holds elements of {name} from {each.offset} on, which another rank holds as well")
        end = max(end, each.offset + each.numel)
    if end < size:
        raise fail(
            f"no rank holds elements {end} to {size - 1} of {name}: give the fragments of all ranks, and process_group "
            "if these are not all ranks"
        )
