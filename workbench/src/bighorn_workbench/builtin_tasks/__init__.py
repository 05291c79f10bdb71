"""The tasks of ``--task``: those that are built in, and any object in a file or a module of the user."""

from collections.abc import Callable, Mapping
from typing import Any

import click
import torch
from torch import nn

from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.builtin_tasks.mnist import Mnist
from bighorn_workbench.builtin_tasks.text import Text
from bighorn_workbench.builtin_tasks.user import UserTask, imported, member, user_call
from bighorn_workbench.errors import InputError
from bighorn_workbench.options import Name
from bighorn_workbench.tasks import Task, digest, epoch_seed, tensors_in

__all__ = ["TASKS", "TaskName", "fingerprint", "load", "model_of"]

TASKS: Mapping[str, Callable[[str | None], Task]] = {"digits": Digits, "text": Text, "mnist": Mnist}
"""The built-in tasks, each made from ``--data``, or from None for its own data."""

PLACES = "FILE.py:NAME or PACKAGE.MODULE:NAME"


class TaskName(Name):
    """The name of a built-in task, or the place of another."""

    def __init__(self) -> None:
        super().__init__(tuple(TASKS))

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a place as it is."""
        if value.endswith(".py"):
            self.fail(f"{value!r} is a file: name the task in it, as {value}:NAME.", param, ctx)
        return value if ":" in value else super().convert(value, param, ctx)

    def get_metavar(self, *_: Any, **__: Any) -> str:  # click 8.1 passes no context
        """Name the choices, and the form of a place."""
        return f"[{'|'.join(TASKS)}|{PLACES}]"


def load(place: str, data: str | None = None) -> Task:
    """Return a task by ``--task`` and ``--data``.

    A class or a function at a place of the user is called, with the data if they are given.

    Raises:
        InputError: There is no such task, or it lacks a member.
    """
    made = _made(place, data)
    return made if place in TASKS else UserTask(made, place)


def _made(place: str, data: str | None) -> Any:
    if place in TASKS:
        return TASKS[place](data)
    made = imported("--task", place, PLACES)
    if not callable(made):
        if data is not None:
            raise InputError(f"--data {data}: {place} is an object, which takes no data. Leave --data out.")
        return made
    arguments = () if data is None else (data,)
    return user_call(place, made, *arguments)


def model_of(place: str, data: str | None) -> nn.Module:
    """Return the model of a task, which needs no other member for it, on the current default device."""
    with torch.device("cpu"):
        task = _made(place, data)
    if place not in TASKS and not callable(member(f"--task {place}", task, "model", None)):
        raise InputError(f"--task {place} has no method model(). Give it one that returns a torch.nn.Module.")
    made: nn.Module = task.model() if place in TASKS else user_call(f"{place}: model", task.model)
    return made


def fingerprint(task: Task, batch_size: int) -> str:
    """Return a text that identifies the training data: the task's fingerprint, or a digest of the first batch."""
    if hasattr(task, "fingerprint"):
        return str(task.fingerprint())
    generator = torch.Generator().manual_seed(epoch_seed(0, 0))
    return digest(tensors_in(next(iter(task.batches("train", batch_size, generator)), ())))
