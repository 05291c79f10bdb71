"""Groups of flat tensors: their checks when a group is added and at each step, and the parts of their state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bighorn._distributed.flat import FlatLayout, FlatParams
from bighorn._kernels.bucket import Shard
from bighorn._optim.algorithm import Algorithm, Group
from bighorn._optim.state import StateSpec, StateTensorSpec, all_dims

KEY = "flat_layout"
"""The key of a group's FlatLayout. The group that the optimizer keeps does not have it, since groups are saved."""

WHOLE_STEP = "flat tensors hold parts of parameters, whose norms need every rank at once; call step() alone"


def split_layout(group: Group) -> tuple[Group, FlatLayout | None]:
    """Return a group that is to be added without its layout, and the layout.

    Raises:
        TypeError: The layout is not a FlatLayout.
    """
    if not isinstance(group, dict) or group.get(KEY) is None:
        return group, None
    layout = group[KEY]
    if not isinstance(layout, FlatLayout):
        raise TypeError(f"{KEY} must be a bighorn.FlatLayout, not {type(layout).__name__}")
    return {name: value for name, value in group.items() if name != KEY}, layout


def joining(
    layout: FlatLayout | None,
    group: Group,
    tensors: list[Tensor],
    index: int,
    algorithm: Algorithm[Any],
) -> FlatParams | None:
    """Return the parameters in the flat tensors of a group that is to be added, after all ranks have compared them.

    Raises:
        ValueError: An option needs rows, which flat tensors cut; or the layout does not fit the group's tensors or the
            layouts of other ranks, in which case every rank raises.
    """
    if layout is None:
        return None
    what = f"param_groups[{index}]"
    if (reason := algorithm.unsupported_flat_reason(group)) is not None:
        raise ValueError(f"{what} cannot be optimized as flat tensors: {reason}")
    if not tensors:
        raise ValueError(f"{what} has a {KEY} and no params: a rank that holds nothing gives an empty flat tensor")
    return FlatParams.of(layout, tensors, what)


def check_grads(groups: Sequence[Group], flat: Sequence[FlatParams | None]) -> None:
    """Raise for a flat tensor without a gradient, since the other ranks would wait for this one.

    Raises:
        ValueError: A flat tensor of a group in this step has no gradient.
    """
    for index, (group, held) in enumerate(zip(groups, flat, strict=True)):
        missing = [i for i, tensor in enumerate(group["params"]) if held is not None and tensor.grad is None]
        if missing:
            raise ValueError(
                f"param_groups[{index}].params[{missing[0]}] is a flat tensor without a gradient: each flat tensor "
                "needs one in every step, on every rank; use zeros for what has none"
            )


class FlatView(NamedTuple):
    """The part of a tensor that belongs to a parameter in a flat tensor."""

    span: slice
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part, in the same memory."""
        return tensor[self.span].view(self.shape)


class PlacedFragment(NamedTuple):
    """The place of a parameter's fragment in the flat tensors of a group."""

    shard: Shard
    """The shard of the parameter that the fragment is."""
    part: FlatView
    """The part of the flat tensor, and of its gradient."""
    state: Mapping[str, FlatView]
    """The part of each state tensor."""
    spec: StateSpec
    """The state tensors of the flat tensor."""


def fragments(held: FlatParams, group: Group, algorithm: Algorithm[Any]) -> list[PlacedFragment]:
    """Return the fragments of the parameters in the flat tensors of a group.

    A state tensor that each parameter of the group has element by element is of the flat tensor's size. In others, such
    as averages of rows, the parts of the fragments follow one another.
    """
    wholes = [torch.empty(each.shape, dtype=group["params"][0].dtype, device="meta") for each in held.params]
    specs = [algorithm.state_spec(group, whole) for whole in wholes]
    full = [
        {name for name, kept in spec.items() if kept.dims == all_dims(whole)}
        for spec, whole in zip(specs, wholes, strict=True)
    ]
    in_place = set.intersection(*full) if full else set()
    of_tensors: dict[int, dict[str, StateTensorSpec]] = {each.tensor: {} for each in held.params}
    found = {}
    for i in sorted(range(len(wholes)), key=lambda i: held.params[i].span.start):
        each, state = held.params[i], {}
        shard, spec = each.shard(by_rows=algorithm.shape_of(group, wholes[i])[0]), of_tensors[each.tensor]
        view = FlatView(each.span, shard.held)
        for name, kept in specs[i].items():
            if name in in_place:
                state[name], spec[name] = view, StateTensorSpec(kept.dtype, (0,))
                continue
            shape = shard.held if name in full[i] else tuple(shard.size[dim] for dim in kept.dims)
            start = spec[name].numel or 0 if name in spec else 0
            end = start + math.prod(shape)
            state[name], spec[name] = FlatView(slice(start, end), shape), StateTensorSpec(kept.dtype, (0,), numel=end)
        found[i] = PlacedFragment(shard, view, state, spec)
    return [found[i] for i in range(len(found))]


def state_specs(held: FlatParams, group: Group, algorithm: Algorithm[Any]) -> dict[int, StateSpec]:
    """The state tensors of each flat tensor of a group that holds a fragment, by its position."""
    found = fragments(held, group, algorithm)
    return {each.tensor: fragment.spec for each, fragment in zip(held.params, found, strict=True)}
