"""The map of DeepSpeed's ZeRO 1 and 2: which elements of a parameter a rank's flat tensor holds.

DeepSpeed (0.19: utils/tensor_fragment.py, utils/mixed_precision_linkage.py) writes two attributes into every parameter
that it has copied into a flat tensor: `_dp_group`, the ranks, and `_hp_mapping`, the fragment on this rank or None.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bighorn.distributed.flat import FlatLayout, Fragment


def unmapped_reason(params: Sequence[Tensor | None]) -> str | None:
    """The reason why parameters have no such map, with the remedy, or None."""
    if any(hasattr(param, "ds_id") for param in params):
        return "DeepSpeed's ZeRO-3 has done so, which cannot be served: use ZeRO 1 or 2, or fully_shard"
    if not any(hasattr(param, "_hp_mapping") for param in params):
        return (
            "no map says where the parameters are in it: give its group a flat_layout, use DeepSpeed's ZeRO 1 or 2, "
            "which have such a map, or bighorn.shard_update"
        )
    return None


def layout_of(params: Sequence[Tensor | None], names: Sequence[str], flat: Tensor) -> FlatLayout:
    """Return the layout of a group's flat tensor, which DeepSpeed has put in place of the group's parameters.

    Raises:
        ValueError: The flat tensor is not the one to which the map belongs.
    """
    fragments, group = [], None
    for param, name in zip(params, names, strict=True):
        if param is None or not hasattr(param, "_hp_mapping"):
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
