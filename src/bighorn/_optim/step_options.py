"""The options of a step: schedules are applied, and values that a program has written into the groups are checked."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bighorn._arguments import about, checked
from bighorn._optim.algorithm import Algorithm, Group
from bighorn._optim.group_records import GroupRecord
from bighorn._optim.param_groups import COUNT, MULTIPLIERS, check_keys, multiplier, refuse_vectors
from bighorn._optim.scheduled import SCHEDULED, ScheduledOption, attach_schedules, value_at
from bighorn._optim.settings import OF_THE_WHOLE, Settings

REMOVED = object()
"""Marks an option that a program has removed from a group, which gets the default again."""


class StepOptions:
    """The options of one step of some groups.

    Args:
        records: The groups that take the step.
        defaults: The values of options that a program has removed.
        algorithm: The algorithm, which declares the options.
        settings: The options of the whole optimizer.

    Raises:
        RuntimeError: A schedule and a program, such as a torch LRScheduler, both write an option of a group.
        TypeError: A value of a wrong type, or a misspelt key.
        ValueError: A value out of range, an option of the whole optimizer, or a schedule has ended. No group has
            changed.
    """

    changed: frozenset[str]
    """The options that have other values than at the last step."""

    def __init__(
        self,
        records: Sequence[GroupRecord],
        defaults: Mapping[str, Any],
        algorithm: Algorithm[Any],
        settings: Settings,
    ) -> None:
        self._counting: list[Group] = []
        attach_all(records, defaults, algorithm)
        self._driven = [(each.group, name, driven) for each in records for name, driven in each.scheduled.items()]
        self._before = [(group[name], driven.written) for group, name, driven in self._driven]
        values: list[tuple[Group, str, ScheduledOption, float]] = []
        computed: dict[tuple[int, int], float] = {}
        for index, record in enumerate(records):
            group, scheduled = record.group, record.scheduled
            if not scheduled:
                self._counting.append(group)
                continue
            if "lr" in scheduled and "initial_lr" in group:
                raise RuntimeError(
                    f"param_groups[{index}] has a schedule for lr, and a torch LRScheduler, which left 'initial_lr' "
                    "there, writes lr too: give lr as a number, or leave the LRScheduler out and remove 'initial_lr'"
                )
            overwritten = [name for name, driven in scheduled.items() if driven.overwritten(group[name])]
            if "lr" in overwritten and group["lr"] == 0:
                continue  # torch.distributed.checkpoint makes such a step to have state, and then restores lr
            for name in overwritten:
                raise RuntimeError(
                    f"param_groups[{index}] has a schedule for {name}, and a program has written {group[name]!r} "
                    f"there: give {name} as a number, or write another schedule into the group"
                )
            self._counting.append(group)
            with about(f"param_groups[{index}]"):
                for name, each in scheduled.items():
                    at = id(each.schedule), group[COUNT]  # groups share the default's schedule
                    if at not in computed:
                        computed[at] = value_at(name, each.schedule, group[COUNT])
                    values.append((group, name, each, computed[at] * multiplier(group, name)))
        for group, name, driven, value in values:  # all are computed before the first is written
            group[name] = driven.written = value
        try:
            self.changed = check_changed(records, defaults, algorithm, settings)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the groups as they were before this step."""
        for (group, name, driven), (value, written) in zip(self._driven, self._before, strict=True):
            group[name], driven.written = value, written

    def finish(self) -> None:
        """Count the step."""
        for group in self._counting:
            group[COUNT] += 1


def attach_all(records: Sequence[GroupRecord], defaults: Mapping[str, Any], algorithm: Algorithm[Any]) -> None:
    """Attach the schedules that a program has written into groups."""
    for index, record in enumerate(records):
        group = record.group
        values = [group.setdefault(name, defaults.get(name)) for name in SCHEDULED]
        if set(map(type, values)) <= {float, int} or all(map(_is_value, values)):
            continue
        with about(f"param_groups[{index}]"):
            refuse_vectors(group)
            group.update(checked(algorithm.options, {name: group[name] for name in SCHEDULED}))
            attach_schedules(group, record.scheduled)


def _is_value(value: object) -> bool:
    return isinstance(value, (float, int)) or (isinstance(value, Tensor) and value.numel() == 1)


def check_changed(
    records: Sequence[GroupRecord], defaults: Mapping[str, Any], algorithm: Algorithm[Any], settings: Settings
) -> frozenset[str]:
    """Check options that have changed, write their canonical form, and return their names.

    Raises:
        TypeError: A value of a wrong type, or a misspelt key.
        ValueError: A value out of range, or an option of the whole optimizer. No group has changed.
    """
    options, numbers = algorithm.options, algorithm.kernel_options_type.numbers
    fresh: list[tuple[GroupRecord, Group]] = []
    for index, record in enumerate(records):
        group, seen = record.group, record.seen
        if not group.keys().isdisjoint(OF_THE_WHOLE):
            settings.refuse_in_group(group, f"param_groups[{index}]")
        if (keys := tuple(group)) != record.keys:
            check_keys(group, algorithm, f"param_groups[{index}]")
            record.keys = keys
        values = tuple(map(group.get, options, itertools.repeat(REMOVED)))
        try:
            same = values == seen
        except (ValueError, RuntimeError):  # arrays and tensors of several numbers cannot be compared
            same = False
        if same and not isinstance(group.get("lr"), Tensor):
            continue
        # With 450 scheduled groups, a check of options that were left alone took most of a step on a CPU.
        changed = {*itertools.compress(options, map(operator.is_not, values, seen)), "lr"} if seen else options
        given = {name: group[name] if name in group else defaults[name] for name in changed}
        with about(f"param_groups[{index}]"):
            fresh.append((record, checked(options, given)))
    found: set[str] = set()
    for record, given in fresh:
        record.group.update(given)
        before, record.seen = record.seen, tuple(map(record.group.get, options))
        if given.keys() <= numbers:
            found.update(given)
        else:
            pairs = itertools.zip_longest(options, before, record.seen, fillvalue=REMOVED)
            found |= {name for name, old, new in pairs if name in given and (name in numbers or old != new)}
    return frozenset(found)


def refuse_unread(records: Sequence[GroupRecord], defaults: Mapping[str, Any]) -> None:
    """Raise for a multiplier that nothing has read before the first step.

    Raises:
        ValueError: An option is still the optimizer's default, although its group has a multiplier of it.
    """
    for index, record in enumerate(records):
        group = record.group
        for name, keys in MULTIPLIERS.items():
            value = group[name]
            if name in record.scheduled or not any(key in group for key in keys):
                continue
            if isinstance(value, Tensor) and value.device.type != "cpu":
                continue  # the host would wait for the value
            if value != 0 and value == defaults.get(name) and multiplier(group, name) != 1:
                key = next(key for key in keys if group.get(key) not in (None, 1))
                raise ValueError(
                    f"param_groups[{index}]: {key}={group[key]!r} changes nothing, since no scheduler has multiplied "
                    f"{name}={float(value):g} by it: give {name} as a schedule of bighorn.schedules, which is "
                    f"multiplied by it, give the group {name}={float(value) * multiplier(group, name):g} itself, or "
                    f"remove {key}"
                )
