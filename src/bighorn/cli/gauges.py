"""What an optimizer's telemetry tells of each layer, and how people see it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gauge:
    """One figure per layer and step.

    Attributes:
        name: The attribute of ``telemetry()``.
        label: Its name for people, also the column on the terminal.
        heading: The heading of its heat map.
        text: What the heat map shows.
        times_lr: Whether the heat map shows it times the learning rate.
    """

    name: str
    label: str
    heading: str
    text: str
    times_lr: bool


TRUST_RATIO = Gauge(
    "trust_ratio",
    "trust ratio",
    "Effective learning rate by layer",
    "Learning rate x trust ratio: how far a step moves each layer, relative to a plain Adam step.",
    times_lr=True,
)

CONFIDENCE = Gauge(
    "confidence",
    "confidence",
    "Effective learning rate by layer",
    "Learning rate x mean confidence, what CAME multiplies its momentum with: large where the momentum predicts well, "
    "and beyond measure while elements have met no gradient yet, as behind dead units.",
    times_lr=True,
)

UPDATE_RMS = Gauge(
    "update_rms",
    "update RMS",
    "Update size by layer",
    "Root mean square of the update before it was clipped. What is above the threshold, 1 by default, was scaled down "
    "to it.",
    times_lr=False,
)
