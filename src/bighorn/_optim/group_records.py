"""The record of each group: what the optimizer knows of a group besides the options in its dict.

A record belongs to its dict, not to a position: programs reorder, remove, merge, copy and assign groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from bighorn._arguments import about
from bighorn._distributed.flat import FlatParams
from bighorn._optim import deepspeed, flat_tensors, param_groups
from bighorn._optim.algorithm import Algorithm, Group
from bighorn._optim.entries import Indices, check_entries, parameters
from bighorn._optim.scheduled import ScheduledOptions, attach_schedules
from bighorn._optim.settings import Settings


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
    keys: tuple[str, ...] = ()
    """The keys of the dict that were checked last."""
    seen: tuple[object, ...] = ()
    """The options that were checked last, in the order of the algorithm's; none before the first check."""

    def note_checked(self, algorithm: Algorithm[Any]) -> None:
        """Note that the options in the dict have been checked."""
        self.keys, self.seen = tuple(self.group), tuple(map(self.group.get, algorithm.options))

    def load(self, group: Group, algorithm: Algorithm[Any]) -> None:
        """Take a group of a checkpoint, which has been checked, in place of the present one."""
        self.group, self.given = group, self.given or [*group["params"]]
        for name, option in self.scheduled.items():
            option.written = group[name]
        self.note_checked(algorithm)

    def adopt(self, index: int, algorithm: Algorithm[Any]) -> GroupRecord:
        """Return the record of the group with the parameters that it has now.

        Raises:
            ValueError: DeepSpeed has flattened them, and there is no map, or the flat tensor cannot be optimized.
        """
        params = self.group["params"]
        if list(map(id, params)) == list(map(id, self.flattened or self.given)):
            return self
        if deepspeed.has_flattened(params, self.given):
            held = deepspeed.flattened(self.group, index, self.given, algorithm)
            return replace(self, flat=held, flattened=[*params])
        return replace(self, flat=None, given=[*params], flattened=[])

    def copied(self, group: Group) -> GroupRecord:
        """Return the record of a dict that has taken the place of this one."""
        for key, value in self.group.items():
            if key != "param_names":
                group.setdefault(key, value)
        scheduled = {name: replace(each) for name, each in self.scheduled.items()}
        return replace(self, group=group, scheduled=scheduled, keys=(), seen=())


class GroupRecords:
    """The records of an optimizer's groups; a step of DeepSpeed leaves some of the groups out of `param_groups`.

    Args:
        algorithm: The algorithm, which declares the options of a group.
        settings: The options of the whole optimizer.
        default_schedules: The schedules of groups that have none of their own.
        prefix: The prefix of wrappers that is removed from parameters' names; None if parameters have no names.
    """

    def __init__(
        self, algorithm: Algorithm[Any], settings: Settings, default_schedules: Mapping[str, Any], prefix: str | None
    ) -> None:
        self.algorithm, self.settings = algorithm, settings
        self.default_schedules, self.prefix = default_schedules, prefix
        self.each: list[GroupRecord] = []
        self.groups: list[Group] = []
        """The dicts of the records."""
        self.has_flat = False
        """Whether a group has flat tensors."""
        self.gone: dict[int, tuple[list[int], ScheduledOptions]] = {}
        """The schedules of dicts that are gone, by their `id`, with the `id`s of their parameters: they may come back.
        """
        self._group_ids: list[int] = []
        self._param_ids: list[int] = []
        self._name_of: dict[int, str] = {}
        """The names of these parameters, by their `id`."""

    # ---- the records of a list of groups -----------------------------------------------------------------------------

    def of(self, groups: Sequence[Group]) -> list[GroupRecord]:
        """Return the record of each group; an empty one for a dict that has none yet."""
        record_of = {id(record.group): record for record in self.each}
        return [record_of.get(id(group)) or GroupRecord(group) for group in groups]

    def stepping(self, groups: Sequence[Group]) -> Sequence[GroupRecord]:
        """Return the records of a step of these groups, which DeepSpeed has left alone in `param_groups`.

        Raises:
            ValueError: An option needs the gradients of all groups.
        """
        count = sum(bool(group["params"]) for group in self.groups)
        if (option := self.settings.all_grads_option) is not None and len(groups) < count:
            raise ValueError(
                f"{option} uses all gradients, and this step is of {len(groups)} of {count} groups, as DeepSpeed's "
                "ZeRO steps them: leave it out, and set gradient_clipping in DeepSpeed's configuration, whose loss "
                "scaler skips overflows as well"
            )
        return self.of(groups)

    def indices(self) -> Indices:
        """Return the place of each parameter."""
        return {id(param): (index, position) for index, position, param in parameters(self.groups)}

    @property
    def flat(self) -> list[FlatParams | None]:
        """The parameters in the flat tensors of each group."""
        return [record.flat for record in self.each]

    @property
    def count(self) -> int:
        """The number of parameters."""
        return len(self._param_ids)

    # ---- changes of groups -------------------------------------------------------------------------------------------

    def joining(self, group: Group, index: int, present: Sequence[Group], defaults: Mapping[str, Any]) -> GroupRecord:
        """Return the record of a group that is to be added to those present, checked, with every option.

        Raises:
            TypeError: As for `add_param_group`.
            ValueError: As for `add_param_group`.
        """
        group, layout = flat_tensors.split_layout(group)
        settings = self.settings if layout is None else self.settings.without_exclusions()
        recorded = set(map(id, self.groups))
        others = [other for other in present if id(other) in recorded]
        complete, tensors = param_groups.joining(
            group, index, others, {**defaults, **self.default_schedules}, self.algorithm, settings, self.prefix
        )
        flat = flat_tensors.joining(layout, complete, tensors, index, self.algorithm)
        record = GroupRecord(complete, flat=flat, given=tensors)
        attach_schedules(complete, record.scheduled)
        if settings.backend != "auto" or self.algorithm.limits_variants(complete):
            check_entries(complete, index, tensors, self.algorithm, settings)
        record.note_checked(self.algorithm)
        return record

    def add(self, record: GroupRecord) -> None:
        """Add a record."""
        self.each.append(record)
        self.groups.append(record.group)
        self.has_flat |= record.flat is not None
        self._group_ids.append(id(record.group))
        ids = list(map(id, record.group["params"]))
        self._param_ids += ids
        named = map(id, record.given) if record.flattened else ids
        self._name_of.update(zip(named, record.group.get("param_names", ()), strict=False))

    def keep(self, records: Sequence[GroupRecord]) -> None:
        """Keep these records alone."""
        if self._name_of:
            param_groups.follow_names([each.group for each in records if not each.flattened], self._name_of)
        self.each, self.groups, self.has_flat = [], [], False
        self._group_ids, self._param_ids, self._name_of = [], [], {}
        for record in records:
            self.add(record)

    def unchanged(self, groups: Sequence[Group]) -> list[Tensor] | None:
        """Return the parameters of the groups if a program has changed neither since the last step, else None."""
        if list(map(id, groups)) != self._group_ids:
            return None
        params = list(itertools.chain.from_iterable([group["params"] for group in groups]))
        return params if list(map(id, params)) == self._param_ids else None

    def adopt(self, groups: list[Group], defaults: Mapping[str, Any]) -> bool:
        """Adopt what a program has changed in these groups; return whether there are other records now.

        A dict that is gone takes its record along, unless DeepSpeed has taken it away for a step; `gone` keeps its
        schedules, and no parameters. A copy of a dict, with one of its parameters, gets a copy of its record. An
        unknown dict joins as if it had been added.

        Raises:
            TypeError: As for `add_param_group`.
            ValueError: As for `add_param_group` and `GroupRecord.adopt`.
        """
        record_of = {id(record.group): record for record in self.each}
        present = set(map(id, groups))
        if present < record_of.keys() and any(deepspeed.has_taken(record.given) for record in self.each):
            found, left = self.each, []
        else:
            left = [record for record in self.each if id(record.group) not in present]
            holder = {id(param): record for record in left for param in record.given}
            found = [
                record_of.get(id(group)) or self._new(group, index, groups, holder, defaults)
                for index, group in enumerate(groups)
            ]
        found = [record.adopt(index, self.algorithm) for index, record in enumerate(found)]
        remaining = {id(param) for group in groups for param in group["params"]}
        for record in left:
            if record.scheduled and remaining.isdisjoint(map(id, record.given)):  # no copy has taken its place
                self.gone[id(record.group)] = list(map(id, record.given)), record.scheduled
        for each in present & self.gone.keys():
            del self.gone[each]
        if list(map(id, found)) == list(map(id, self.each)):
            return False
        self.keep(found)
        return True

    def _new(
        self,
        group: Group,
        index: int,
        groups: Sequence[Group],
        holder: Mapping[int, GroupRecord],
        defaults: Mapping[str, Any],
    ) -> GroupRecord:
        """Return the record of an unknown dict; `holder` has the records of dicts that are gone, by parameter."""
        params = group.get("params", ()) if isinstance(group, dict) else ()
        if (before := next((holder[id(param)] for param in params if id(param) in holder), None)) is not None:
            return before.copied(group)
        with about(f"param_groups[{index}]"):
            record = self.joining(group, index, groups, defaults)
        group.update(record.group)
        record.group = group
        ids, scheduled = self.gone.get(id(group), ([], {}))
        record.scheduled |= scheduled if ids == list(map(id, record.given)) else {}
        return record
