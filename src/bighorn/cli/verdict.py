"""The answer of ``bighorn compare`` in words, with intervals over seeds; and the time that its runs will take."""

import math
import statistics
import time
from collections.abc import Sequence

from scipy import stats

from bighorn.cli import sweep
from bighorn.cli.metrics import is_share, metric_text
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
        lines += _best(*sorted(largest, key=lambda cell: -_sign(cell) * _mean(cell))[:2])
    if lines and seeds > 1:
        lines.append(f"+- are {LEVEL:.0%} intervals by Student's t, paired over {seeds} seeds.")
    return lines


def _cost(small: Cell, large: Cell) -> str:
    """What an optimizer loses from one batch size to another."""
    mean, half = interval(_points(small, large))
    span = f"from batch {small.batch_size:,} to {large.batch_size:,}"
    if half == math.inf:
        return f"{small.optimizer} loses {_amount(small, mean)} {span}."
    most = f": at most {_amount(small, abs(mean) + half).split()[0]}" if abs(mean) <= half else ""
    word, size = ("loses", mean) if mean > -half else ("gains", -mean)
    return f"{small.optimizer} {word} {_amount(small, size, half)} {span}{most}."


def _best(first: Cell, second: Cell) -> list[str]:
    """Whether the best optimizer at a batch size is ahead of the next one."""
    mean, half = interval(_points(first, second))
    has = ", ".join(
        f"{cell.optimizer} {'has ' * (cell is first)}{metric_text(cell.metric, _mean(cell))}"
        for cell in (first, second)
    )
    both = f"At batch {first.batch_size:,} {has}"
    if half == math.inf:
        return [f"{both}.", f"Not settled by one seed: run --seeds {MORE_SEEDS}."]
    if mean > half:
        return [f"{both}: ahead by {_amount(first, mean, half)}."]
    seeds = len(first.trials)
    more = MORE_SEEDS if seeds < MORE_SEEDS else 2 * seeds
    return [f"{both}: apart by {_amount(first, mean, half)}.", f"Not settled: run --seeds {more}."]


def _points(one: Cell, other: Cell) -> list[float]:
    """How much better one cell is than another by seed, in points of an accuracy or in units of another metric."""
    factor = _sign(one) * (100 if is_share(one.metric) else 1)
    return [factor * (a.value - b.value) for a, b in zip(one.trials, other.trials, strict=True)]


def _amount(cell: Cell, *figures: float) -> str:
    """A difference of the metric, with its interval."""
    share = is_share(cell.metric)
    numbers = " +- ".join(f"{figure:.1f}" if share else f"{figure:.3g}" for figure in figures)
    return f"{numbers} {'points' if share else f'of {cell.metric}'}"


def _sign(cell: Cell) -> int:
    return 1 if cell.higher_is_better else -1


def _mean(cell: Cell) -> float:
    return statistics.fmean(trial.value for trial in cell.trials)


def expected_seconds(runs: Sequence[tuple[str, Run]], grids: sweep.Grids, seeds: int, tuning_seeds: int) -> float:
    """Return the seconds of all runs of a comparison on one processor, from a timed step of each.

    Args:
        runs: A fresh run for each cell, with its name.
        grids: The learning rates by name.
        seeds: The seeds of final runs.
        tuning_seeds: The seeds of each learning rate.
    """
    return sum(run.total * _step_seconds(run) * (tuning_seeds * len(grids[name]) + seeds) for name, run in runs)


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
