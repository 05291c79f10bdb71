"""A callback for Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from bighorn._arguments import integer
from bighorn.telemetry import SlowLayers, scalars

__all__ = ["TelemetryCallback"]


class TelemetryCallback(Callback):  # type: ignore[misc]
    """A callback that logs `bighorn.telemetry.scalars` of the trainer's optimizers with the trainer's loggers.

    Args:
        every: The number of steps between two reports. Default: 50.

    Raises:
        TypeError: `every` is not an integer.
        ValueError: `every` is less than 1.
    """

    def __init__(self, every: int = 50) -> None:
        self.every, self._last = integer("every", every, least=1), 0
        self._slow: list[SlowLayers] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the scalars on the main process, after every `every`-th step."""
        del pl_module
        step = trainer.global_step
        self._slow = self._slow or [SlowLayers() for _ in trainer.optimizers]
        for slow, optimizer in zip(self._slow, trainer.optimizers, strict=True):
            slow.watch(optimizer)
        if step == self._last or step % self.every or not trainer.is_global_zero:
            return
        self._last = step
        for slow, optimizer in zip(self._slow, trainer.optimizers, strict=True):
            values = scalars(optimizer)
            slow.found(values)
            for logger in trainer.loggers:
                logger.log_metrics(values, step)
