"""Tasks: a model, its data, its loss and its metrics, as one object that ``bighorn train`` and ``compare`` work on.

Any object with the members of :class:`Task` is one, for ``--task FILE.py:NAME``; it need not inherit from anything.
:class:`Defaults` lists the attributes that it may have, and :class:`Classification` is a task of tensors in memory.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from io import BytesIO
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bighorn_workbench import checks

if TYPE_CHECKING:
    from typing_extensions import Self


class Task(Protocol):
    """The members that a run needs.

    It may also have the attributes of :class:`Defaults` and these methods:

    * ``held_out()`` returns the task with a part of its training data as its split ``"validation"``, for a task that
      has no such split; runs are watched and learning rates chosen on it.
    * ``excluded(name, parameter)`` returns whether a parameter has neither weight decay nor a trust ratio; by default,
      parameters of fewer than two dims have neither, such as biases and norms.
    * ``fingerprint()`` returns a text that differs for other training data; without it, the first batch is hashed.

    Each run of ``compare`` and ``lr-find`` has a shallow copy of the task.

    Example:
        >>> class Line:
        ...     metric, higher_is_better = "error", False
        ...     x = torch.linspace(-1, 1, 64)[:, None]
        ...
        ...     def model(self):
        ...         return nn.Linear(1, 1)
        ...
        ...     def batches(self, split, batch_size, generator):
        ...         return self.x[torch.randperm(64, generator=generator)].split(batch_size)
        ...
        ...     def loss(self, model, batch):
        ...         return (model(batch) - 3 * batch).square().mean()
        ...
        ...     def evaluate(self, model, split):
        ...         return {"error": float(self.loss(model, self.x))}
        >>> task: Task = Line()
        >>> defaults(task).higher_is_better
        False
    """

    metric: str
    """The name of the metric that decides, such as ``"accuracy"``."""

    def model(self) -> nn.Module:
        """Return a newly initialised float32 model, on the CPU. The caller seeds torch's, NumPy's and Python's RNG."""

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> Iterable[Any]:
        """Return the batches of one pass over a split, ``"train"``, ``"validation"`` or ``"test"``.

        A DataLoader is one, and so is a generator. The order of ``"train"`` must depend on ``generator`` alone, which
        is seeded by the run's seed and the number of the pass, so that a run can be resumed and repeated. An endless
        pass is for a task with ``samples`` or ``steps``. Tensors in a batch have samples along dim 0 if several
        processes are to share it.
        """

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the mean loss over a batch, a scalar; optionally with metrics of the batch, for the report.

        The batch's tensors are on the model's device. Call ``model``, which may be wrapped for several processes.
        """

    def evaluate(self, model: nn.Module, split: str) -> Mapping[str, float]:
        """Return metrics on all of ``"validation"`` or ``"test"``, among them :attr:`metric`; a ``"loss"`` is shown.

        ``"validation"`` is evaluated on the way and to choose options, ``"test"`` once, after a run.
        The model is in its evaluation mode, and no gradients are computed. Batches are to be moved to its device here.
        """


@dataclass(frozen=True)
class Defaults:
    """The attributes that a task may have, and their values if it does not.

    Attributes:
        higher_is_better: Whether a larger value of the metric is better.
        batch_size: The batch size if no other is asked for.
        batch_sizes: The batch sizes that ``bighorn compare`` compares; none for ``batch_size`` alone.
        epochs: The passes over the training data of a run.
        steps: The steps of a run, in place of ``epochs``.
        samples: The number of training samples. An epoch is this many, and the training batches may be endless.
            Default: ``len(batches)`` batches.
        target: The value of the metric to which ``bighorn compare`` counts steps. Default: none
        one_thread: Whether the model is so small that one thread is faster.
        pretrained: Whether ``model()`` gives the same weights for every seed, such as trained ones. Then seeds differ
            in the order of batches and in dropout alone.
        description: The source of the data, for reports.
    """

    higher_is_better: bool = True
    batch_size: int = 32
    batch_sizes: tuple[int, ...] = ()
    epochs: float = 1.0
    steps: int | None = None
    samples: int | None = None
    target: float | None = None
    one_thread: bool = False
    pretrained: bool = False
    description: str = ""


_POSITIVE_COUNT = partial(checks.integer, least=1)


def _counts(name: str, value: object) -> list[int]:
    if not isinstance(value, tuple | list):
        raise TypeError(f"{name} must be a tuple of integers, not {value!r}")
    return [_POSITIVE_COUNT(name, each) for each in value]


_CHECKS: dict[str, checks.Check] = {
    "higher_is_better": checks.flag,
    "batch_size": _POSITIVE_COUNT,
    "batch_sizes": _counts,
    "epochs": partial(checks.number, above=True),
    "steps": checks.optional(_POSITIVE_COUNT),
    "samples": checks.optional(_POSITIVE_COUNT),
    "target": checks.optional(checks.finite),
    "one_thread": checks.flag,
    "pretrained": checks.flag,
}


def defaults(task: object) -> Defaults:
    """Return the optional attributes of a task.

    Raises:
        TypeError: An attribute is of the wrong type.
        ValueError: An attribute is out of range.

    Example:
        >>> class Tiny:
        ...     batch_size = 8
        >>> defaults(Tiny()).batch_size, defaults(Tiny()).epochs
        (8, 1.0)
    """
    found = {field.name: getattr(task, field.name) for field in fields(Defaults) if hasattr(task, field.name)}
    for name in found.keys() & _CHECKS:
        _CHECKS[name](name, found[name])
    return Defaults(**found)


TEST_BATCH = 1000
"""Samples of a batch in an evaluation."""

HELD_OUT, MOST_HELD_OUT = 0.2, 2**17
"""The share of the training data that is held out, and the most targets in it, since more are not more accurate."""


class Classification:
    """A task of samples in memory, each with a class for every target: of an image, or of each next character.

    A subclass has ``model()``, which maps inputs to logits over the last dim, or the constructor is given one. Batches
    are always full: one that extends past the end of an epoch continues with the next, in another random order.

    Args:
        train: Inputs and classes, samples along dim 0. The model gets the inputs as stored, such as bytes.
        test: Inputs and classes of the test set.
        description: The source of the data. Default: ""
        model: A function that returns a new model. Default: the method of a subclass

    Example:
        >>> inputs, targets = torch.randn(64, 8), torch.randint(3, (64,))
        >>> task = Classification((inputs, targets), (inputs, targets), model=lambda: nn.Linear(8, 3))
        >>> sorted(task.evaluate(task.model(), "test"))
        ['accuracy', 'loss']
    """

    metric = "accuracy"

    def __init__(
        self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], description: str = "", model: Any = None
    ) -> None:
        self.data = {"train": train, "test": test}
        self.description = description
        self.samples = len(train[0])
        if model is not None:
            self.model = model  # type: ignore[method-assign]

    def model(self) -> nn.Module:
        """Return a new model."""
        raise NotImplementedError("give Classification a function model=..., or a subclass a method model()")

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an endless stream of full training batches, or the batches of another split in order."""
        inputs, targets = self.data[split]
        if split != "train":
            yield from zip(*(torch.split(tensor, batch_size) for tensor in self.data[split]), strict=True)
            return
        for step in count():
            indices = batch_indices(generator.initial_seed(), step, batch_size, len(inputs))
            yield inputs[indices], targets[indices]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross-entropy, in nats, and the accuracy."""
        inputs, targets = batch
        logits, targets = model(inputs).flatten(0, -2).float(), targets.flatten().long()
        return cross_entropy(logits, targets), {"accuracy": (logits.argmax(1) == targets).float().mean()}

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the mean cross-entropy and the accuracy."""
        device = next(model.parameters()).device
        totals = torch.zeros(2, dtype=_widest(device), device=device)
        for inputs, targets in self.batches(split, TEST_BATCH, torch.Generator()):
            loss, metrics = self.loss(model, (inputs.to(device), targets.to(device)))
            totals += len(inputs) * torch.stack([loss, metrics["accuracy"]]).to(totals)
        loss, accuracy = (totals / len(self.data[split][0])).tolist()
        return {"loss": loss, "accuracy": accuracy}

    def held_out(self) -> Self:
        """Return the task with a fixed random fifth of its training data as its validation data."""
        inputs, targets = self.data["train"]
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        cut = max(1, int(HELD_OUT * len(inputs)))
        held, kept = order[:cut][: max(1, MOST_HELD_OUT // targets[0].numel())], order[cut:]
        task = copy.copy(self)
        task.data = self.data | {"train": (inputs[kept], targets[kept]), "validation": (inputs[held], targets[held])}
        task.samples = len(kept)
        return task

    def fingerprint(self) -> str:
        """Return a digest of the training data."""
        return digest(self.data["train"])


@lru_cache
def _widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums: float64, or float32 on a device without it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ascend converts float64 to float32, and warns
            return torch.zeros((), dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):  # Arc and Apple's GPUs
        return torch.float32


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return a batch with its tensors replaced, within tuples, lists and mappings; other objects are kept."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(function, each) for name, each in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, each) for each in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, each) for each in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; an object with a method ``to`` moves itself.

    Example:
        >>> to_device({"ids": torch.ones(2), "name": "a"}, torch.device("meta"))["ids"].device
        device(type='meta')
    """
    if not isinstance(batch, Tensor) and hasattr(batch, "to"):
        return batch.to(device)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of tensors, by which other data are detected."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class _Pickler(pickle.Pickler):
    """Writes the digests of tensors, since torch's own form of them has addresses."""

    def reducer_override(self, value: Any) -> Any:
        return (str, (digest([value]),)) if isinstance(value, Tensor) else NotImplemented


def first_digest(task: Task, split: str, batch_size: int) -> str:
    """Return a digest of the first batch of a split: of its tensors, or without any of all that it holds."""
    seed_generators(0)  # it may be augmented
    generator = torch.Generator().manual_seed(epoch_seed(0, 0))
    batch, file = next(iter(task.batches(split, batch_size, generator)), ()), BytesIO()
    if tensors := tensors_in(batch):
        return digest(tensors)
    with suppress(Exception):  # of objects that cannot be pickled
        _Pickler(file).dump(batch)
    return hashlib.sha256(file.getvalue()).hexdigest()


def length(batches: Iterable[Any]) -> int | None:
    """Return the number of batches of a pass, or None if it is unknown."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:  # also of a DataLoader whose dataset has none
        return None


def seed_generators(seed: int) -> None:
    """Seed all generators that a training step may use: torch's, also on a GPU, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one to be reproducible


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of the generator of a run's pass over the training data.

    Example:
        >>> epoch_seed(1, 2)
        1000005
    """
    return (seed * 1_000_003 + epoch) % 2**32


def batch_indices(first_seed: int, step: int, batch_size: int, samples: int) -> Tensor:
    """Return the samples of a step, counted from 0, in an endless stream of epochs, each with another random order.

    They depend only on the arguments, so that a checkpoint stores no state of them.

    Args:
        first_seed: The seed of the first epoch, to which the number of an epoch is added (see :func:`epoch_seed`).
        step: The number of the step, from 0.
        batch_size: The number of samples to return.
        samples: The number of samples of an epoch.

    Example:
        >>> stream = torch.cat([batch_indices(0, step, batch_size=3, samples=4) for step in range(4)])
        >>> [sorted(epoch.tolist()) for epoch in stream.split(4)]
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    """
    start = step * batch_size
    epochs = range(start // samples, (start + batch_size - 1) // samples + 1)
    stream = torch.cat([_order((first_seed + epoch) % 2**32, samples) for epoch in epochs])
    return stream[start % samples :][:batch_size]


@lru_cache(maxsize=4)
def _order(seed: int, samples: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
