"""The pictures of comparisons at equal tuning: the test metric over the batch, and the result of each rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

import plots
from bighorn_workbench.metrics import is_share
from bighorn_workbench.reports.style import SERIES, STYLE, WIDTH, label_powers, to_svg
from bighorn_workbench.verdict import interval

if TYPE_CHECKING:
    from equal_tuning import Cell

BASELINE = "adamw"

ERRORS = (0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The ticks of axes of errors."""

PER_DECADE = 3
"""Columns of the heat map for each power of ten of the rate."""

FARTHEST = {"accuracy": 0.1, "loss": 0.5}
"""The distance from the best trial at a batch size at which the colours of the heat map end."""


def final_runs(panels: dict[str, list[Cell]], width: float = WIDTH) -> str:
    """Draw runs of each optimizer, and their mean with its interval: test error or loss, a panel for each row of cells.

    An interval that leaves the panel is wider than all runs.
    """
    names = [cell.name for cell in next(iter(panels.values()))]
    metric = next(iter(panels.values()))[0].metric
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, 1.3 + 0.32 * len(names)))
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, row) in zip(grid, panels.items(), strict=True):
            every: list[float] = []
            for at, cell in enumerate(row):
                runs = [_error(cell, value) for value in cell.finals.values()]
                every += runs
                mean, half = interval(runs)
                colour = SERIES[5] if cell.name == BASELINE else SERIES[0]
                axes.plot(runs, [at] * len(runs), "o", color=colour, markersize=3.5, alpha=0.35)
                axes.errorbar([mean], [at], xerr=[half], fmt="o", color=colour, capsize=3, markersize=6)
                if cell.name == BASELINE:
                    axes.axvline(mean, color=SERIES[5], linewidth=1, linestyle="--")
            if is_share(metric):
                axes.set_xscale("log", nonpositive="clip")
                low, high = min(every) / 1.2, max(every) * 1.2
                ticks = [tick for tick in ERRORS if low <= tick <= high]
                axes.set_xticks(ticks, [f"{100 * tick:g}%" for tick in ticks])
                axes.xaxis.set_minor_locator(NullLocator())
                axes.set_xlim(low, high)
            else:
                axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False, axis="y")
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_title(title, fontsize=11, loc="left")
            axes.set_xlabel("test error" if is_share(metric) else f"test {metric}")
        return plots.standalone(to_svg(figure, f"test {metric} of all final runs"))


def by_rate(cells: dict[int, list[Cell]]) -> str:
    """Draw how far the best trial of each range of rates is from the best of all at this batch, for each optimizer."""
    every = [cell for row in cells.values() for cell in row]
    names, metric = [cell.name for cell in next(iter(cells.values()))], every[0].metric
    columns = [_column(lr) for cell in every for lr, _ in cell.trials]
    first, last = min(columns), max(columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.3 + 0.32 * len(names)))
        grid = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
        for axes, (batch, row) in zip(grid, cells.items(), strict=True):
            values = np.full((len(names), last - first + 1), math.inf)
            best = min(_badness(cell, value) for cell in row for _, value in cell.trials)
            for at, cell in enumerate(row):
                for lr, value in cell.trials:
                    place = at, _column(lr) - first
                    values[place] = min(values[place], min(_badness(cell, value) - best, FARTHEST[metric]))
            edges = [10 ** (place / PER_DECADE) for place in range(first, last + 2)]
            image = axes.pcolormesh(
                edges,
                np.arange(len(names) + 1) - 0.5,
                np.ma.masked_invalid(values),
                cmap="viridis_r",
                norm=Normalize(0, FARTHEST[metric]),
            )
            axes.set_xscale("log")
            label_powers(axes.xaxis, 5)
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_title(f"batch {batch:,}", fontsize=11, loc="left")
            axes.set_xlabel("learning rate")
        ends = "points" if is_share(metric) else "nats"
        scale = 100 if is_share(metric) else 1
        bar = figure.colorbar(image, ax=list(grid), label=f"{ends} behind the best trial", pad=0.015, extend="max")
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{scale * value:g}")
        bar.outline.set_visible(False)
        return plots.standalone(to_svg(figure, f"distance of trials from the best {metric}, by learning rate"))


def _error(cell: Cell, value: float) -> float:
    return 1 - value if is_share(cell.metric) else value


def _column(lr: float) -> int:
    return math.floor(PER_DECADE * math.log10(lr) + 1e-9)


def _badness(cell: Cell, value: float) -> float:
    return -value if is_share(cell.metric) else value
