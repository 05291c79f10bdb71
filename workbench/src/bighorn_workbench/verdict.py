"""The answer of ``bighorn compare`` in words and as a table, with intervals over seeds; and the time of a step."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from scipy import stats

from bighorn_workbench.display import duration
from bighorn_workbench.metrics import is_share, metric_text
from bighorn_workbench.search import Search
from bighorn_workbench.trials import LEAST, Cell, best_of, mean_of, paired, repeats
from bighorn_workbench.values import counted

LEVEL = 0.95
"""The confidence level of the intervals of a question together: who is best, and what a larger batch costs."""

BASELINE = "adamw"
"""The optimizer that users would leave."""

WIDER = 10
"""The factor of a range whose edge has the best rate."""

MORE_SEEDS = 10
"""The seeds that a comparison with one is advised to take."""

MOST_SEEDS = 20
"""A difference that needs more seeds than these is too small for advice on seeds."""

FEW_VALUES = 4
"""From fewer different values the step of a metric cannot be told."""

UNCLEAR = "no clear difference"
"""The label, in tables of verdicts, of a difference whose interval includes zero."""


def interval(differences: Sequence[float], comparisons: int = 1, resolution: float = 0.0) -> tuple[float, float]:
    """Return the mean and the half-width of its interval by Student's t; an infinite one for a single difference.

    Args:
        differences: The differences.
        comparisons: The intervals that hold together at :data:`LEVEL`, by Bonferroni's correction. Default: 1
        resolution: The least standard deviation: an accuracy over few samples may be the same for some seeds by
            chance. Default: 0

    Example:
        >>> mean, half = interval([1.0, 2.0, 3.0])
        >>> f"{mean:.1f} ± {half:.3f}"
        '2.0 ± 2.484'
    """
    mean = mean_of(differences)
    if len(differences) < 2 or not math.isfinite(mean):
        return mean, math.inf
    return mean, _half_width(max(statistics.stdev(differences), resolution), len(differences), comparisons)


def _half_width(deviation: float, count: int, comparisons: int) -> float:
    return float(stats.t.ppf(1 - (1 - LEVEL) / 2 / comparisons, count - 1)) * deviation / math.sqrt(count)


def enough_seeds(differences: Sequence[float], comparisons: int = 1, resolution: float = 0.0) -> int | None:
    """Return how many seeds would exclude zero from :func:`interval` if the mean and the standard deviation stay.

    None if more than :data:`MOST_SEEDS` would.

    Example:
        >>> interval([0.0, 2.0, 4.0])[1] > 2.0, enough_seeds([0.0, 2.0, 4.0])
        (True, 7)
    """
    mean, deviation = statistics.fmean(differences), max(statistics.stdev(differences), resolution)
    counts = range(len(differences) + 1, MOST_SEEDS + 1)
    return next((count for count in counts if _half_width(deviation, count, comparisons) < abs(mean)), None)


def verdicts(cells: Sequence[Cell], baseline: str | None = None) -> list[str]:
    """Return sentences, the answer first.

    They answer at each batch size whether an optimizer is better than the baseline, which one is the best of all, and
    what a larger batch costs each. Any may be best, so all the others count as compared with it. Only seeds count that
    all optimizers of a batch size have.

    Args:
        cells: The cells.
        baseline: The optimizer that the others are compared with. Default: "adamw", or the first one without it
    """
    given, cells = cells, paired(cells)
    names = list(dict.fromkeys(cell.optimizer for cell in cells))
    baseline = baseline or (BASELINE if BASELINE in names else names[0])
    by_batch: dict[int, list[Cell]] = {}
    for cell in cells:
        by_batch.setdefault(cell.batch_size, []).append(cell)
    comparisons = sum(len(row) - 1 for row in by_batch.values())
    pairs, best = [], []
    for row in by_batch.values():
        of = next((cell for cell in row if cell.optimizer == baseline), None)
        pairs += [Pair(cell, of, comparisons) for cell in row if of is not None and cell is not of]
        if len(row) > 2 or (of is None and len(row) > 1):
            best.append(_best(row, comparisons))
    several = [by_size for name in names if len(by_size := [cell for cell in cells if cell.optimizer == name]) > 1]
    pairs.sort(key=lambda pair: (not pair.is_clear, not pair.is_tuned))  # stable: batch by batch
    lines = [
        *(pair.words for pair in pairs),
        *untuned(cells),
        *best,
        *(line for by_size in several for line in _cost(by_size[0], by_size[-1], len(several))),
    ]
    for size in dict.fromkeys(cell.batch_size for cell, whole in zip(cells, given, strict=True) if cell != whole):
        count = len(by_batch[size][0].trials)
        lines.append(
            f"At batch {size:,} means and verdicts are over the {counted(count, 'seed')} that all optimizers have."
        )
    seeds = counted(min(len(cell.trials) for cell in cells), "seed")
    if any("+-" in line for line in lines):
        corrected = ", corrected for the number of comparisons" if max(comparisons, len(several)) > 1 else ""
        lines.append(f"+- are {LEVEL:.0%} intervals by Student's t, paired over {seeds}{corrected}.")
    return lines


@dataclass(frozen=True)
class Pair:
    """An optimizer and the one that it is compared with, at one batch size.

    Attributes:
        one: The optimizer.
        other: The one that it is compared with.
        comparisons: The comparisons whose intervals hold together.
    """

    one: Cell
    other: Cell
    comparisons: int

    @cached_property
    def points(self) -> tuple[float, float]:
        """How much better the first one is, and the half-width of the interval."""
        return _difference(self.one, self.other, self.comparisons) or (0.0, math.inf)

    @property
    def is_tuned(self) -> bool:
        """Whether both are tuned, without which there is no verdict."""
        return self.one.is_tuned and self.other.is_tuned

    @property
    def is_clear(self) -> bool:
        """Whether one is better."""
        mean, half = self.points
        return self.is_tuned and abs(mean) > half

    @property
    def words(self) -> str:
        """The comparison in words."""
        one, other = (
            f"{cell.optimizer} ({metric_text(cell.metric, cell.value[1])})" for cell in (self.one, self.other)
        )
        (mean, half), where = self.points, f"At batch {self.one.batch_size:,}"
        amount = _amount(self.one, abs(mean), half)
        if not self.is_tuned:
            names = f"{self.one.optimizer} cannot be compared with {self.other.optimizer}"
            return f"{where} {names}: {_not_tuned([self.one, self.other])}."
        if self.is_clear:
            return f"{where} {one} is {'ahead of' if mean > 0 else 'behind'} {other} by {amount}."
        if half == math.inf:
            return f"{where} {one} cannot be distinguished from {other}: {_why_not(self.one, self.other)}."
        points = _points(self.one, self.other)
        enough = enough_seeds(points, self.comparisons, _resolution(self.one, self.other))
        more = "" if enough is None else f", which needs about {enough} seeds to show"
        return (
            f"{where} {one} cannot be distinguished from {other} with {counted(len(points), 'seed')}: a difference of "
            f"{amount}{more}."
        )


def _why_not(one: Cell, other: Cell) -> str:
    diverged = [cell.optimizer for cell in (one, other) if not all(math.isfinite(run.value) for run in cell.trials)]
    if diverged:
        return f"runs of {_listed(diverged)} diverged"
    if not _points(one, other):
        return "no seed has finished for both"
    return f"one seed has no interval; give --seeds {MORE_SEEDS}"


def _not_tuned(cells: Sequence[Cell]) -> str:
    names = [cell.optimizer for cell in cells if not cell.is_tuned]
    return f"{_listed(names)} {'is' if len(names) == 1 else 'are'} not tuned"


def _listed(names: Iterable[str]) -> str:
    """Return different names as in "lamb, came and adamw"."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last


def untuned(cells: Sequence[Cell]) -> list[str]:
    """Return why optimizers are not tuned and what to do, in sentences; none if all are.

    Example:
        >>> untuned([Cell("lamb", 32, (), 0.1, ())])
        []
    """
    lines = []
    few = [cell for cell in cells if not cell.is_tried]
    for tried in dict.fromkeys(cell.tried for cell in few):
        group = [cell for cell in few if cell.tried == tried]
        seconds = sum(statistics.fmean(run.seconds for run in (cell.tuning or cell.trials)) for cell in group)
        lines.append(
            f"{_listed(cell.optimizer for cell in group)} had {tried} of the {LEAST} trials that a verdict needs: "
            f"give --trials {LEAST}, which takes {duration((LEAST - tried) * seconds)} more on one processor, or less "
            "with fewer --epochs, fewer layers or less data."
        )
    edged = [cell for cell in cells if cell.is_tried and cell.on_edge]
    for name in dict.fromkeys(cell.optimizer for cell in edged):
        group = [cell for cell in edged if cell.optimizer == name]
        low, high = group[0].space["lr"]
        below = [cell.lr < math.sqrt(low * high) for cell in group]
        low, high = low / WIDER if any(below) else low, high if all(below) else high * WIDER
        where = " and ".join(f"at batch {cell.batch_size:,}, {cell.lr:g}," for cell in group)
        lines.append(
            f"The best rate of {name} {where} is on the edge of its range: give --space {name}.lr={low:g},{high:g}."
        )
    return lines


def _best(row: Sequence[Cell], comparisons: int) -> str:
    """Whether an optimizer is better than all others at a batch size; if not, the optimizers that it may not beat."""
    first, *others = ranked(row)
    where = f"at batch {first.batch_size:,}"
    near = [other for other in others if not Pair(first, other, comparisons).is_clear]
    if not near:
        return f"{first.optimizer} is the clear winner {where}."
    close = [cell.optimizer for cell in near if first.is_tuned and cell.is_tuned]
    reasons = [f"{first.optimizer} cannot be distinguished from {_listed(close)}"] if close else []
    reasons += [] if first.is_tuned and len(close) == len(near) else [_not_tuned([first, *near])]
    return f"No clear winner {where}: {'; '.join(reasons)}."


def ranked(row: Sequence[Cell]) -> list[Cell]:
    """Return the cells of a batch size, the best one first."""
    return sorted(row, key=lambda cell: -_sign(cell) * cell.value[1])


def _cost(small: Cell, large: Cell, comparisons: int) -> list[str]:
    """The loss of an optimizer from one batch size to another; nothing if no seed has finished at both."""
    difference = _difference(small, large, comparisons)
    if difference is None:
        return []
    mean, half = difference
    span = f"from batch {small.batch_size:,} to {large.batch_size:,}"
    if not (small.is_tuned and large.is_tuned):
        return [f"{small.optimizer} cannot be compared {span}: it is not tuned."]
    if not math.isfinite(mean):
        return [f"{small.optimizer} cannot be compared {span}: its runs diverged."]
    word, size = ("loses", mean) if mean >= 0 else ("gains", -mean)
    if half == math.inf:
        return [f"{small.optimizer} {word} {_amount(small, size)} {span}."]
    most = f", at most {_amount(small, abs(mean) + half).split()[0]}" if abs(mean) <= half else ""
    return [f"{small.optimizer} {word} {_amount(small, size, half)} {span}{most}."]


def _difference(one: Cell, other: Cell, comparisons: int) -> tuple[float, float] | None:
    """How much better one cell is than another, and the half-width of the interval; None without a common seed."""
    points = _points(one, other)
    return interval(points, comparisons, _resolution(one, other)) if points else None


def _resolution(one: Cell, other: Cell) -> float:
    """The step of which all differences of values are multiples, in the units of :func:`_points`; 0 without one."""
    runs = [trial for cell in (one, other) for trial in cell.trials]
    on_the_way = {value for trial in runs for _, value in trial.curve}  # on test data; others have another step
    values = sorted(filter(math.isfinite, on_the_way | {trial.value for trial in runs}))
    gaps = [high - low for low, high in pairwise(values)]
    if len(values) < FEW_VALUES or sum(gaps) == math.inf:
        return 0.0
    step = min(gaps)
    return _unit(one) * step if all(abs(math.remainder(gap, step)) <= 1e-4 * gap for gap in gaps) else 0.0


def _unit(cell: Cell) -> float:
    return 100.0 if is_share(cell.metric) else 1.0


def _points(one: Cell, other: Cell) -> list[float]:
    """How much better one cell is than another by seed, in points of an accuracy or in units of another metric."""
    factor = _sign(one) * _unit(one)
    others = {trial.config.seed: trial.value for trial in other.trials}
    common = [trial for trial in one.trials if trial.config.seed in others]
    return [factor * (trial.value - others[trial.config.seed]) for trial in common]


def _amount(cell: Cell, *figures: float) -> str:
    """A difference of the metric, with its interval."""
    share, last = is_share(cell.metric), figures[-1]
    places = 1 - math.floor(math.log10(last)) if 0 < last < 0.1 else 1  # of points: the interval has two digits
    numbers = " +- ".join(format(figure, f".{places}f" if share else ".3g") for figure in figures)
    return f"{numbers} {'points' if share else f'of {cell.metric}'}"


def _sign(cell: Cell) -> int:
    return 1 if cell.higher_is_better else -1


def chosen(cells: Sequence[Cell]) -> list[str]:
    """Sentences on the options that were chosen for each cell, and on how much the rate may be off."""
    lines = []
    for cell in cells:
        config = cell.trials[0].config
        options = "".join(f", {text}" for text in config.optimizer_option)
        among = f"the best of {len(cell.tuning)} trials" if len(cell.tuning) > 1 else "the only trial"
        if cell.repeats:
            among += f" by the mean of {1 + repeats(len(cell.tuning))[1]} seeds"
        lines.append(
            f"{cell.optimizer} at batch {cell.batch_size}: lr {cell.lr:g}, warm-up {config.warmup}, weight decay "
            f"{config.weight_decay:g}{options}: {metric_text(cell.metric, cell.best.value)} on validation data, "
            f"{among}."
        )
    return lines


def warnings(cells: Sequence[Cell]) -> list[str]:
    """Warnings for cells of which runs diverged."""
    return [
        f"Warning: {diverged} of {len(cell.trials)} final runs of {cell.optimizer} at batch {cell.batch_size} "
        "diverged. They count as the worst value."
        for cell in cells
        if (diverged := sum(trial.diverged for trial in cell.trials))
    ]


def unfinished(search: Search) -> list[str]:
    """Sentences on cells that lack runs."""
    lines = []
    for index, entry in enumerate(search.plan.entries):
        queue, tuning = search.final(index), search.tuning(index)
        where = f"{entry.name} at batch {entry.base.batch_size}"
        if queue is not None and not queue.points:
            lines.append(
                f"{where}: all {counted(len(tuning), 'trial')} diverged, so that no options were chosen: give a lower "
                f"--space {entry.name}.lr."
            )
        elif queue is not None and len(queue.results()) < search.seeds:
            lines.append(f"{where}: {len(queue.results())} of {search.seeds} final runs.")
        elif queue is None and tuning:
            best, metric, again = best_of(tuning, search.higher), search.task.metric, search.repeats(index)
            repeated = f" and {counted(len(again), 'repeat')}" if again else ""
            lines.append(
                f"{where}: {len(tuning)} of {search.trials} trials{repeated}, the best with lr {best.config.lr:g}: "
                f"{metric} {metric_text(metric, best.value)} on validation data."
            )
        elif queue is None:
            lines.append(f"{where}: no trials yet.")
    return lines


def columns(metric: str, target: float | None) -> list[str]:
    """The heads of the table.

    Example:
        >>> columns("accuracy", 0.975)[4], columns("perplexity", 12.0)[4]
        ('steps to 97.5%', 'steps to 12')
    """
    value = "" if target is None else f" to {100 * target:g}%" if is_share(metric) else f" to {target:g}"
    return ["optimizer", "batch", "best lr", f"{metric} (min-max)", f"steps{value}", "loss", "state", "time"]


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
