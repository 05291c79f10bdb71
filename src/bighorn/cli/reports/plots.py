"""Figures for the reports, as SVG with the colours and the font of the page around it."""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, PercentFormatter

from bighorn.cli.metrics import is_share, metric_text

# Placeholders that to_svg() replaces by the page's CSS variables, so that figures follow light and dark mode.
INK, GRID = "#010203", "#040506"
SERIES = tuple(f"#0708{number:02x}" for number in range(8))
VARIABLES = {INK: "var(--ink-2)", GRID: "var(--grid)"} | {c: f"var(--s{n})" for n, c in enumerate(SERIES, start=1)}
LIGHT = {INK: "#565b66", GRID: "#dddbd5"} | dict(
    zip(
        SERIES,
        ("#2f5fd0", "#d5600f", "#12866a", "#8a3ffc", "#b4235a", "#6b7280", "#a37b00", "#0b8fa8"),
        strict=True,
    )
)  # the page's colours, for a figure without a page

STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
}

TIP = "tip:"
"""The beginning of an id that :func:`to_svg` turns into the text that a browser shows above the point."""

SMALLEST_ERROR = 1e-4
"""The smallest error that an axis of accuracies tells from 0."""

WIDTH = 9.2
"""Inches; the width of the page's text column at its natural size."""


@mpl.rc_context(STYLE)
def curves(
    steps: Sequence[int],
    batches: Sequence[float],
    test_steps: Sequence[int],
    tests: Sequence[float],
    label: str,
    *,
    percent: bool = False,
    log: bool = False,
) -> str:
    """Draw the training curve, faint per batch and smoothed, or none; with the test's points in front."""
    figure = Figure(figsize=(WIDTH, 3.2))
    axes = figure.add_subplot()
    end, steps = steps[-1], steps[: len(batches)]
    if len(steps) > 60:
        axes.plot(steps, batches, color=SERIES[0], alpha=0.22, linewidth=0.8)
    means, number = smoothed(batches), "{:.2%}" if percent else "{:.4g}"
    if len(batches):
        axes.plot(steps, means, color=SERIES[0], label="training")
    axes.plot(test_steps, tests, "o-", color=SERIES[1], markersize=4.5, label="test")
    for name, xs, ys in (("training", *thinned(steps, means)), ("test", test_steps, tests)):
        for x, y in zip(xs, ys, strict=True):
            add_tip(axes, x, y, f"{name}, step {x}: {label} {number.format(y)}")
    if log:
        axes.set_yscale("log")
        label_powers(axes.yaxis)
    if percent:
        # A batch without an error, which is at infinity, may leave the figure.
        accuracy_scale(axes, [*np.minimum(means, max(tests, default=1.0)), *tests])
    axes.set(xlabel="step", ylabel=label, xlim=(0, max(end, 1)))
    axes.legend()
    return to_svg(figure, f"{label} by step")


@mpl.rc_context(STYLE)
def search(lrs: Sequence[float], losses: Sequence[float], smooth: Sequence[float], chosen: int | None) -> str:
    """Draw the loss over a growing learning rate, faint per step and smoothed, with the suggestion marked."""
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.add_subplot()
    axes.plot(lrs, losses, color=SERIES[0], alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(lrs, smooth, color=SERIES[0], label="smoothed")
    for lr, loss in zip(*thinned(lrs, smooth), strict=True):
        add_tip(axes, lr, loss, f"learning rate {lr:.2g}: loss {loss:.4g}")
    if chosen is not None:
        at, height = lrs[chosen], smooth[chosen]
        axes.axvline(at, color=SERIES[1], linewidth=1.2, linestyle="--")
        axes.plot([at], [height], "o", color=SERIES[1], markersize=7, label=f"suggestion: {at:.2g}")
    highest = 1.15 * min(max(losses), 4 * min(smooth))
    axes.set(xscale="log", ylim=(0, highest), xlabel="learning rate", ylabel="training loss")
    axes.legend()
    return to_svg(figure, "training loss by learning rate")


@mpl.rc_context(STYLE)
def line(steps: Sequence[int], values: Sequence[float], label: str) -> str:
    """Draw one quantity over the steps."""
    figure = _line(steps, values, label, SERIES[0])
    for step, value in zip(*thinned(steps, values), strict=True):
        add_tip(figure.axes[0], step, value, f"step {step}: {label} {value:.4g}")
    return to_svg(figure, f"{label} by step")


def line_picture(steps: Sequence[int], values: Sequence[float], label: str, kind: str) -> bytes:
    """Return a figure of :func:`line` as the content of a file in the page's light colours; ``kind`` is png or svg."""
    style = {name: LIGHT.get(value, value) for name, value in STYLE.items()}
    buffer = io.BytesIO()
    with mpl.rc_context(style):
        figure = _line(steps, values, label, LIGHT[SERIES[0]])
        figure.savefig(buffer, format=kind, dpi=150, facecolor="white", bbox_inches="tight", pad_inches=0.2)
    return buffer.getvalue()


def _line(steps: Sequence[int], values: Sequence[float], label: str, colour: str) -> Figure:
    figure = Figure(figsize=(WIDTH, 2.2))
    axes = figure.add_subplot()
    axes.plot(steps, values, "o-" if len(steps) == 1 else "-", color=colour, clip_on=False, zorder=3)
    axes.set(xlabel="step", ylabel=label, xlim=(0, max(steps[-1], 1)))
    axes.set_ylim(bottom=0)
    return figure


@mpl.rc_context(STYLE)
def heat_map(layers: Sequence[str], steps: Sequence[int], values: np.ndarray, label: str) -> str:
    """Draw ``values[layer, column]`` as colours on a logarithmic scale; column i belongs to ``steps[i]``."""
    figure = Figure(figsize=(WIDTH, 1.4 + 0.2 * len(layers)))
    axes = figure.add_subplot()
    finite = values[np.isfinite(values) & (values > 0)]
    low, high = np.quantile(finite, (0.01, 0.97)) if finite.size else (1e-3, 1.0)
    half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5
    image = axes.imshow(
        np.ma.masked_invalid(values),
        norm=LogNorm(low, max(high, 1.01 * low), clip=True),
        cmap="viridis",
        aspect="auto",
        interpolation="nearest",
        extent=(steps[0] - half, steps[-1] + half, len(layers) - 0.5, -0.5),
    )
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_yticks(range(len(layers)), layers, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step")
    bar = figure.colorbar(image, ax=axes, label=label, extend="both", pad=0.015, aspect=max(12, 1.1 * len(layers)))
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if len(layers) > 6 else (1, 3)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.outline.set_visible(False)
    return to_svg(figure, f"{label} by layer and step")


@mpl.rc_context(STYLE)
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
        for x, (worst, median, best) in zip(xs, triples, strict=True):
            least, mean, most = (metric_text(metric, value) for value in (worst, median, best))
            words = f"{name}, {xlabel} {x:g}: {mean} ({least} to {most})"
            add_tip(axes, x * shift, median, words)
        axes.errorbar(
            np.array(xs) * shift,
            middle,
            yerr=(middle - low, high - middle),
            fmt="o-",
            color=SERIES[index % len(SERIES)],
            markersize=5,
            capsize=3,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{x:g}" for x in sorted(ticks)])
    axes.minorticks_off()
    if is_share(metric):
        accuracy_scale(axes, every)
    axes.set(xlabel=xlabel, ylabel=f"test {metric}")
    axes.legend()
    return to_svg(figure, f"test {metric} by {xlabel}")


@mpl.rc_context(STYLE)
def bars(names: Sequence[str], parts: Sequence[tuple[str, Sequence[float]]], label: str) -> str:
    """Draw one bar per name, as segments from left to right, each segment with its label and one value per name."""
    figure = Figure(figsize=(WIDTH, 1.2 + 0.34 * len(names) + 0.2 * math.ceil(len(parts) / 2)))
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
    figure.legend(loc="outside upper left", ncols=2, fontsize=9)
    return to_svg(figure, label)


@mpl.rc_context(STYLE)
def spreads(rows: Sequence[tuple[str, Mapping[str, float]]], label: str) -> str:
    """Draw medians as dots with lines from the 10th to the 90th percentile, one row each, with a mark at 1."""
    figure = Figure(figsize=(WIDTH, 0.9 + 0.34 * len(rows)))
    axes = figure.add_subplot()
    for place, (name, spread) in enumerate(rows):
        colour = SERIES[0] if place else SERIES[5]
        axes.plot([spread["p10"], spread["p90"]], [place, place], color=colour, linewidth=3, alpha=0.4)
        axes.plot([spread["median"]], [place], "o", color=colour, markersize=7)
        add_tip(axes, spread["median"], place, "{}: {median:.2f} ({p10:.2f} to {p90:.2f})".format(name, **spread))
    axes.axvline(1, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    label_powers(axes.xaxis)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    return to_svg(figure, label)


Panels = Sequence[tuple[str, Sequence[tuple[str, Sequence[float], Sequence[float]]]]]
"""Per panel: a name, and lines with a batch size, x values and accuracies or errors."""


def tuning(panels: Panels, metric: str) -> str:
    """Draw the held-out metric over the learning rates tried: a panel per optimizer, a line per batch size."""
    return _panels(panels, "learning rate", f"held-out {metric}", "o-", xscale="log", metric=metric)


def convergence(panels: Panels, metric: str) -> str:
    """Draw the test error, or another metric, on the way: a panel per optimizer, a line per batch size."""
    share = is_share(metric)
    return _panels(
        panels, "epoch", "test error" if share else metric, "-", "linear", "log" if share else "linear", metric
    )


@mpl.rc_context(STYLE)
def _panels(
    panels: Panels,
    xlabel: str,
    ylabel: str,
    style: str,
    xscale: str = "linear",
    yscale: str = "linear",
    metric: str = "accuracy",
) -> str:
    figure = Figure(figsize=(WIDTH, 3.2))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, lines) in zip(grid, panels, strict=True):
        for index, (label, xs, ys) in enumerate(lines):
            axes.plot(xs, finite(ys), style, color=SERIES[index % len(SERIES)], markersize=4.5, label=label)
            for x, y in zip(xs, ys, strict=True):
                add_tip(axes, x, y, f"{name}, {label}: {xlabel} {x:.3g}, {ylabel} {metric_text(metric, y, 2)}")
        axes.set(xscale=xscale, xlabel=xlabel)
        axes.set_title(name, fontsize=11, loc="left")
    grid[0].set(yscale=yscale, ylabel=ylabel)
    if yscale == "log":
        label_powers(grid[0].yaxis)
        grid[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    elif is_share(metric):
        accuracy_scale(grid[0], [y for _, lines in panels for _, _, ys in lines for y in ys])
    grid[-1].legend(title="batch size", fontsize=9, title_fontsize=9)
    return to_svg(figure, f"{ylabel} by {xlabel}")


ACCURACIES = (0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
"""The positions that an axis of accuracies may label."""


def accuracy_scale(axes: Axes, values: Iterable[float]) -> None:
    """Scale an axis of accuracies by the logarithm of the error, so that differences near 100% can be seen."""
    axes.set_yscale("function", functions=(_of_error, lambda y: 1 - 10**-y))
    heights = _of_error(list(values))
    low, high = float(heights.min()), float(heights.max())
    room = 0.08 * (high - low) or 0.1
    axes.set_ylim(1 - 10 ** -max(low - room, 0.0), 1 - 10 ** -(high + room))
    shown: list[float] = []
    for each in ACCURACIES:
        height = float(_of_error(each))
        if low - room <= height <= high + room and (not shown or height - float(_of_error(shown[-1])) >= room):
            shown.append(each)
    if len(shown) > 1:
        axes.yaxis.set_major_locator(FixedLocator(shown))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def _of_error(accuracy: Any) -> Any:
    return -np.log10(np.clip(1 - np.asarray(accuracy, dtype=float), SMALLEST_ERROR, 1))


def label_powers(axis: Axis) -> None:
    """Label some positions within each power of ten of a logarithmic axis, if the axis is long enough."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


MOST_TIPS = 60
"""The most points of a curve that have a text."""


Points = Sequence[float] | np.ndarray


def thinned(xs: Points, ys: Points) -> tuple[Points, Points]:
    """Return at most MOST_TIPS of the points, evenly distributed, and the last one."""
    every = max(1, -(-len(xs) // MOST_TIPS))
    return xs[::-1][::every], ys[::-1][::every]


def finite(values: Any) -> np.ndarray:
    """Return values as an array, without the infinite ones of runs that diverged."""
    array = np.asarray(values, dtype=float)
    return np.where(np.isfinite(array), array, np.nan)


def add_tip(axes: Axes, x: float, y: float, words: str) -> None:
    """Let a browser show a text above a point."""
    axes.plot([x], finite([y]), "o", color=SERIES[0], alpha=0, markersize=12, gid=TIP + words)


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Return a centred running mean over a fortieth of the curve, narrower towards its ends."""
    series = np.asarray(values, dtype=float)
    half = len(series) // 80
    total = np.concatenate(([0.0], np.cumsum(series)))
    index = np.arange(len(series))
    reach = np.minimum(np.minimum(index, len(series) - 1 - index), half)
    mean: np.ndarray = (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)
    return mean


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an ``<svg>`` element for an HTML page, which defines the element's colours and font.

    ``name`` must differ between the figures of a page, since the ids inside are made from it.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{name}"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r' id="(figure|axes|patch|text|line2d|matplotlib\.axis|xtick|ytick|legend)_\d+"', "", svg)
    svg = re.sub(rf'<g id="{TIP}([^"]*)">', r"<g><title>\1</title>", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
