"""A callback for Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from bighorn.arguments import integer
from bighorn.telemetry import scalars


class TelemetryCallback(TrainerCallback):  # type: ignore[misc]
    """Gives `bighorn.telemetry.scalars` to what `report_to` names: TensorBoard, Weights & Biases and so on.

    They stay out of the trainer's own log, which is printed and saved with each checkpoint.

    Args:
        trainer: Whose reporters are told.
        every: How many steps lie between two reports. Default: 50.

    Raises:
        TypeError: `every` is no integer.
        ValueError: `every` is less than 1.
    """

    def __init__(self, trainer: Trainer, every: int = 50) -> None:
        self.trainer, self.every = trainer, integer("every", every, least=1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report, if it is time to, in the process that reports."""
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        reporters = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, reporters):
                callback.on_log(args, state, control, logs=scalars(kwargs["optimizer"]), model=kwargs["model"])
