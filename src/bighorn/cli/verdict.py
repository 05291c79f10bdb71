"""The answer of ``bighorn compare`` in words, with intervals over seeds; and the time that its runs will take."""

import math
import statistics
import time
from collections.abc import Sequence

from scipy import stats

from bighorn.cli import sweep
from bighorn.cli.run import DivergedError, Run
from bighorn.cli.sweep import Cell

LEVEL = 0.95
"""The confidence level of all intervals."""

MORE_SEEDS = 10
"""The seeds that a comparison is advised to take if fewer have not settled it."""


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its interval by Student's t; an infinite one for a single difference.

    Example:
        >>> mean, half = interval([1.0, 2.0, 3.0])
        >>> f"{mean:.1f} +- {half:.3f}"
        '2.0 +- 2.484'
    """
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, math.inf
    t = float(stats.t.ppf((1 + LEVEL) / 2, len(differences) - 1))
    return mean, t * statistics.stdev(differences) / math.sqrt(len(differences))


def verdicts(cells: Sequence[Cell]) -> list[str]:
    """Return sentences on what a larger batch costs each optimizer, and on the comparison at the largest batch."""
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.optimizer, []).append(cell)
    seeds = len(cells[0].trials)
    lines = [_cost(mine[0], mine[-1]) for mine in by_name.values() if len(mine) > 1]
    top = max(cell.batch_size for cell in cells)
    largest = [cell for cell in cells if cell.batch_size == top]
    if len(largest) > 1:
        lines += _best(*sorted(largest, key=lambda cell: -_mean(cell))[:2])
    if lines and seeds > 1:
        lines.append(f"+- are {LEVEL:.0%} intervals by Student's t, paired over {seeds} seeds.")
    return lines


def _cost(small: Cell, large: Cell) -> str:
    """What an optimizer loses from one batch size to another."""
    mean, half = interval(_points(small, large))
    span = f"from batch {small.batch_size:,} to {large.batch_size:,}"
    if half == math.inf:
        return f"{small.optimizer} loses {mean:.1f} points {span}."
    most = f": at most {abs(mean) + half:.1f}" if abs(mean) <= half else ""
    word, size = ("loses", mean) if mean > -half else ("gains", -mean)
    return f"{small.optimizer} {word} {size:.1f} +- {half:.1f} points {span}{most}."


def _best(first: Cell, second: Cell) -> list[str]:
    """Whether the best optimizer at a batch size is ahead of the next one."""
    mean, half = interval(_points(first, second))
    has = f"{first.optimizer} has {_mean(first):.1%}, {second.optimizer} {_mean(second):.1%}"
    both = f"At batch {first.batch_size:,} {has}"
    if half == math.inf:
        return [f"{both}.", f"Not settled by one seed: run --seeds {MORE_SEEDS}."]
    if mean > half:
        return [f"{both}: ahead by {mean:.1f} +- {half:.1f} points."]
    seeds = len(first.trials)
    more = MORE_SEEDS if seeds < MORE_SEEDS else 2 * seeds
    return [f"{both}: apart by {mean:.1f} +- {half:.1f} points.", f"Not settled: run --seeds {more}."]


def _points(one: Cell, other: Cell) -> list[float]:
    """The differences of two cells' accuracies by seed, in points."""
    return [100 * (a.accuracy - b.accuracy) for a, b in zip(one.trials, other.trials, strict=True)]


def _mean(cell: Cell) -> float:
    return statistics.fmean(trial.accuracy for trial in cell.trials)


def expected_seconds(runs: Sequence[tuple[str, Run]], grids: sweep.Grids, seeds: int, tuning_seeds: int) -> float:
    """Return the seconds of all runs of a comparison on one processor, from a timed step of each.

    Args:
        runs: A fresh run for each cell, with its name.
        grids: The learning rates by name.
        seeds: The seeds of final runs.
        tuning_seeds: The seeds of each learning rate.
    """
    return sum(
        run.total * _step_seconds(run) * ((1 - sweep.HELD_OUT) * tuning_seeds * len(grids[name]) + seeds)
        for name, run in runs
    )


def _step_seconds(run: Run) -> float:
    """The time of a run's second step, since the first one allocates; of the first if there is no other."""
    seconds = 0.0
    for _ in range(min(2, run.total)):
        started = time.perf_counter()
        try:
            run.train_step()
        except DivergedError:
            break
        seconds = time.perf_counter() - started
    return seconds
