"""The tasks: a task is a data set, a model for it and defaults for both.

To add one, write a file beside these that defines a :class:`Task`, and an entry in :data:`TASKS`.
"""

from typing import Protocol

from torch import nn

from bighorn.cli.tasks.dataset import Dataset
from bighorn.cli.tasks.digits import Digits
from bighorn.cli.tasks.mnist import Mnist
from bighorn.cli.tasks.mnist_rows import MnistRows
from bighorn.cli.tasks.text import Text

__all__ = ["TASKS", "Dataset", "Task"]


class Task(Protocol):
    """A classification of every target position: of an image, or of the next character at each position."""

    batch_size: int
    """Default batch size."""
    epochs: float
    """Default passes over the training data."""
    batch_sizes: tuple[int, ...]
    """The batch sizes that ``bighorn compare`` compares."""
    one_thread: bool
    """Whether the model is so small that a step is faster on one thread, above all on a busy machine."""
    target: float
    """The test accuracy to which ``bighorn compare`` counts the steps."""

    def load(self, data: str | None) -> Dataset:
        """Read the data from ``--data``, or the built-in data for None; raise InputError if that fails."""

    def model(self, dataset: Dataset) -> nn.Module:
        """Build a newly initialised float32 model that maps stored inputs to logits over ``dataset.classes``."""


TASKS: dict[str, Task] = {"digits": Digits(), "text": Text(), "mnist": Mnist(), "mnist-rows": MnistRows()}
