"""DeepSpeed's ZeRO 1 and 2: the map from the parameters of a group to the flat tensor that has taken their place.

ZeRO replaces the parameters of each group by one flat tensor, and steps one group at a time: meanwhile the optimizer
has no other groups. ZeRO 1 and 2 (0.19: utils/tensor_fragment.py, utils/mixed_precision_linkage.py) write two
attributes into every parameter that they have copied into a flat tensor: `_dp_group`, the ranks, and `_hp_mapping`, the
fragment on this rank or None. ZeRO 3 writes `ds_id`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from bighorn._distributed.flat import FlatLayout, FlatParams, Fragment
from bighorn._distributed.sharding import PLAIN
from bighorn._optim.algorithm import Algorithm, Group
from bighorn._optim.flat_tensors import joining
from bighorn._optim.param_groups import label_of


def has_taken(params: Iterable[Tensor]) -> bool:
    """Whether DeepSpeed's ZeRO has taken the parameters of a group."""
    return any(hasattr(param, "_hp_mapping") or hasattr(param, "ds_id") for param in params)


def has_flattened(params: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Whether the parameters of a group are flat tensors that DeepSpeed has put in place of those it was given."""
    flat = all(type(p) in PLAIN and p.dim() == 1 and not hasattr(p, "_hp_mapping") for p in params)
    return flat and len(params) > 0 and has_taken(given)


def flattened(group: Group, index: int, given: list[Tensor], algorithm: Algorithm[Any]) -> FlatParams | None:
    """Return the parameters in the flat tensor that DeepSpeed has put in place of a group's."""
    reason = None
    if any(hasattr(param, "ds_id") for param in given):
        reason = "DeepSpeed's ZeRO-3 has done so, which cannot be served: use ZeRO 1 or 2, or fully_shard"
    elif len(group["params"]) > 1:
        reason = "they are several, where DeepSpeed's map is for one"
    if reason is not None:
        raise ValueError(
            f"the {len(given)} parameters of param_groups[{index}] were replaced by {len(group['params'])} flat, whose "
            f"norms are no layer's: {reason}"
        )
    names = [label_of(index, position, group.get("param_names")) for position in range(len(given))]
    layout = _layout_of(given, names, group["params"][0])
    return joining(layout, group, group["params"], index, algorithm)


def _layout_of(params: Sequence[Tensor], names: Sequence[str], flat: Tensor) -> FlatLayout:
    """Return the layout of a group's flat tensor, which DeepSpeed has put in place of the group's parameters.

    Raises:
        ValueError: The flat tensor is not the one to which the map belongs.
    """
    fragments, group = [], None
    for param, name in zip(params, names, strict=True):
        if not hasattr(param, "_hp_mapping"):
            continue  # a frozen parameter
        group, mapping = param._dp_group, param._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            continue
        high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
        fragment = flat[high.start : high.start + high.numel]
        if fragment.data_ptr() != mapping.hp_fragment.data_ptr() or fragment.shape != mapping.hp_fragment.shape:
            raise ValueError(
                f"DeepSpeed's map of {name} belongs to another tensor than the one in its group: do not replace the "
                "parameters of the groups after deepspeed.initialize"
            )
        shape = tuple(param.shape)
        fragments.append(Fragment(name, shape, high.numel, start=high.start, offset=low.start))
    return FlatLayout([fragments], group)
