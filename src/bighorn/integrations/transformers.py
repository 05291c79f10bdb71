"""A callback for Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from bighorn.arguments import integer
from bighorn.telemetry import scalars


class TelemetryCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that logs `bighorn.telemetry.scalars` to the reporters of `report_to`, such as TensorBoard.

    The scalars are not added to the trainer's own log, which is printed and saved with each checkpoint.

    Args:
        trainer: The trainer whose reporters receive the scalars.
        every: The number of steps between two reports. Default: 50.

    Raises:
        TypeError: `every` is not an integer.
        ValueError: `every` is less than 1.
    """

    def __init__(self, trainer: Trainer, every: int = 50) -> None:
        self.trainer, self.every = trainer, integer("every", every, least=1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the scalars on the main process, after every `every`-th step."""
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        reporters = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, reporters):
                callback.on_log(args, state, control, logs=scalars(kwargs["optimizer"]), model=kwargs["model"])
