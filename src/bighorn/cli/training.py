"""A training run: a model, its optimizer and how far they are. Nothing here prints or reads options."""

import math
import time
import typing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bighorn.cli import randomness
from bighorn.cli.config import PRECISIONS, Division, RunConfig
from bighorn.cli.errors import InputError
from bighorn.cli.optimizers import OPTIMIZERS
from bighorn.cli.placement import place
from bighorn.cli.ranks import ALONE, Ranks
from bighorn.cli.schedule import batch_indices, learning_rate, warmup_steps
from bighorn.cli.tasks import TASKS, Dataset
from bighorn.cli.updating import Updater
from bighorn.cli.values import matches

TEST_BATCH = 1000

HEAT_COLUMNS = 400
"""Gauges are kept for about this many steps of a run."""


MOST_UNREAD = 50
"""Steps on a GPU whose losses the host reads at once: each read waits until the device has done all steps before."""


class DivergedError(ArithmeticError):
    """The loss is not finite, or no gradient has been for long.

    On the CPU, the model is as it was before the step. On a GPU, up to :data:`MOST_UNREAD` more steps were made.
    """


@dataclass
class History:
    """What happened in a run, step by step, as plain lists: saved as they are, so that a report shows the whole run.

    Attributes:
        loss: Training loss of each step's batch.
        accuracy: Training accuracy of each step's batch.
        lr: Learning rate of each step.
        scale: Loss scale of each step; empty without.
        skipped: The steps, counted from 1, that changed nothing, since gradients overflowed.
        tests: Evaluations, ``(step, loss, accuracy)``.
        layers: Names of the matrices, which gauges tell of; empty for optimizers without gauges.
        gauge_steps: The steps, counted from 1, whose gauges were kept.
        gauges: By a gauge's name, for each of these steps one figure per layer.
        seconds: Time spent in training steps.
        commands: The command that started the run, and each one that resumed it.
    """

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    tests: list[tuple[int, float, float]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    gauge_steps: list[int] = field(default_factory=list)
    gauges: dict[str, list[list[float]]] = field(default_factory=dict)
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)

    def steps_to(self, accuracy: float) -> int | None:
        """The first evaluated step at which the test accuracy reached ``accuracy``, None if it never did."""
        return next((step for step, _, reached in self.tests if reached >= accuracy), None)


class Run:
    """A run of ``config`` on ``dataset``; two with the same arguments are bitwise equal on one machine.

    A batch is the same whatever the number of processes: a function of seed and step alone.

    Args:
        config: A resolved configuration.
        dataset: The data of its task.
        ranks: The processes that share each batch.
        evaluations: How many times the whole run evaluates, evenly spread.
        division: How the processes divide the work of a step.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        ranks: Ranks = ALONE,
        evaluations: int = 10,
        division: Division = Division(),  # noqa: B008 - frozen
    ) -> None:
        assert config.batch_size is not None
        assert config.threads is not None
        division.check(config.batch_size, ranks.size)
        torch.set_num_threads(config.threads)
        self.config, self.dataset, self.ranks, self.evaluations = config, dataset, ranks, evaluations
        self.division, self.batch_size, self.device = division, config.batch_size, torch.device(config.device)
        self.total = config.total_steps(len(dataset))
        self.warmup = warmup_steps(config.warmup, self.total)
        self.peak_lr = config.peak_lr()
        if self.warmup > self.total:
            raise InputError(f"--warmup {config.warmup} is longer than the run of {self.total} steps: take less.")
        self.schedule = learning_rate(config.schedule, self.total, self.warmup, self.peak_lr)
        randomness.seed(config.seed)
        self.model = TASKS[config.task].model(dataset).to(self.device, PRECISIONS.get(config.precision, torch.float32))
        self._forward = place(self.model, division.parallel, ranks)
        self._updater = Updater(self.model, self._forward, config, self.peak_lr, division, ranks)
        self._shares = division.shares(ranks.size)
        self._share = slice(ranks.rank % self._shares, None, self._shares)
        self.gauges = OPTIMIZERS[config.optimizer].gauges
        self._matrices = {name for name, parameter in self.model.named_parameters() if parameter.ndim > 1}
        self.step = 0
        self._seed_generators()
        self._history = History()
        self._unread: list[Tensor] = []  # mean loss and accuracy of the last steps, not yet in the history
        self._most_unread = 1 if self.device.type == "cpu" else MOST_UNREAD
        self.gauge: Tensor | None = None
        """The first gauge of each layer in the last step that it was read after; None for optimizers without."""

    @property
    def history(self) -> History:
        """What happened so far.

        Raises:
            DivergedError: The loss of a step on a GPU, which was not read before, is not finite.
        """
        if self._unread:
            started = time.perf_counter()
            self._read_losses()
            self._history.seconds += time.perf_counter() - started
        return self._history

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; with ``--shard-update`` that of this process's part of the parameters."""
        return self._updater.optimizer

    @property
    def whole_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of all parameters, which is sharded as they are."""
        whole: torch.optim.Optimizer = self._updater.whole
        return whole

    @property
    def is_sharded(self) -> bool:
        """Whether tensors of the model are divided among processes, so that no checkpoint is one file."""
        return self.division.shards(self.ranks.size)

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self.step >= self.total

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.step * self.batch_size / len(self.dataset)

    @property
    def evaluation_due(self) -> bool:
        """Whether the step just made is one to evaluate after; the last one always is."""
        return self.step * self.evaluations // self.total > (self.step - 1) * self.evaluations // self.total

    def train_step(self) -> None:
        """Make one step.

        Raises:
            DivergedError: If the loss is not finite, or gradients are not, whatever the loss scale. On a GPU, that
                may be the loss of an earlier step.
        """
        started = time.perf_counter()
        lr, history, updater = self.schedule(self.step), self._history, self._updater
        updater.set_lr(lr)
        if updater.scaler.is_enabled():
            history.scale.append(updater.scaler.get_scale())
        indices = batch_indices(self.config.seed, self.step, self.batch_size, len(self.dataset))
        parts = indices[self._share].chunk(self.division.accumulate)
        self.model.train()
        means = torch.zeros(2, device=self.device)
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            with updater.part(last):
                loss, accuracy = self._score(self._forward, self.dataset.inputs[part], self.dataset.targets[part])
                means += torch.stack((loss.detach(), accuracy)) / len(parts)
                if last:
                    self._unread.append(self.ranks.mean(means))
                    if len(self._unread) >= self._most_unread:
                        self._read_losses()
                updater.backward(loss / len(parts))
        try:
            stepped = updater.step()
        except FloatingPointError as error:
            self._read_losses()
            raise self._diverged(self.step, f"step {self.step + 1}: {error}") from error
        self.step += 1
        history.lr.append(lr)
        if not stepped:
            history.skipped.append(self.step)
        elif self.gauges and (self._heat_map_due or self.evaluation_due):
            self._record_gauges()
        if self.evaluation_due:
            self._read_losses()
        history.seconds += time.perf_counter() - started

    def _read_losses(self) -> None:
        """Add the losses of the steps since the last call to the history; this waits for the device."""
        if not self._unread:
            return
        read = torch.stack(self._unread).tolist()
        self._unread.clear()
        for loss, accuracy in read:
            steps = len(self._history.loss)
            if not math.isfinite(loss):
                raise self._diverged(steps, f"the loss became {loss} in step {steps + 1}")
            self._history.loss.append(loss)
            self._history.accuracy.append(accuracy)

    def _diverged(self, steps: int, reason: str) -> DivergedError:
        """The error that ends the run, with the history cut to the steps before."""
        self.step, history = steps, self._history
        kept = sum(step <= steps for step in history.gauge_steps)
        history.skipped = [step for step in history.skipped if step <= steps]
        for values in (history.loss, history.accuracy, history.lr, history.scale):
            del values[steps:]
        del history.gauge_steps[kept:]
        for rows in history.gauges.values():
            del rows[kept:]
        return DivergedError(reason)

    @property
    def _heat_map_due(self) -> bool:
        """Whether the step just made is a column of the heat maps."""
        return (self.step - 1) % math.ceil(self.total / HEAT_COLUMNS) == 0

    def _record_gauges(self) -> None:
        history = self._history
        telemetry = self._updater.telemetry(tuple(gauge.name for gauge in self.gauges))
        rows = {name: {key: of[key] for key in of if key in self._matrices} for name, of in telemetry.items()}
        first = rows[self.gauges[0].name]
        self.gauge = torch.tensor(list(first.values()))
        history.layers = list(first)
        if self._heat_map_due:
            history.gauge_steps.append(self.step)
            for name, row in rows.items():
                history.gauges.setdefault(name, []).append(list(row.values()))

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy on the whole test data, kept in the history."""
        self.model.eval()
        inputs, targets = self.dataset.test_inputs[self._share], self.dataset.test_targets[self._share]
        totals, count = torch.zeros(2, dtype=torch.float64, device=self.device), len(self.dataset.test_inputs)
        # As many batches in every process, since a sharded model goes forward in all of them together.
        for start in range(0, math.ceil(count / self._shares), TEST_BATCH):
            batch = slice(start, start + TEST_BATCH)
            count_here = len(inputs[batch])
            some, wanted = (
                (inputs[batch], targets[batch])
                if count_here
                else (self.dataset.test_inputs[:1], self.dataset.test_targets[:1])
            )
            totals += count_here * torch.stack(self._score(self.model, some, wanted)).double()
        loss, accuracy = (self.ranks.sum(totals) * self._shares / self.ranks.size / count).tolist()
        self.history.tests.append((self.step, loss, accuracy))
        return loss, accuracy

    def _score(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and accuracy, of samples on the CPU."""
        inputs, targets = (tensor.to(self.device, non_blocking=True) for tensor in (inputs, targets))
        with self._updater.autocast():
            logits = model(inputs)
        logits, targets = logits.flatten(0, -2).float(), targets.flatten().long()
        return cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on beyond its configuration; call it in all processes."""
        return {**self.progress(), "model": self.model.state_dict(), "optimizer": self._updater.state_dict()}

    def progress(self) -> dict[str, Any]:
        """What of :meth:`state_dict` is neither the model's nor the optimizer's; call it in all processes."""
        return {
            "step": self.step,
            "scaler": self._updater.scaler.state_dict(),
            "history": vars(self.history),
            "generators": self.ranks.gather(randomness.state(self.device))[: self._shares],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        With another number of shares, or on another type of device, dropout draws anew.
        """
        self.model.load_state_dict(state["model"])
        self._updater.load_state_dict(state["optimizer"])
        self.load_progress(state)

    def load_progress(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`progress` returned, with the model and the optimizer of then.

        Raises:
            ValueError: The history is not that of so many steps of this run.
        """
        _check_progress(state, self.total)
        self._updater.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self._history = History(**state["history"])
        generators = state["generators"]
        if len(generators) == self._shares and randomness.fits(generators[0], self.device):
            randomness.restore(generators[self.ranks.rank % self._shares], self.device)
        else:
            self._seed_generators()

    def _seed_generators(self) -> None:
        """Seed them by share of the batch and step, so that no two samples drop out the same."""
        share = self.ranks.rank % self._shares
        randomness.seed(self.config.seed + 1_000_003 * (share + self._shares * self.step))


def _check_progress(state: dict[str, Any], total: int) -> None:
    step, history = state["step"], vars(History(**state["history"]))
    if not matches(step, int) or not 0 <= step <= total:
        raise ValueError(f"it is after step {step!r:.20} of {total}")
    if not isinstance(state["generators"], list) or not all(isinstance(one, dict) for one in state["generators"]):
        raise ValueError("its state of generators is damaged")
    hints = typing.get_type_hints(History)
    wrong = [name for name in hints if not matches(history[name], hints[name])]
    wrong += [name for name in ("loss", "accuracy", "lr") if name not in wrong and len(history[name]) != step]
    if wrong:
        raise ValueError(f"its history of {wrong[0]} is damaged")
