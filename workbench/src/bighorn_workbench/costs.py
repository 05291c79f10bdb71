"""The time of a comparison's runs, in seconds, measured before they begin."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bighorn_workbench.run import DivergedError, Run
from bighorn_workbench.trials import EVALUATIONS

LOOKING = 0.5
"""The evaluations of a final run take at most this share of the time of its steps."""


@dataclass(frozen=True)
class Cost:
    """The seconds of a run of a cell.

    Attributes:
        steps: All training steps of a run on the whole training data.
        evaluation: One evaluation.
    """

    steps: float
    evaluation: float


def step_seconds(run: Run) -> float:
    """Return the time of a fresh run's second step, since the first one allocates, or of the only one."""
    seconds = 0.0
    for _ in range(min(2, run.total)):
        started = time.perf_counter()
        try:
            run.train_step()
        except DivergedError:
            break
        seconds = time.perf_counter() - started
    return seconds


def evaluation_seconds(run: Run) -> float:
    """Return the time of an evaluation."""
    started = time.perf_counter()
    run.evaluate()
    return time.perf_counter() - started


def evaluations(costs: Sequence[Cost]) -> int:
    """Return the evaluations of each final run: as many as give the steps to the target, or as their time allows.

    Example:
        >>> evaluations([Cost(steps=60.0, evaluation=0.1)]), evaluations([Cost(60.0, 10.0), Cost(60.0, 2.0)])
        (20, 3)
    """
    fit = (LOOKING * cost.steps / cost.evaluation for cost in costs if cost.evaluation)
    return max(1, min(EVALUATIONS, math.floor(min(fit, default=EVALUATIONS))))
