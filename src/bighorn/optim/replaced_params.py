"""Parameters that a framework has replaced: flat tensors in place of a group's parameters, and steps of some groups.

DeepSpeed's ZeRO replaces the parameters of each group by one flat tensor, and steps one group at a time: meanwhile the
optimizer has no other groups. ZeRO 1 and 2 (0.19: utils/tensor_fragment.py, utils/mixed_precision_linkage.py) write two
attributes into every parameter that they have copied into a flat tensor: `_dp_group`, the ranks, and `_hp_mapping`, the
fragment on this rank or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bighorn.distributed.flat import FlatLayout, FlatParams, Fragment
from bighorn.distributed.sharding import PLAIN
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.flat_tensors import joining
from bighorn.optim.param_groups import label_of

GivenParams = list[Tensor]
"""The parameters that a group had when it was added.

These are no weak references: `torch.utils.swap_tensors`, by which `model.to()` converts distributed tensors and
wrappers, refuses a tensor that has one (torch 2.13).
"""


def replaced(group: Group, given: GivenParams) -> bool:
    """Whether the group has other parameters. Only the first is compared, since this runs at every step."""
    params = group["params"]
    return bool(params) and (not given or given[0] is not params[0])


def _flattened(group: Group, given: GivenParams, known: set[int]) -> bool:
    """Whether plain tensors of one dim have replaced other shapes; `known` has ids of all given parameters."""
    params: Sequence[Tensor] = group["params"]
    flat = all(type(param) in PLAIN and param.dim() == 1 and id(param) not in known for param in params)
    return flat and [param.shape for param in params] != [param.shape for param in given]


def unmapped_reason(params: GivenParams) -> str | None:
    """The reason why parameters have no such map, with the remedy, or None."""
    if any(hasattr(param, "ds_id") for param in params):
        return "DeepSpeed's ZeRO-3 has done so, which cannot be served: use ZeRO 1 or 2, or fully_shard"
    if not any(hasattr(param, "_hp_mapping") for param in params):
        return (
            "no map says where the parameters are in it: give its group a flat_layout, use DeepSpeed's ZeRO 1 or 2, "
            "which have such a map, or bighorn.shard_update"
        )
    return None


def layout_of(params: GivenParams, names: Sequence[str], flat: Tensor) -> FlatLayout:
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
        there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
        own = flat[there.start : there.start + there.numel]
        if own.data_ptr() != mapping.hp_fragment.data_ptr() or own.shape != mapping.hp_fragment.shape:
            raise ValueError(
                f"DeepSpeed's map of {name} belongs to another tensor than the one in its group: do not replace the "
                "parameters of the groups after deepspeed.initialize"
            )
        shape = tuple(param.shape)
        fragments.append(Fragment(name, shape, there.numel, start=there.start, offset=here.start))
    return FlatLayout([fragments], group)


def adopted(group: Group, index: int, all_given: Sequence[GivenParams], algorithm: Algorithm[Any]) -> FlatParams | None:
    """Return the parameters in the flat tensor that has replaced a group's; None if unflattened ones have.

    Raises:
        ValueError: There is no map of what the flat tensor holds, or it cannot be optimized.
    """
    params = all_given[index]
    if not _flattened(group, params, {id(param) for given in all_given for param in given}):
        return None
    what = f"param_groups[{index}]"
    reason = unmapped_reason(params)
    if reason is None and len(group["params"]) > 1:
        reason = "they are several, where DeepSpeed's map is for one"
    if reason is not None:
        raise ValueError(
            f"the {len(params)} parameters of {what} were replaced by {len(group['params'])} flat, whose norms are no "
            f"layer's: {reason}"
        )
    names = [label_of(index, position, group.get("param_names")) for position in range(len(params))]
    layout = layout_of(params, names, group["params"][0])
    return joining(layout, group, group["params"], index, algorithm)
