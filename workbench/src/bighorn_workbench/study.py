"""``bighorn compare`` and ``bighorn lr-find`` as functions, for notebooks: they return results and print nothing.

They need the extra ``bighorn-workbench[study]``.
"""

import tempfile
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bighorn_workbench.builtin_tasks.trial import resolved
from bighorn_workbench.builtin_tasks.user import UserTask
from bighorn_workbench.compare import CompareConfig, kept, prepare
from bighorn_workbench.config import RunConfig
from bighorn_workbench.lr_find import Found, SearchConfig, find
from bighorn_workbench.storage import Place, StudyPlace
from bighorn_workbench.tasks import Task
from bighorn_workbench.trials import Cell
from bighorn_workbench.verdict import unfinished, verdicts

__all__ = ["Cell", "Comparison", "Found", "compare", "lr_find"]


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        cells: Each optimizer at each batch size: its chosen options, final runs and trials.
        answers: Which is best and what a larger batch costs, in sentences; without cells, why there are none.
    """

    cells: list[Cell]
    answers: list[str]


def compare(
    task: Task,
    optimizers: str | Sequence[str] = ("lamb", "adamw"),
    batch_sizes: Sequence[int] | None = None,
    study: Place | str | None = None,
    **options: Any,
) -> Comparison:
    """Compare optimizers on a task, as ``bighorn compare`` does, in this process.

    Args:
        task: The task.
        optimizers: Names of optimizers or variants, one or several, as ``--optimizers`` has them. Default: ("lamb",
            "adamw")
        batch_sizes: Batch sizes. Default: the task's
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
    config = CompareConfig(
        task=type(task).__name__,
        optimizers=optimizers if isinstance(optimizers, str) else ",".join(optimizers),
        batch_sizes=None if batch_sizes is None else ",".join(map(str, batch_sizes)),
        **options,
    )
    with tempfile.TemporaryDirectory() as folder:
        place = None if study is None else StudyPlace().convert(study, None, None)
        search = prepare(config, UserTask(task, config.task), place or Path(folder) / "study")
        with closing(search.database), kept(search, place, lambda text: warnings.warn(text, stacklevel=2)):
            search.release()
            search.work()
            cells = search.cells()
            return Comparison(cells, verdicts(cells, config.baseline) if cells else unfinished(search))


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
    return find(*resolved(user_task, config), search.span(optimizer))
