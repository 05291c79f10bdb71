"""Groups of flat tensors: their checks when a group is added, and at each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bighorn.distributed.flat import FlatLayout, FlatParams
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.settings import Settings

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
    settings: Settings,
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
    flat = FlatParams.of(layout, tensors, what)
    settings.refuse_to_add_up_over(flat.group.ranks)
    return flat


def names_in(flat: list[FlatParams | None]) -> Iterator[str]:
    """Yield the names of the parameters in flat tensors."""
    return (param.name for group in flat if group is not None for param in group.params)


def check_grads(groups: list[Group], flat: list[FlatParams | None]) -> None:
    """Raise for a flat tensor without a gradient, since the other ranks would wait for this one.

    Raises:
        ValueError: A flat tensor has no gradient.
    """
    for index, (group, held) in enumerate(zip(groups, flat, strict=True)):
        missing = [i for i, tensor in enumerate(group["params"]) if held is not None and tensor.grad is None]
        if missing:
            raise ValueError(
                f"param_groups[{index}].params[{missing[0]}] is a flat tensor without a gradient: each flat tensor "
                "needs one in every step, on every rank; use zeros for what has none"
            )
