"""What happened in a run, step by step: it travels in checkpoints, so that a report shows the whole run."""

from dataclasses import dataclass, field
from typing import NamedTuple

HEAT_COLUMNS = 400
"""Trust ratios are kept for about this many steps of a run."""


class Test(NamedTuple):
    """One evaluation on the test data after ``step`` steps."""

    step: int
    loss: float
    accuracy: float


@dataclass
class History:
    """Plain lists, so that it is saved as it is.

    Attributes:
        loss: Training loss of each step's batch.
        accuracy: Training accuracy of each step's batch.
        lr: Learning rate of each step.
        tests: Evaluations, ``(step, loss, accuracy)``.
        layers: Names of the parameters that have a trust ratio; empty for other optimizers.
        ratio_steps: The steps, counted from 1, whose trust ratios were kept.
        ratios: For each of them one trust ratio per layer.
        seconds: Time spent in training steps.
        commands: The command that started the run, and each one that resumed it.
    """

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    tests: list[tuple[int, float, float]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    ratio_steps: list[int] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)

    def steps_to(self, accuracy: float) -> int | None:
        """The first evaluated step at which the test accuracy reached ``accuracy``, None if it never did."""
        return next((step for step, _, reached in self.tests if reached >= accuracy), None)
