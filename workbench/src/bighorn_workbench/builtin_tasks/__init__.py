"""The tasks of ``--task``: those that are built in, and any object in a file or a module of the user."""

import hashlib
import re
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
from bighorn_workbench.tasks import Classification, Task, defaults, digest, first_digest, seed_generators

__all__ = ["TASKS", "TaskName", "fingerprint", "identity", "load", "model_of"]

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
    seed_generators(0)  # data that are drawn from them are the same in every process
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


def fingerprint(task: Task, batch_size: int | None = None) -> str:
    """Return a text that identifies the training data: the task's fingerprint, or a digest of the first batch.

    Args:
        task: The task.
        batch_size: The size of the batch. Default: the task's
    """
    if hasattr(task, "fingerprint"):
        return str(task.fingerprint())
    return first_digest(task, "train", batch_size or defaults(task).batch_size)


def identity(task: Task, tuned: Task) -> str:
    """Return a digest of the data, the model and the code of a task, by which runs of another one are detected.

    Args:
        task: The task.
        tuned: The task with validation data.
    """
    data = [*_digests(task, "train", "test"), *_digests(tuned, "validation")]
    seed_generators(0)
    model = task.model()
    shapes = [(name, tuple(tensor.shape)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    about = repr([data, shapes, repr(model), task.source() if isinstance(task, UserTask) else ""])
    return hashlib.sha256(re.sub(" at 0x[0-9a-fA-F]+", "", about).encode()).hexdigest()  # without addresses


def _digests(task: Task, *splits: str) -> list[str]:
    """Return digests of all data in memory, or of the first batches of some splits."""
    inner = task.inner if isinstance(task, UserTask) else task
    if isinstance(inner, Classification):
        return [digest(pair) for pair in inner.data.values()]
    return [first_digest(task, split, defaults(task).batch_size) for split in splits]
