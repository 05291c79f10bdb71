"""The record of each group: what the optimizer knows of a group besides the options in its dict.

A record belongs to its dict, not to a position: programs reorder, remove, merge, copy and assign groups.

DeepSpeed's ZeRO replaces the parameters of each group by one flat tensor, and steps one group at a time: meanwhile the
optimizer has no other groups. ZeRO 1 and 2 (0.19: utils/tensor_fragment.py, utils/mixed_precision_linkage.py) write two
attributes into every parameter that they have copied into a flat tensor: `_dp_group`, the ranks, and `_hp_mapping`, the
fragment on this rank or None. ZeRO 3 writes `ds_id`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from bighorn.distributed.flat import FlatLayout, FlatParams, Fragment
from bighorn.distributed.sharding import PLAIN
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.flat_tensors import joining
from bighorn.optim.param_groups import label_of
from bighorn.optim.step_options import ScheduledOptions


@dataclass
class GroupRecord:
    """What the optimizer knows of a group."""

    group: Group
    scheduled: ScheduledOptions = field(default_factory=dict)
    """The options that schedules compute."""
    flat: FlatParams | None = None
    """The parameters in the flat tensors of the group; None for a group of parameters."""
    given: list[Tensor] = field(default_factory=list)
    """The parameters that the group had at the last step, or before DeepSpeed flattened them.

    These are no weak references: `torch.utils.swap_tensors`, by which `model.to()` converts distributed tensors and
    wrappers, refuses a tensor that has one (torch 2.13).
    """

    flattened: list[Tensor] = field(default_factory=list)
    """The flat tensor that DeepSpeed has put in place of them."""

    @property
    def of_deepspeed(self) -> bool:
        """Whether DeepSpeed's ZeRO has taken the parameters of the group."""
        return any(hasattr(param, "_hp_mapping") or hasattr(param, "ds_id") for param in self.given)

    def has_other_params(self) -> bool:
        """Whether a program has changed the parameters of the group."""
        return list(map(id, self.group["params"])) != list(map(id, self.flattened or self.given))

    def adopt(self, index: int, algorithm: Algorithm[Any]) -> GroupRecord:
        """Return the record of the group with the parameters that it has now.

        Raises:
            ValueError: DeepSpeed has flattened them, and there is no map, or the flat tensor cannot be optimized.
        """
        if not self.has_other_params():
            return self
        params = self.group["params"]
        flat = all(type(p) in PLAIN and p.dim() == 1 and not hasattr(p, "_hp_mapping") for p in params)
        if flat and params and self.of_deepspeed:
            held = _flattened(self.group, index, self.given, algorithm)
            return GroupRecord(self.group, self.scheduled, held, self.given, [*params])
        return GroupRecord(self.group, self.scheduled, None, [*params])


Gone = dict[int, tuple[list[int], ScheduledOptions]]
"""The schedules of dicts that are gone, by their `id`, with the `id`s of their parameters: they may come back."""

Join = Callable[[Group, int], GroupRecord]
"""A function from an unknown dict in `param_groups`, and its index, to its record."""


def adopted(
    groups: list[Group], records: Sequence[GroupRecord], gone: Gone, join: Join, algorithm: Algorithm[Any]
) -> list[GroupRecord]:
    """Return the records of the groups in `param_groups`, old and new ones.

    A dict that is gone takes its record along, unless DeepSpeed has taken it away for a step; `gone` keeps its
    schedules, and no parameters. A copy of a dict, with one of its parameters, gets a copy of its record.

    Raises:
        TypeError: As for `add_param_group`.
        ValueError: As for `add_param_group` and `GroupRecord.adopt`.
    """
    record_of = {id(record.group): record for record in records}
    present = set(map(id, groups))
    left = [record for record in records if id(record.group) not in present]
    if present < record_of.keys() and any(record.of_deepspeed for record in records):
        found, left = list(records), []
    else:
        holder = {id(param): record for record in left for param in record.given}
        found = []
        for index, group in enumerate(groups):
            record = record_of.get(id(group))
            if record is None and isinstance(group, dict):
                shared = (holder[id(param)] for param in group.get("params", ()) if id(param) in holder)
                record = _copied(group, next(shared, None))
            if record is None:
                record = join(group, index)
                ids, scheduled = gone.get(id(group), ([], {}))
                record.scheduled |= scheduled if ids == list(map(id, record.given)) else {}
            found.append(record)
    found = [record.adopt(index, algorithm) for index, record in enumerate(found)]
    remaining = {id(param) for group in groups for param in group["params"]}
    for record in left:
        if record.scheduled and remaining.isdisjoint(map(id, record.given)):  # no copy has taken its place
            gone[id(record.group)] = list(map(id, record.given)), record.scheduled
    for each in present & gone.keys():
        del gone[each]
    return found


def _copied(group: Group, record: GroupRecord | None) -> GroupRecord | None:
    """Return the record of a dict that has taken the place of another one."""
    if record is None:
        return None
    for key, value in record.group.items():
        if key != "param_names":
            group.setdefault(key, value)
    scheduled = {name: replace(each) for name, each in record.scheduled.items()}
    return GroupRecord(group, scheduled, record.flat, record.given, record.flattened)


def _flattened(group: Group, index: int, given: list[Tensor], algorithm: Algorithm[Any]) -> FlatParams | None:
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
