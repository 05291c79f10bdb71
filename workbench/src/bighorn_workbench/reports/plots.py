"""Figures for the reports, as SVG with the colours and the font of the page around it."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from bighorn_workbench.metrics import is_share, metric_text
from bighorn_workbench.reports.style import (
    INK,
    SERIES,
    TIP,
    WIDTH,
    accuracy_scale,
    add_tip,
    drawn,
    finite,
    has_lone_points,
    label_powers,
    thinned,
    to_svg,
)


@drawn
def curves(
    steps: Sequence[int],
    batches: Sequence[float],
    evaluations: Sequence[tuple[int, float]],
    label: str,
    *,
    log: bool = False,
) -> str:
    """Draw the training curve, faint per batch and smoothed, or none; with points of validation data in front."""
    figure = Figure(figsize=(WIDTH, 3.2))
    axes = figure.add_subplot()
    end, steps = steps[-1], steps[: len(batches)]
    if len(steps) > 60:
        axes.plot(steps, batches, color=SERIES[0], alpha=0.22, linewidth=0.8)
    means = smoothed(batches, len(batches) // 80)
    if len(batches):
        axes.plot(steps, means, color=SERIES[0], label="training")
    at, values = [step for step, _ in evaluations], [value for _, value in evaluations]
    if evaluations:
        axes.plot(at, values, "o-", color=SERIES[1], markersize=4.5, label="validation")
    for name, xs, ys in (("training", *thinned(steps, means)), ("validation", at, values)):
        for x, y in zip(xs, ys, strict=True):
            add_tip(axes, x, y, f"{name}, step {x}: {label} {metric_text(label, y, 2)}")
    if log:
        axes.set_yscale("log")
        label_powers(axes.yaxis)
    if is_share(label):
        # A batch without an error is at infinity, and may be outside the figure.
        accuracy_scale(axes, [*np.fmin(means, max(values, default=1.0)), *values])
    axes.set(xlabel="step", ylabel=label, xlim=(0, max(end, 1)))
    axes.legend()
    return to_svg(figure, f"{label} by step")


@drawn
def line(steps: Sequence[int], values: Sequence[float], label: str) -> str:
    """Draw one quantity over the steps."""
    figure = Figure(figsize=(WIDTH, 2.2))
    axes = figure.add_subplot()
    axes.plot(steps, values, "o-" if len(steps) == 1 else "-", color=SERIES[0], clip_on=False, zorder=3)
    axes.set(xlabel="step", ylabel=label, xlim=(0, max(steps[-1], 1)))
    axes.set_ylim(bottom=0)
    for step, value in zip(*thinned(steps, values), strict=True):
        add_tip(axes, step, value, f"step {step}: {label} {value:.4g}")
    return to_svg(figure, f"{label} by step")


@drawn
def heat_map(layers: Sequence[str], steps: Sequence[int], values: np.ndarray, label: str) -> str:
    """Draw ``values[layer, column]`` as colours on a logarithmic scale; column i belongs to ``steps[i]``."""
    figure = Figure(figsize=(WIDTH, 1.4 + 0.2 * len(layers)))
    axes = figure.add_subplot()
    finite = values[np.isfinite(values) & (values > 0)]
    low, high = np.quantile(finite, (0.01, 0.97)) if finite.size else (1e-3, 1.0)
    half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5
    shown, norm = np.ma.masked_invalid(values), LogNorm(low, max(high, 1.01 * low), clip=True)
    extent = (steps[0] - half, steps[-1] + half, len(layers) - 0.5, -0.5)
    image = axes.imshow(shown, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest", extent=extent)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_yticks(range(len(layers)), layers)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step")
    bar = figure.colorbar(image, ax=axes, label=label, extend="both", pad=0.015, aspect=max(12, 1.1 * len(layers)))
    label_powers(bar.ax.yaxis, 6 if len(layers) > 6 else 4)
    bar.outline.set_visible(False)
    return to_svg(figure, f"{label} by layer and step")


@drawn
def ranges(
    groups: Iterable[tuple[str, Sequence[float], Sequence[tuple[float, float, float]]]],
    xlabel: str,
    metric: str = "accuracy",
) -> str:
    """Draw a metric, ``(low, middle, high)`` per x, one line per named group, with x on a log scale to base 2."""
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.add_subplot()
    ticks: set[float] = set()
    every: list[float] = []
    for index, (name, xs, triples) in enumerate(groups):
        ticks.update(xs)
        every += [value for triple in triples for value in triple]
        low, middle, high = finite(triples).T
        shift = 2 ** (0.04 * index)  # otherwise bars of equal batch sizes would hide one another
        for x, triple in zip(xs, triples, strict=True):
            least, mean, most = (metric_text(metric, value) for value in triple)
            add_tip(axes, x * shift, triple[1], f"{name}, {xlabel} {x:g}: {mean} ({least} to {most})")
        at, reach, colour = np.array(xs) * shift, (middle - low, high - middle), SERIES[index % len(SERIES)]
        label = name if np.isfinite(middle).any() else None
        axes.errorbar(at, middle, yerr=reach, fmt="o-", color=colour, markersize=5, capsize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{x:g}" for x in sorted(ticks)])
    axes.minorticks_off()
    if is_share(metric):
        accuracy_scale(axes, every)
    axes.set(xlabel=xlabel, ylabel=f"test {metric}")
    axes.legend()
    return to_svg(figure, f"test {metric} by {xlabel}")


LONG = 40
"""Letters of a legend's line, of which two have no place beside each other."""


@drawn
def bars(names: Sequence[str], parts: Sequence[tuple[str, Sequence[float]]], label: str) -> str:
    """Draw one bar per name, as segments from left to right, each segment with its label and one value per name."""
    columns = 2 if max(len(part) for part, _ in parts) < LONG else 1
    figure = Figure(figsize=(WIDTH, 1.2 + 0.34 * len(names) + 0.24 * math.ceil(len(parts) / columns)))
    axes = figure.add_subplot()
    left = np.zeros(len(names))
    for index, (part, values) in enumerate(parts):
        colour = SERIES[index % len(SERIES)]
        ends = axes.barh(names, values, left=left, height=0.64, color=colour, label=part)
        for bar, name, value in zip(ends, names, values, strict=True):
            bar.set_gid(f"{TIP}{name}, {part}: {value:.3g} {label}")
        left += values
    axes.bar_label(ends, [f"{total:.3g}" for total in left], padding=4, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(left))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    figure.legend(loc="outside upper left", ncols=columns)
    return to_svg(figure, label)


Row = tuple[str, tuple[float, float, float]]
"""A name with a low, a middle and a high value."""


@drawn
def dots(rows: Sequence[Row], label: str, mark: float | None = None, percent: bool = False) -> str:
    """Draw a dot and a line from low to high per row; with a mark, x is logarithmic and the first row grey."""
    figure = Figure(figsize=(WIDTH, 0.9 + 0.34 * len(rows)))
    axes = figure.add_subplot()
    number = "{:.1%}" if percent else "{:.2f}" if mark else "{:.4g}"
    for place, (name, values) in enumerate(rows):
        low, middle, high = finite(values)
        colour = SERIES[5 if mark and not place else 0]
        axes.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.4)
        axes.plot([middle], [place], "o", color=colour, markersize=7)
        least, middling, most = map(number.format, values)
        add_tip(axes, middle, place, f"{name}: {middling} ({least} to {most})")
    if mark is not None:
        axes.axvline(mark, color=INK, linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        label_powers(axes.xaxis, 8)
    elif percent:
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    return to_svg(figure, label)


Panels = Sequence[tuple[str, Sequence[tuple[str, Sequence[float], Sequence[float]]]]]
"""Per panel: a name, and lines with a name, x values and accuracies or errors."""


@drawn
def lines_in_panels(panels: Panels, xlabel: str, ylabel: str, title: str, metric: str) -> str:
    """Draw a metric, or the error of an accuracy, over epochs or learning rates; ``title`` describes the lines.

    A line has the same colour in all panels, and the legend has the lines of every panel.
    """
    figure = Figure(figsize=(WIDTH, 3.2))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False).flat
    rates = xlabel == "learning rate"
    labels = list(dict.fromkeys(label for _, lines in panels for label, *_ in lines))
    legend: dict[str, Line2D] = {}
    for axes, (name, lines) in zip(grid, panels, strict=True):
        for label, xs, ys in lines:
            colour, style = SERIES[labels.index(label) % len(SERIES)], "o-" if rates or has_lone_points(ys) else "-"
            [line] = axes.plot(xs, finite(ys), style, color=colour, markersize=4.5)
            if np.isfinite(ys).any():
                legend.setdefault(label, line)
            for x, y in zip(xs, ys, strict=True):
                add_tip(axes, x, y, f"{name}, {label}: {xlabel} {x:.3g}, {ylabel} {metric_text(metric, y, 2)}")
        axes.set(xlabel=xlabel, ylabel=ylabel if axes.get_subplotspec().is_first_col() else "")
        axes.set_title(name, fontsize="medium", loc="left")
        if rates:
            axes.set_xscale("log")
            label_powers(axes.xaxis, 8 // len(panels))
    if is_share(metric) and not rates:
        grid[0].set_yscale("log")
        label_powers(grid[0].yaxis)
        grid[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    elif is_share(metric):
        accuracy_scale(grid[0], [y for _, lines in panels for _, _, ys in lines for y in ys])
    shown = sorted(legend, key=labels.index)
    grid[-1].legend([legend[label] for label in shown], shown, title=title)
    return to_svg(figure, f"{ylabel} by {xlabel}")


def smoothed(values: Sequence[float], half: int) -> np.ndarray:
    """Return a centred running mean over ``half`` values on each side, fewer towards the ends; it does not lag."""
    series = np.asarray(values, dtype=float)
    total = np.concatenate(([0.0], np.cumsum(series)))
    index = np.arange(len(series))
    reach = np.minimum(np.minimum(index, len(series) - 1 - index), half)
    mean: np.ndarray = (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)
    return mean
