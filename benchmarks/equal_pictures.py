"""The pictures of comparisons at equal tuning: the test metric over the batch, and what each rate gave."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import plots
from bighorn.cli.metrics import is_share
from bighorn.cli.reports.style import SERIES, STYLE, WIDTH, label_powers, to_svg
from bighorn.cli.verdict import interval

if TYPE_CHECKING:
    from equal_tuning import Cell

BASELINE = "adamw"

PER_DECADE = 3
"""Columns of the heat map for each power of ten of the rate."""

FARTHEST = {"accuracy": 0.1, "loss": 0.5}
"""The distance from the best trial at a batch size at which the colours of the heat map end."""


def by_batch(cells: dict[int, list[Cell]], width: float = WIDTH) -> str:
    """Draw the mean test metric of each optimizer with its interval over the seeds, a panel for each batch size."""
    names = [cell.name for cell in next(iter(cells.values()))]
    metric = next(iter(cells.values()))[0].metric
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, 1.3 + 0.32 * len(names)))
        grid = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
        for axes, (batch, row) in zip(grid, cells.items(), strict=True):
            for at, cell in enumerate(row):
                mean, half = interval(list(cell.finals.values()))
                colour = SERIES[5] if cell.name == BASELINE else SERIES[0]
                axes.errorbar([mean], [at], xerr=[half], fmt="o", color=colour, capsize=3, markersize=6)
                if cell.name == BASELINE:
                    axes.axvline(mean, color=SERIES[5], linewidth=1, linestyle="--")
            if is_share(metric):
                axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False, axis="y")
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_title(f"batch {batch:,}", fontsize=11, loc="left")
            axes.set_xlabel(f"test {metric}")
        return plots.standalone(to_svg(figure, f"test {metric} by batch size"))


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


def _column(lr: float) -> int:
    return math.floor(PER_DECADE * math.log10(lr) + 1e-9)


def _badness(cell: Cell, value: float) -> float:
    return -value if is_share(cell.metric) else value
