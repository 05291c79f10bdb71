"""The answer of ``bighorn compare`` in words and as a table, with intervals over seeds; and the time of a step."""

import math
import statistics
import time
from collections.abc import Sequence

from scipy import stats

from bighorn_workbench.metrics import is_share, metric_text
from bighorn_workbench.run import DivergedError, Run
from bighorn_workbench.search import Search
from bighorn_workbench.trials import Cell, best_of

LEVEL = 0.95
"""The confidence level of the intervals of a question together: who is best, and what a larger batch costs."""

MORE_SEEDS = 10
"""The seeds that a comparison is advised to take if fewer have not settled it."""


def interval(differences: Sequence[float], comparisons: int = 1) -> tuple[float, float]:
    """Return the mean and the half-width of its interval by Student's t; an infinite one for a single difference.

    Args:
        differences: The differences.
        comparisons: The intervals that hold together at :data:`LEVEL`, by Bonferroni's correction. Default: 1

    Example:
        >>> mean, half = interval([1.0, 2.0, 3.0])
        >>> f"{mean:.1f} +- {half:.3f}"
        '2.0 +- 2.484'
    """
    mean = statistics.fmean(differences)
    if len(differences) < 2 or not math.isfinite(mean):
        return mean, math.inf
    t = float(stats.t.ppf(1 - (1 - LEVEL) / 2 / comparisons, len(differences) - 1))
    return mean, t * statistics.stdev(differences) / math.sqrt(len(differences))


def verdicts(cells: Sequence[Cell]) -> list[str]:
    """Return sentences on what a larger batch costs each optimizer, and on the comparison at the largest batch.

    The best optimizer there may be any, so that all the others count as compared with it.
    """
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.optimizer, []).append(cell)
    top = max(cell.batch_size for cell in cells)
    ranked = sorted((cell for cell in cells if cell.batch_size == top), key=lambda cell: -_sign(cell) * cell.value[1])
    several = [mine for mine in by_name.values() if len(mine) > 1]
    lines = _best(ranked[0], ranked[1], len(ranked) - 1) if len(ranked) > 1 else []
    for mine in several:
        lines += _cost(mine[0], mine[-1], len(several))
    seeds = min(len(cell.trials) for cell in cells)
    if lines and seeds > 1:
        corrected = ", corrected for the number of comparisons" if max(len(ranked) - 1, len(several)) > 1 else ""
        lines.append(f"+- are {LEVEL:.0%} intervals by Student's t, paired over {seeds} seeds{corrected}.")
    return lines


def _cost(small: Cell, large: Cell, comparisons: int) -> list[str]:
    """What an optimizer loses from one batch size to another; nothing if no seed has finished at both."""
    points = _points(small, large)
    if not points:
        return []
    mean, half = interval(points, comparisons)
    span = f"from batch {small.batch_size:,} to {large.batch_size:,}"
    word, size = ("loses", mean) if mean >= 0 else ("gains", -mean)
    if half == math.inf:
        return [f"{small.optimizer} {word} {_amount(small, size)} {span}."]
    most = f": at most {_amount(small, abs(mean) + half).split()[0]}" if abs(mean) <= half else ""
    return [f"{small.optimizer} {word} {_amount(small, size, half)} {span}{most}."]


def _best(first: Cell, second: Cell, comparisons: int) -> list[str]:
    """Whether the best optimizer at a batch size is ahead of the next one."""
    points = _points(first, second)
    has = ", ".join(
        f"{cell.optimizer} {'has ' * (cell is first)}{metric_text(cell.metric, cell.value[1])}"
        for cell in (first, second)
    )
    both = f"At batch {first.batch_size:,} {has}"
    if not points or not all(map(math.isfinite, points)):
        return [f"{both}."]
    mean, half = interval(points, comparisons)
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
    others = {trial.config.seed: trial.value for trial in other.trials}
    common = [trial for trial in one.trials if trial.config.seed in others]
    return [factor * (trial.value - others[trial.config.seed]) for trial in common]


def _amount(cell: Cell, *figures: float) -> str:
    """A difference of the metric, with its interval."""
    share = is_share(cell.metric)
    numbers = " +- ".join(f"{figure:.1f}" if share else f"{figure:.3g}" for figure in figures)
    return f"{numbers} {'points' if share else f'of {cell.metric}'}"


def _sign(cell: Cell) -> int:
    return 1 if cell.higher_is_better else -1


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


def chosen(cells: Sequence[Cell]) -> list[str]:
    """Sentences on the options that were chosen for each cell, and on how much the rate may be off."""
    lines = []
    for cell in cells:
        config = cell.trials[0].config
        options = "".join(f", {text}" for text in config.optimizer_option)
        best = best_of(cell.tuning, cell.higher_is_better)
        stopped = sum(trial.pruned for trial in cell.tuning)
        among = f"the best of {len(cell.tuning)} trials" if len(cell.tuning) > 1 else "the only trial"
        lines.append(
            f"{cell.optimizer} at batch {cell.batch_size}: lr {cell.lr:g}, warm-up {config.warmup}, weight decay "
            f"{config.weight_decay:g}{options}: {metric_text(cell.metric, best.value)} on validation data, "
            f"{among}{f', {stopped} of them stopped' * (stopped > 0)}."
        )
    return lines


def warnings(cells: Sequence[Cell]) -> list[str]:
    """Warnings for cells whose best learning rate is at an end of what was searched, or of which runs diverged."""
    found = [
        f"Warning: the best learning rate of {cell.optimizer} at batch {cell.batch_size}, {cell.lr:g}, is on the "
        f"edge of its range: give a wider one with --space {cell.optimizer}.lr=..."
        for cell in cells
        if cell.on_edge
    ]
    for cell in cells:
        diverged = sum(trial.loss == math.inf or not math.isfinite(trial.value) for trial in cell.trials)
        if diverged:
            found.append(
                f"Warning: {diverged} of {len(cell.trials)} final runs of {cell.optimizer} at batch {cell.batch_size} "
                "diverged, and count as the worst value."
            )
    return found


def unfinished(search: Search) -> list[str]:
    """Sentences on cells that lack runs."""
    lines = []
    for index, entry in enumerate(search.plan.entries):
        queue, tuning = search.final(index), search.tuning(index)
        where = f"{entry.name} at batch {entry.base.batch_size}"
        if queue is not None and len(queue.results()) < search.plan.seeds:
            lines.append(f"{where}: {len(queue.results())} of {search.plan.seeds} final runs.")
        elif queue is None and tuning:
            best, metric = best_of(tuning, search.higher), search.task.metric
            lines.append(
                f"{where}: {len(tuning)} of {search.trials} trials, the best with lr {best.config.lr:g}: "
                f"{metric} {metric_text(metric, best.value)} on validation data."
            )
        elif queue is None:
            lines.append(f"{where}: no trials yet.")
    return lines


def columns(metric: str, target: float | None) -> list[str]:
    """The heads of the table."""
    reached = "steps" if target is None else f"steps to {metric_text(metric, target, 0)}"
    return ["optimizer", "batch", "best lr", f"{metric} (min-max)", reached, "loss", "state", "time"]


def row(cell: Cell, target: bool = True) -> tuple[str, ...]:
    """A cell as text, by :func:`columns`; means over the seeds, but the median of steps and times."""
    low, mean, high = (metric_text(cell.metric, value) for value in cell.value)
    reached = f"{cell.steps_to_target:.0f} of " if math.isfinite(cell.steps_to_target) else "never of "
    return (
        cell.optimizer,
        str(cell.batch_size),
        f"{cell.lr:g}" + ("*" if cell.on_edge else ""),
        f"{mean} ({low.rstrip('%')}-{high.rstrip('%')})",
        f"{reached if target else ''}{cell.trials[0].steps}",
        "-" if math.isnan(cell.loss[1]) else f"{cell.loss[1]:.4f}",
        f"{cell.trials[0].state_bytes / 1e6:.2f} MB",
        f"{cell.seconds:.1f} s",
    )
