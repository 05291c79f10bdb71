"""The record of a run, step by step."""

from dataclasses import dataclass, field

from bighorn_workbench.records import check_types


@dataclass
class History:
    """The record of a run as plain lists. Checkpoints store all of it, so that a report shows a resumed run as a whole.

    Attributes:
        loss: Training loss of each step's batch.
        batch_metrics: Metrics of each step's batch, by name; empty for a task whose loss comes without.
        lr: Learning rate of each step.
        scale: Loss scale of each step; empty without loss scaling.
        skipped: The steps, counted from 1, that changed nothing because gradients overflowed.
        evaluations: Evaluations on the way, ``(step, metrics by name)``.
        test: Metrics on the test data after the last step; empty before.
        layers: Names of the matrices, for which metrics are kept; empty for optimizers without metrics.
        metric_steps: The steps, counted from 1, whose metrics were kept.
        metrics: One value per layer for each of these steps, by the name of the metric.
        seconds: Time spent in training steps.
        commands: The command that started the run, and each one that resumed it.
    """

    loss: list[float] = field(default_factory=list)
    batch_metrics: dict[str, list[float]] = field(default_factory=dict)
    lr: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    test: dict[str, float] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    metric_steps: list[int] = field(default_factory=list)
    metrics: dict[str, list[list[float]]] = field(default_factory=dict)
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)

    def check(self, steps: int, metric: str) -> None:
        """Raise an error for a record that is not of a run of so many steps, since a file may hold anything."""
        check_types(self)
        evaluated, columns = [step for step, _ in self.evaluations], len(self.metric_steps)
        lengths = {len(self.loss), len(self.lr), len(self.scale) or steps}
        if (
            lengths != {steps}
            or any(len(values) > steps for values in self.batch_metrics.values())
            or not all(0 < step <= steps for step in (*evaluated, *self.metric_steps))
            or not all(metric in found for _, found in self.evaluations)
            or (self.test and metric not in self.test)
            or any(len(rows) != columns for rows in self.metrics.values())
            or any(len(row) != len(self.layers) for rows in self.metrics.values() for row in rows)
        ):
            raise ValueError(f"the history is not of {steps} steps and the metric {metric!r}")

    def truncate(self, steps: int) -> None:
        """Remove the steps after the first ``steps``."""
        kept = sum(step <= steps for step in self.metric_steps)
        self.skipped = [step for step in self.skipped if step <= steps]
        for values in (self.loss, self.lr, self.scale, *self.batch_metrics.values()):
            del values[steps:]
        del self.metric_steps[kept:]
        for rows in self.metrics.values():
            del rows[kept:]
