"""The order in which parameters are visited, where `order_params` asks for another than that of the groups."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from bighorn.names import listed

Order = list[tuple[int, int]]
"""Group and position of each parameter, in the order that was asked for; empty for the groups' own."""


def split(params: Any) -> tuple[Any, list[Tensor] | None]:
    """Parameters or groups without the dict that orders them, and the tensors in the order that it asks for.

    Raises:
        TypeError: There is no list of parameters, or it names something that is no tensor.
        ValueError: There are two such dicts, or it names a tensor twice.
    """
    params = listed(params)
    orders = [group for group in params if isinstance(group, dict) and "order_params" in group]
    if not orders:
        return params, None
    if len(orders) > 1:
        raise ValueError(f"order_params is given {len(orders)} times: one dict among the groups orders all of them")
    ignored = [str(key) for key in orders[0] if key != "order_params"]
    if ignored:
        warnings.warn(
            f"the group with order_params has other keys too, which mean nothing there: {', '.join(ignored)}",
            stacklevel=4,
        )
    ordered = listed(orders[0]["order_params"], "order_params")
    tensors = [item[1] if isinstance(item, tuple) else item for item in ordered]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"order_params must hold the parameters of the other groups, not {tensor!r}")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError("order_params names a parameter twice: each one must be there once")
    return [group for group in params if group is not orders[0]], tensors


def places(ordered: list[Tensor] | None, groups: list[dict[str, Any]]) -> Order:
    """Where the ordered tensors lie in the groups.

    Raises:
        ValueError: They are not exactly the parameters of the groups.
    """
    if ordered is None:
        return []
    found = {id(param): (i, j) for i, group in enumerate(groups) for j, param in enumerate(group["params"])}
    if {id(tensor) for tensor in ordered} != found.keys():
        foreign = sum(id(tensor) not in found for tensor in ordered)
        raise ValueError(
            f"order_params must name every parameter of the other groups and no others: of its {len(ordered)}, "
            f"{foreign} are in no group, and "
            f"{len(found) - len(ordered) + foreign} of the groups' {len(found)} are not among them"
        )
    return [found[id(tensor)] for tensor in ordered]
