"""``bighorn compare`` and ``bighorn lr-find`` as functions, for notebooks: they return results and print nothing.

They need the extra ``bighorn-workbench[study]``.
"""

import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bighorn_workbench.builtin_tasks.trial import resolved
from bighorn_workbench.builtin_tasks.user import UserTask
from bighorn_workbench.compare import CompareConfig, kept, prepare
from bighorn_workbench.config import RunConfig, check_device
from bighorn_workbench.errors import InputError
from bighorn_workbench.lr_find import Found, SearchConfig, find
from bighorn_workbench.run import generator_state, restore_generators
from bighorn_workbench.storage import Place, StudyPlace, check_place
from bighorn_workbench.tasks import Task
from bighorn_workbench.trials import Cell
from bighorn_workbench.verdict import unfinished, verdicts
from bighorn_workbench.verdict import warnings as of_diverged

__all__ = ["Cell", "Comparison", "Found", "compare", "lr_find"]


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        cells: Each optimizer at each batch size: its chosen options, final runs and trials.
        answers: Which is best and what a larger batch costs, in sentences; then what diverged and which runs lack.
    """

    cells: list[Cell]
    answers: list[str]


def compare(
    task: Task,
    optimizers: str | Sequence[str] = ("lamb", "adamw"),
    batch_sizes: Sequence[int] | int | None = None,
    study: Place | str | None = None,
    **options: Any,
) -> Comparison:
    """Compare optimizers on a task, as ``bighorn compare`` does, in this process.

    Args:
        task: The task.
        optimizers: Names of optimizers or variants, one or several, as ``--optimizers`` has them. Default: ("lamb",
            "adamw")
        batch_sizes: Batch sizes, one or several. Default: the task's
        study: A file for every finished run, or the address of a database, as ``--study`` has them, which another call
            or the command continues. Default: none
        options: Other options of the command by name, such as ``trials=12``, ``seeds=3`` or ``epochs=2``.

    Raises:
        ValueError: An option is wrong, or something of the task.

    Example:
        >>> import torch
        >>> from bighorn_workbench.tasks import Classification
        >>> inputs = torch.randn(64, 4)
        >>> data = inputs, (inputs[:, 0] > 0).long()
        >>> task = Classification(data, data, model=lambda: torch.nn.Linear(4, 2))
        >>> found = compare(task, ["sgd"], [16], trials=1, seeds=1, epochs=1)
        >>> found.cells[0].optimizer, len(found.cells[0].trials)
        ('sgd', 1)
    """
    for name in options.keys() & {"data", "processes"}:
        raise InputError(f"compare() takes no {name}: the task has its data, and runs are in this process. Omit it.")
    sizes = [batch_sizes] if isinstance(batch_sizes, int) else batch_sizes
    config = CompareConfig(
        task=type(task).__name__,
        optimizers=optimizers if isinstance(optimizers, str) else ",".join(optimizers),
        batch_sizes=None if sizes is None else ",".join(map(str, sizes)),
        **options,
    )
    check_device(config.device)
    with _restored(), tempfile.TemporaryDirectory() as folder:
        place = None if study is None else StudyPlace().convert(study, None, None)
        if place is not None:
            check_place(place)
        search = prepare(config, UserTask(task, config.task), place or Path(folder) / "study")
        with closing(search.database), kept(search, place, lambda text: warnings.warn(text, stacklevel=2)):
            search.release()
            search.work()
            cells = search.cells()
            answers = verdicts(cells, config.baseline) if cells else []
            return Comparison(cells, [*answers, *of_diverged(cells), *unfinished(search)])


def lr_find(
    task: Task, optimizer: str = "lamb", lr_min: float | None = None, lr_max: float | None = None, **options: Any
) -> Found:
    """Find a learning rate to start from, as ``bighorn lr-find`` does.

    Args:
        task: The task.
        optimizer: The name of an optimizer, as of ``--optimizer``. Default: "lamb"
        lr_min: The lowest rate. Default: the optimizer's
        lr_max: The highest rate. Default: the optimizer's
        options: Other options of the command by name, such as ``epochs=2`` or ``batch_size=64``.

    Returns:
        The runs; ``lr`` is the rate.

    Raises:
        ValueError: An option is wrong, or something of the task.

    Example:
        >>> import torch
        >>> from bighorn_workbench.tasks import Classification
        >>> inputs = torch.randn(64, 4)
        >>> data = inputs, (inputs[:, 0] > 0).long()
        >>> task = Classification(data, data, model=lambda: torch.nn.Linear(4, 2))
        >>> found = lr_find(task, "sgd", lr_min=0.1, lr_max=1.0, batch_size=16, epochs=2)
        >>> 0.1 < found.lr < 1.0
        True
    """
    search, user_task = SearchConfig(lr_min, lr_max), UserTask(task, type(task).__name__)
    config = RunConfig(**{**options, "task": user_task.place, "optimizer": optimizer})
    config.check()
    with _restored():
        return find(*resolved(user_task, config), search.span(optimizer))


def _restored() -> ExitStack:
    """Return a context after which torch's threads and the generators are as they were."""
    stack, cpu = ExitStack(), torch.device("cpu")
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(restore_generators, generator_state(cpu), cpu)
    return stack
