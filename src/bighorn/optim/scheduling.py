"""What drives a group's learning rate and weight decay: its schedule, unless somebody wrote a value of their own.

The number of an optimizer's `step()` calls drives its schedules. It lies in the groups, since that is the part of a
`state_dict` that every way of saving keeps; the schedules are code, do not, and are given again at construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bighorn.arguments import about, number
from bighorn.optim.checks import StepFunction

SCHEDULED = ("lr", "weight_decay")
COUNT = "schedule_step"
"""The key of a group that counts the calls of `step()` by which its schedules have moved."""

Group = dict[str, Any]


@dataclass
class Driven:
    """An option of a group that a schedule drives."""

    schedule: StepFunction
    written: float
    """What the schedule gave last."""
    left: float
    """What stood in the group when the last step ended."""

    def overwritten(self, value: Any) -> bool:
        """Whether somebody wrote `value` since: then it holds for one step."""
        return bool(value not in (self.written, self.left))


Drivers = dict[str, Driven]


def value_at(name: str, schedule: StepFunction, step: int) -> float:
    """What a schedule says.

    Raises:
        TypeError: It says something that is no number.
        ValueError: It is over, or says what the option cannot be.
    """
    try:
        value = schedule(step)
        return number(name, value.item() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # those of others may want other arguments
        raise kind(f"the schedule of {name} at step {step}: {error}") from error


def take_over(group: Group, drivers: Drivers) -> None:
    """Make the schedules that stand in a group drive it, and give it their present values instead."""
    for name in SCHEDULED:
        if not callable(group[name]):
            continue
        schedule = group[name]
        if name not in drivers or drivers[name].schedule is not schedule:
            value = value_at(name, schedule, group[COUNT])
            drivers[name] = Driven(schedule, value, value)
        group[name] = drivers[name].left


class Drive:
    """The values of one step. They are all found out first, so that an error leaves every group as it is."""

    def __init__(self, groups: list[Group], drivers: list[Drivers]) -> None:
        self.counting: list[Group] = []
        self.driven = [
            (group, name, driven) for group, own in zip(groups, drivers, strict=True) for name, driven in own.items()
        ]
        self.before = [(group[name], driven.written) for group, name, driven in self.driven]
        values: list[tuple[Group, str, Driven, float]] = []
        for index, (group, own) in enumerate(zip(groups, drivers, strict=True)):
            if "lr" in own and "initial_lr" in group:
                raise RuntimeError(
                    f"param_groups[{index}] has a schedule for lr, and a torch LRScheduler, which left 'initial_lr' "
                    "there, writes lr too: give lr as a number, or leave the LRScheduler out and remove 'initial_lr'"
                )
            if any(driven.overwritten(group[name]) for name, driven in own.items()):
                continue
            self.counting.append(group)
            if own:  # else there is nothing to tell, at every step
                with about(f"param_groups[{index}]"):
                    values += [
                        (group, name, driven, value_at(name, driven.schedule, group[COUNT]))
                        for name, driven in own.items()
                    ]
        for group, name, driven, value in values:
            group[name] = driven.written = value

    def undo(self) -> None:
        """Leave the groups as they were before this step."""
        for (group, name, driven), (value, written) in zip(self.driven, self.before, strict=True):
            group[name], driven.written = value, written

    def finish(self) -> None:
        """Count the step."""
        for group in self.counting:
            group[COUNT] += 1
        for group, name, driven in self.driven:
            driven.left = group[name]
