"""A training run: a model, its optimizer and how far they are. Nothing here prints or reads options."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bighorn.cli import randomness
from bighorn.cli.config import PRECISIONS, RunConfig
from bighorn.cli.errors import InputError
from bighorn.cli.optimizers import OPTIMIZERS, build_optimizer
from bighorn.cli.ranks import ALONE, Ranks
from bighorn.cli.schedule import batch_indices, learning_rate, warmup_steps
from bighorn.cli.tasks import TASKS, Dataset

TEST_BATCH = 1000

HEAT_COLUMNS = 400
"""Gauges are kept for about this many steps of a run."""


class DivergedError(ArithmeticError):
    """The loss is not finite. The model is as it was before the step."""


@dataclass
class History:
    """What happened in a run, step by step, as plain lists: saved as they are, so that a report shows the whole run.

    Attributes:
        loss: Training loss of each step's batch.
        accuracy: Training accuracy of each step's batch.
        lr: Learning rate of each step.
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

    Args:
        config: A resolved configuration.
        dataset: The data of its task.
        ranks: The processes that share each batch.
        evaluations: How many times the whole run evaluates, evenly spread.
    """

    def __init__(self, config: RunConfig, dataset: Dataset, ranks: Ranks = ALONE, evaluations: int = 10) -> None:
        assert config.batch_size is not None
        assert config.weight_decay is not None
        assert config.threads is not None
        ranks.check(config.batch_size)
        torch.set_num_threads(config.threads)
        self.config, self.dataset, self.ranks, self.evaluations = config, dataset, ranks, evaluations
        self.batch_size = config.batch_size
        self.total = config.total_steps(len(dataset))
        self.warmup = warmup_steps(config.warmup, self.total)
        self.peak_lr = config.peak_lr()
        if self.warmup > self.total:
            raise InputError(f"--warmup {config.warmup} is longer than the run of {self.total} steps: take less.")
        self.schedule = learning_rate(config.schedule, self.total, self.warmup, self.peak_lr)
        randomness.seed(config.seed)
        self.model = TASKS[config.task].model(dataset).to(PRECISIONS[config.precision])
        self._forward = ranks.wrap(self.model)
        self.optimizer = build_optimizer(
            config.optimizer,
            self.model,
            self.peak_lr,
            config.weight_decay,
            config.backend,
            config.state_dtype,
            config.optimizer_option,
        )
        self.gauges = OPTIMIZERS[config.optimizer].gauges
        self._matrices = {name for name, parameter in self.model.named_parameters() if parameter.ndim > 1}
        randomness.seed(config.seed + 1_000_003 * ranks.rank)
        self.step = 0
        self.history = History()
        self.gauge: Tensor | None = None
        """The first gauge of each layer in the last step; None for optimizers without."""

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
            DivergedError: If the loss is not finite.
        """
        started = time.perf_counter()
        lr = self.schedule(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        indices = batch_indices(self.config.seed, self.step, self.batch_size, len(self.dataset))
        indices = indices[self.ranks.rank :: self.ranks.size]
        self.model.train()
        loss, accuracy = _score(self._forward(self.dataset.inputs[indices]), self.dataset.targets[indices])
        mean_loss, mean_accuracy = self.ranks.mean(torch.stack((loss.detach(), accuracy))).tolist()
        if not math.isfinite(mean_loss):
            raise DivergedError(f"the loss became {mean_loss} in step {self.step + 1}")
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step += 1
        self.history.loss.append(mean_loss)
        self.history.accuracy.append(mean_accuracy)
        self.history.lr.append(lr)
        if self.gauges:
            self._record_gauges()
        self.history.seconds += time.perf_counter() - started

    def _record_gauges(self) -> None:
        telemetry, history = self.optimizer.telemetry(), self.history  # type: ignore[attr-defined]
        matrices = [index for index, name in enumerate(telemetry.names) if name in self._matrices]
        self.gauge = getattr(telemetry, self.gauges[0].name)[matrices]
        history.layers = [telemetry.names[index] for index in matrices]
        if (self.step - 1) % math.ceil(self.total / HEAT_COLUMNS) == 0:
            history.gauge_steps.append(self.step)
            for gauge in self.gauges:
                figures = getattr(telemetry, gauge.name)[matrices]
                history.gauges.setdefault(gauge.name, []).append(figures.tolist())

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy on the whole test data, kept in the history."""
        self.model.eval()
        inputs, targets = self.dataset.test_inputs, self.dataset.test_targets
        totals = torch.zeros(2, dtype=torch.float64)
        for start in range(0, len(inputs), TEST_BATCH):
            batch = slice(start, start + TEST_BATCH)
            totals += len(inputs[batch]) * torch.stack(_score(self.model(inputs[batch]), targets[batch])).double()
        loss, accuracy = (totals / len(inputs)).tolist()
        self.history.tests.append((self.step, loss, accuracy))
        return loss, accuracy

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on beyond its configuration; call it in all processes."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": vars(self.history),
            "generators": self.ranks.gather(randomness.state()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned, with as many processes as made it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.history = History(**state["history"])
        randomness.restore(state["generators"][self.ranks.rank])


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits, targets = logits.flatten(0, -2).float(), targets.flatten().long()
    return cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()
