"""The options of a step: schedules are applied, and values that a program has written into the groups are checked.

Schedules are computed from the number of an optimizer's `step()` calls. The groups hold this number, since every method
of saving keeps this part of a `state_dict`. The schedules themselves are code: they are not saved, and must be given
again at construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bighorn.arguments import StepFunction, about, checked, number
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.param_groups import COUNT, MULTIPLIERS, check_keys, multiplier, refuse_vectors
from bighorn.optim.settings import OF_THE_WHOLE, Settings

SCHEDULED = ("lr", "weight_decay")
"""The options that a schedule can compute."""

NUMBERS = ("lr", "betas", "eps", "weight_decay")
"""Options that may change between steps without a new plan."""


@dataclass
class ScheduledOption:
    """An option of a group that a schedule computes."""

    schedule: StepFunction
    written: float
    """The last value of the schedule."""
    left: float
    """The value in the group when the last step ended."""

    def overwritten(self, value: Any) -> bool:
        """Whether a program has written `value` since then; such a value holds for one step."""
        return bool(value not in (self.written, self.left))


ScheduledOptions = dict[str, ScheduledOption]
"""The scheduled options of a group, by name."""


def value_at(name: str, schedule: StepFunction, step: int) -> float:
    """Return the value of a schedule at a step.

    Raises:
        TypeError: The schedule returned something that is not a number.
        ValueError: The schedule has ended, or returned a value that the option cannot have.
    """
    try:
        value = schedule(step)
        return number(name, value.item() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # other types may need other arguments
        raise kind(f"the schedule of {name} at step {step}: {error}") from error


def value_in(group: Group, name: str, schedule: StepFunction) -> float:
    """Return the value of a schedule for a group, as timm's schedulers compute it: times the group's `lr_scale`."""
    return value_at(name, schedule, group[COUNT]) * multiplier(group, name)


def attach_schedules(group: Group, scheduled: ScheduledOptions) -> None:
    """Attach the schedules in a group, and write their present values into the group instead."""
    for name in SCHEDULED:
        if not callable(group[name]):
            continue
        schedule = group[name]
        if name not in scheduled or scheduled[name].schedule is not schedule:
            value = value_in(group, name, schedule)
            scheduled[name] = ScheduledOption(schedule, value, value)
        group[name] = scheduled[name].left


class ScheduleStep:
    """The scheduled values of one step. All are computed before the first is written, so an error changes no group."""

    def __init__(self, groups: list[Group], scheduled: list[ScheduledOptions]) -> None:
        self.counting: list[Group] = []
        self.driven = [
            (group, name, driven) for group, own in zip(groups, scheduled, strict=True) for name, driven in own.items()
        ]
        self.before = [(group[name], driven.written) for group, name, driven in self.driven]
        values: list[tuple[Group, str, ScheduledOption, float]] = []
        for index, (group, own) in enumerate(zip(groups, scheduled, strict=True)):
            if "lr" in own and "initial_lr" in group:
                raise RuntimeError(
                    f"param_groups[{index}] has a schedule for lr, and a torch LRScheduler, which left 'initial_lr' "
                    "there, writes lr too: give lr as a number, or leave the LRScheduler out and remove 'initial_lr'"
                )
            if any(driven.overwritten(group[name]) for name, driven in own.items()):
                continue
            self.counting.append(group)
            if own:  # else there is no error to prefix
                with about(f"param_groups[{index}]"):
                    values += [
                        (group, name, driven, value_in(group, name, driven.schedule)) for name, driven in own.items()
                    ]
        for group, name, driven, value in values:
            group[name] = driven.written = value

    def undo(self) -> None:
        """Restore the groups as they were before this step."""
        for (group, name, driven), (value, written) in zip(self.driven, self.before, strict=True):
            group[name], driven.written = value, written

    def finish(self) -> None:
        """Count the step."""
        for group in self.counting:
            group[COUNT] += 1
        for group, name, driven in self.driven:
            driven.left = group[name]


def refuse_unread(groups: list[Group], scheduled: Sequence[Container[str]], defaults: Group) -> None:
    """Raise for a multiplier that nothing has read before the first step.

    Raises:
        ValueError: An option is still the optimizer's default, although its group has a multiplier of it.
    """
    for index, (group, own) in enumerate(zip(groups, scheduled, strict=True)):
        for name, keys in MULTIPLIERS.items():
            value = group[name]
            if name in own or not any(key in group for key in keys):
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


REMOVED = object()
"""Marks an option that a program has removed from a group, which gets the default again."""


@dataclass
class OptionGuard:
    """The options of the groups at the last step, to notice that a program has written into a group since then."""

    version: int = 0
    """A number that grows with every change of an option."""
    _keys: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _seen: dict[int, tuple[object, ...]] = field(default_factory=dict)

    def refresh(self, groups: list[Group], defaults: Group, algorithm: Algorithm[Any], settings: Settings) -> bool:
        """Check options that have changed, and write their canonical form. Return whether plans still hold.

        Raises:
            TypeError: A value of a wrong type, or a misspelt key.
            ValueError: A value out of range, or an option of the whole optimizer. No group has changed.
        """
        fresh: dict[int, Group] = {}
        for index, group in enumerate(groups):
            if not group.keys().isdisjoint(OF_THE_WHOLE):
                settings.refuse_own(group, f"param_groups[{index}]")
            if (keys := tuple(group)) != self._keys.get(index):
                check_keys(group, algorithm, f"param_groups[{index}]")
                self._keys[index] = keys
            values, seen = tuple(map(group.get, algorithm.options, itertools.repeat(REMOVED))), self._seen.get(index)
            if isinstance(group.get("lr"), Tensor) or not _same(values, seen):
                # With 450 scheduled groups, a check of options that were left alone took most of a step on a CPU.
                each = zip(algorithm.options, values, seen or [REMOVED] * len(values), strict=True)
                changed = [name for name, value, old in each if value is not old or old is REMOVED or name == "lr"]
                complete = defaults | group
                with about(f"param_groups[{index}]"):
                    fresh[index] = checked(algorithm.options, {name: complete[name] for name in changed})
        plans_hold = True
        for index, options in fresh.items():
            old = dict(zip(algorithm.options, self._seen.get(index, ()), strict=False))
            plans_hold &= all(old.get(name) == options[name] for name in options if name not in NUMBERS)
            groups[index].update(options)
            self._seen[index] = tuple({**old, **options}.values())
            self.version += 1
        return plans_hold


def _same(values: tuple[object, ...], old: tuple[object, ...] | None) -> bool:
    """Whether option values are unchanged; values that cannot be compared, such as arrays, are treated as changed."""
    try:
        return values == old
    except (ValueError, RuntimeError):
        return False


def attach_all(
    groups: list[Group], scheduled: list[ScheduledOptions], defaults: Group, algorithm: Algorithm[Any]
) -> None:
    """Attach the schedules that a program has written into groups."""
    for index, (group, own) in enumerate(zip(groups, scheduled, strict=True)):
        values = [group.setdefault(name, defaults.get(name)) for name in SCHEDULED]
        if not all(isinstance(v, (float, int)) or (isinstance(v, Tensor) and v.numel() == 1) for v in values):
            with about(f"param_groups[{index}]"):
                refuse_vectors(group)
                group.update(checked(algorithm.options, {name: group[name] for name in SCHEDULED}))
                attach_schedules(group, own)
