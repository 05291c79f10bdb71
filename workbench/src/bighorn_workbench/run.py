"""A training run: a task's model and batches, its step and its history. Nothing here prints or reads options."""

import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bighorn_workbench.builtin_tasks import fingerprint
from bighorn_workbench.builtin_tasks.user import UserError
from bighorn_workbench.checks import integer
from bighorn_workbench.config import PRECISIONS, ParallelConfig, RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.history import History
from bighorn_workbench.optimizers import OPTIMIZERS
from bighorn_workbench.ranks import ALONE, Ranks
from bighorn_workbench.tasks import Task, defaults, epoch_seed, length, seed_generators
from bighorn_workbench.train_step import TrainStep
from bighorn_workbench.values import read_options, scale_policy, warmup_steps

HEAT_COLUMNS = 400
"""The approximate largest number of steps of a run whose metrics are kept."""

MAX_UNREAD = 50
"""Steps on a GPU whose losses the host reads at once, since a read waits until the device has finished the steps."""


class DivergedError(ArithmeticError):
    """The loss is not finite, or gradients have overflowed too many times in a row.

    On the CPU, the model is as it was before the step. On a GPU, up to :data:`MAX_UNREAD` more steps were made.
    """


class Run:
    """A run of ``config`` on ``task``; two with the same arguments are bitwise equal on one machine.

    A batch is a function of seed and step alone, for any number of processes.

    Args:
        config: A resolved configuration.
        task: Its task.
        ranks: The processes that share each batch.
        evaluations: The number of evaluations in the whole run, evenly spread.
        parallel: How the processes divide the work of a step.
        split: The split that is evaluated.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        ranks: Ranks = ALONE,
        evaluations: int = 10,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008 - frozen
        split: str = "test",
    ) -> None:
        assert config.batch_size is not None
        assert config.threads is not None
        torch.set_num_threads(config.threads)
        self.config, self.task, self.split, self.ranks, self.evaluations = config, task, split, ranks, evaluations
        self.parallel, self.batch_size, self.device = parallel, config.batch_size, torch.device(config.device)
        self._batches = Batches(task, self.batch_size, config.seed)
        self.epoch_size = self._batches.epoch_size()
        seed_generators(config.seed)
        self.total = config.total_steps(self.epoch_size)
        parallel.check(config, ranks.size)
        self.peak_lr = config.peak_lr()
        self.schedule = config.lr_schedule(self.total)
        self.warmup = warmup_steps(config.warmup, self.total)
        options, loss_scale = read_options(config.optimizer_option), scale_policy(config.loss_scale)
        self.model = task.model().to(self.device, PRECISIONS.get(config.precision, torch.float32))
        self._train_step = TrainStep(task, self.model, config, parallel, ranks, self.peak_lr, options, loss_scale)
        self.optimizer = self._train_step.optimizer
        """The optimizer; with ``--shard-update`` the one of this process's part of the parameters."""
        self.metrics = OPTIMIZERS[config.optimizer].metrics
        named = self.model.named_parameters()
        self._matrices = [name for name, parameter in named if parameter.ndim > 1 and parameter.requires_grad]
        self.step = 0
        self._seed_from_step()
        self._history = History()
        self._unread: list[Tensor] = []  # means of the last steps' batches, not yet in the history
        self._max_unread = 1 if self.device.type == "cpu" else MAX_UNREAD
        self.metric: Tensor | None = None
        """The first metric of each layer in the last step that read it; None for optimizers without metrics."""

    @property
    def history(self) -> History:
        """The history up to this step.

        Raises:
            DivergedError: The loss of a step on a GPU, which was not read before, is not finite.
        """
        if self._unread:
            started = time.perf_counter()
            self._read_losses()
            self._history.seconds += time.perf_counter() - started
        return self._history

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self.step >= self.total

    @property
    def epoch(self) -> float | None:
        """Passes over the training data up to this step; None if the steps of a pass are unknown."""
        return self.step * self.epoch_size[1] / self.epoch_size[0] if self.epoch_size else None

    @cached_property
    def fingerprint(self) -> str:
        """A text that identifies the training data."""
        state = generator_state(self.device)
        found = fingerprint(self.task, self.batch_size)
        restore_generators(state, self.device)
        return found

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation follows the last step; an evaluation always follows the last step of a run."""
        return self.step * self.evaluations // self.total > (self.step - 1) * self.evaluations // self.total

    @property
    def evaluation_missing(self) -> bool:
        """Whether the evaluation that is due has failed, of a run that is resumed."""
        done = self.history.evaluations[-1][0] if self.history.evaluations else 0
        return done < self.step and self.evaluation_due

    def train_step(self) -> None:
        """Make one step.

        Raises:
            DivergedError: The loss is not finite, or gradients are not at any loss scale. On a GPU, the loss may be an
                earlier step's.
        """
        started = time.perf_counter()
        lr, history, scaler = self.schedule(self.step), self._history, self._train_step.scaler
        if scaler.is_enabled():
            history.scale.append(scaler.get_scale())
        try:
            stepped = self._train_step(next(self._batches), lr, self._record)
        except FloatingPointError as error:
            self._read_losses()
            raise self._diverged(self.step, f"step {self.step + 1}: {error}") from error
        except UserError as error:  # in the backward pass, after the loss was recorded
            self._read_losses()
            history.truncate(self.step)
            self._check_parameters(error)
            raise
        self.step += 1
        history.lr.append(lr)
        if not stepped:
            history.skipped.append(self.step)
        elif self.metrics and self._matrices and (self._heat_map_due or self.evaluation_due):
            self._record_metrics()
        if self.evaluation_due:
            self._read_losses()
        history.seconds += time.perf_counter() - started

    def _record(self, means: Tensor) -> None:
        """Record the mean loss and metrics of a step's batch."""
        self._unread.append(means)
        if len(self._unread) >= self._max_unread:
            self._read_losses()

    def _read_losses(self) -> None:
        """Add the losses of the steps since the last call to the history; this waits for the device."""
        if not self._unread:
            return
        read = torch.stack(self._unread).tolist()
        self._unread.clear()
        for loss, *metrics in read:
            steps = len(self._history.loss)
            if not math.isfinite(loss):
                raise self._diverged(steps, f"the loss became {loss} in step {steps + 1}")
            self._history.loss.append(loss)
            for name, value in zip(self._train_step.batch_metrics, metrics, strict=True):
                self._history.batch_metrics.setdefault(name, []).append(value)

    def _check_parameters(self, error: UserError) -> None:
        """Raise an error if parameters are not finite: then the run's, and not the user's code, is at fault."""
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise self._diverged(self.step, f"parameters were not finite after step {self.step}") from error

    def _diverged(self, steps: int, reason: str) -> DivergedError:
        """Return the error that ends the run, and truncate the history to the steps before."""
        self.step = steps
        self._history.truncate(steps)
        return DivergedError(reason)

    @property
    def _heat_map_due(self) -> bool:
        """Whether the last step is a column of the heat maps."""
        return (self.step - 1) % math.ceil(self.total / HEAT_COLUMNS) == 0

    def _record_metrics(self) -> None:
        """Record the metrics of all matrices, NaN for those without a gradient."""
        history, found, layers = self._history, self._train_step.telemetry(), self._matrices
        rows = {
            each.name: [found[name][each.name] if name in found else math.nan for name in layers]
            for each in self.metrics
        }
        present = [value for value in rows[self.metrics[0].name] if not math.isnan(value)]
        self.metric = torch.tensor(present) if present else None
        history.layers = layers
        if self._heat_map_due:
            history.metric_steps.append(self.step)
            for name, row in rows.items():
                history.metrics.setdefault(name, []).append(row)

    def evaluate(self) -> Mapping[str, float]:
        """Compute the task's metrics in the first process, and keep them in the history."""
        found = self._metrics(self.task, self.split)
        self.history.evaluations.append((self.step, found))
        return found

    def test(self, task: Task) -> None:
        """Compute the metrics of ``task``, which holds no data out, on its test data, and keep them in the history."""
        self.history.test = self._metrics(task, "test")

    @torch.no_grad()
    def _metrics(self, task: Task, split: str) -> dict[str, float]:
        """Evaluate, without an effect on the random numbers of later steps: a DataLoader takes one for each pass."""
        state = generator_state(self.device)
        self.model.eval()
        try:
            with self._train_step.autocast():
                found = self.ranks.from_first(lambda: dict(task.evaluate(self.model, split)))
        except UserError as error:
            self._check_parameters(error)
            raise
        restore_generators(state, self.device)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the rest of the run depends on beyond its configuration; call it in all processes."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._train_step.state_dict(),
            "step": self.step,
            "scaler": self._train_step.scaler.state_dict(),
            "history": vars(self.history),
            "generators": self.ranks.gather(generator_state(self.device)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the value of :meth:`state_dict`.

        With another number of processes, or on another type of device, dropout draws other random numbers.
        """
        self.model.load_state_dict(state["model"])
        self._train_step.load_state_dict(state["optimizer"])
        self._train_step.scaler.load_state_dict(state["scaler"])
        self.step = integer("step", state["step"], most=self.total)
        history = History(**state["history"])
        history.check(self.step, self.task.metric)
        self._history = history
        self._batches.skip(self.step)
        generators = state["generators"]
        same_device = generators[0].keys() - {"torch", "python", "numpy"} == {self.device.type} - {"cpu"}
        if same_device and len(generators) == self.ranks.size:
            restore_generators(generators[self.ranks.rank], self.device)
        else:
            self._seed_from_step()

    def _seed_from_step(self) -> None:
        """Seed the generators by step and part of the batch, so that no two samples have the same dropout."""
        seed_generators(self.config.seed + 1_000_003 * (self.ranks.rank + self.ranks.size * self.step))


class Batches:
    """The training batches of a run, pass after pass; they depend on the task, the seed and the batch size alone."""

    def __init__(self, task: Task, batch_size: int, seed: int) -> None:
        self._task, self._batch_size, self._seed = task, batch_size, seed
        self._epoch = -1
        self._pass: Iterator[Any] = iter(())

    def epoch_size(self) -> tuple[int, int] | None:
        """Return an epoch as steps, a fraction ``(numerator, denominator)``; None if their number is unknown."""
        samples = defaults(self._task).samples
        if samples is not None:
            return samples, self._batch_size
        count = length(self._begin(0))
        return None if count is None else (count, 1)

    def __next__(self) -> Any:
        for batch in self._pass:
            return batch
        self._epoch += 1
        self._pass = iter(self._begin(self._epoch))
        for batch in self._pass:
            return batch
        raise InputError(
            f"batches('train', {self._batch_size}, generator) gave no batch in pass {self._epoch + 1} over the data. "
            "Return a new iterator at every call; a batch size above the number of samples leaves none."
        )

    def skip(self, count: int) -> None:
        """Skip the batches of the first ``count`` steps, in whole passes where their length is known."""
        if (size := self.epoch_size()) is not None and size[1] == 1 and size[0]:
            passes = max(count - 1, 0) // size[0]
            self._epoch, count = self._epoch + passes, count - passes * size[0]
        for _ in range(count):
            next(self)

    def _begin(self, epoch: int) -> Iterable[Any]:
        generator = torch.Generator().manual_seed(epoch_seed(self._seed, epoch))
        return self._task.batches("train", self._batch_size, generator)


def generator_module(device: torch.device) -> Any:
    """Return the module with a device's generator; None if it has none, and for the CPU, whose generator is torch's.

    Where a device's generator is not saved, dropout draws other random numbers after `--resume`.
    """
    module = None if device.type in ("cpu", "mps", "meta") else torch.get_device_module(device)  # torch.mps takes none
    return module if hasattr(module, "get_rng_state") else None


def generator_state(device: torch.device) -> dict[str, Any]:
    """Return these generators' state, a device's under its type, in types for ``torch.load(weights_only=True)``."""
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    kind, keys, *rest = numpy_state
    module = generator_module(device)
    return {
        **({device.type: module.get_rng_state(device)} if module else {}),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
    }


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Continue from the value of :func:`generator_state` for a device of the same type."""
    if module := generator_module(device):
        module.set_rng_state(state[device.type], device)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))  # noqa: NPY002
