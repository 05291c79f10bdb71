"""A callback for Hugging Face's Trainer."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from bighorn._arguments import integer
from bighorn.telemetry import SlowLayers, scalars

__all__ = ["TelemetryCallback"]


class TelemetryCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that logs `bighorn.telemetry.scalars` to the reporters of `report_to`, such as TensorBoard.

    The scalars are not added to the trainer's own log, which is printed and saved with each checkpoint. When training
    begins, it warns if the optimizer does not use `TrainingArguments.learning_rate`; later, a warning names the layers
    that `bighorn.telemetry.SlowLayers` finds.

    Args:
        trainer: The trainer whose reporters receive the scalars.
        every: The number of steps between two reports. Default: 50.

    Raises:
        TypeError: `every` is not an integer.
        ValueError: `every` is less than 1.
    """

    def __init__(self, trainer: Trainer, every: int = 50) -> None:
        self.trainer, self.every, self.slow = trainer, integer("every", every, least=1), SlowLayers()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn about a learning rate that was set and that no group of the optimizer has."""
        del state, control
        rates = [float(group.get("initial_lr", group["lr"])) for group in kwargs["optimizer"].param_groups]
        default = next(field.default for field in dataclasses.fields(args) if field.name == "learning_rate")
        if args.learning_rate in (default, *rates):
            return
        given = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
        warnings.warn(
            f"TrainingArguments.learning_rate={args.learning_rate!r} is not used: the trainer was given an optimizer, "
            f"or its class and arguments, and its lr is {given}. Set it there, and leave learning_rate out",
            stacklevel=2,
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the scalars on the main process, after every `every`-th step."""
        self.slow.watch(kwargs["optimizer"])
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        values = scalars(kwargs["optimizer"])
        self.slow.found(values)
        reporters = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, reporters):
                callback.on_log(args, state, control, logs=values, model=kwargs["model"])
