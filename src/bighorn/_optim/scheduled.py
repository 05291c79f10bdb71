"""Schedules of a group's options: they are attached to the group, and their values written into it.

Schedules are computed from the number of an optimizer's `step()` calls. The groups hold this number, since every method
of saving keeps this part of a `state_dict`. The schedules themselves are code: they are not saved, and must be given
again at construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bighorn._arguments import StepFunction, number
from bighorn._optim.algorithm import Group
from bighorn._optim.param_groups import COUNT, multiplier

SCHEDULED = ("lr", "weight_decay")
"""The options that a schedule can compute."""


@dataclass
class ScheduledOption:
    """An option of a group that a schedule computes."""

    schedule: StepFunction
    written: float
    """The last value of the schedule."""

    def overwritten(self, value: Any) -> bool:
        """Whether a program has written `value` into the group since then."""
        return bool(value != self.written)


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
            scheduled[name] = ScheduledOption(schedule, value_in(group, name, schedule))
        group[name] = scheduled[name].written
