"""The look of the figures: colours of the page, scales, texts above points, and the conversion to SVG."""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from bighorn_workbench.errors import visible

Arguments = ParamSpec("Arguments")

# Placeholders that to_svg() replaces by the page's CSS variables, so that figures follow light and dark mode.
INK, GRID = "#010203", "#040506"
SERIES = tuple(f"#0708{number:02x}" for number in range(8))
VARIABLES = {INK: "var(--ink-2)", GRID: "var(--grid)"} | {c: f"var(--s{n})" for n, c in enumerate(SERIES, start=1)}

STYLE: Any = {
    "font.size": 12,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name between dollars is no formula
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
"""The smallest error that an axis of accuracies distinguishes from 0."""

WIDTH = 9.2
"""Inches: the width of the page's text column at its natural size."""


ACCURACIES = (0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
"""The positions that an axis of accuracies may label."""


def drawn(figure: Callable[Arguments, str]) -> Callable[Arguments, str]:
    """Draw a figure in the style of the page, with names that fonts and encodings can have."""

    @wraps(figure)
    def styled(*args: Arguments.args, **named: Arguments.kwargs) -> str:
        with mpl.rc_context(STYLE), warnings.catch_warnings():
            # On a busy machine, finding the best place takes a second even for a few points.
            warnings.filterwarnings("ignore", "Creating legend with loc")
            return figure(*_visible(args), **_visible(named))

    return styled


def _visible(value: Any) -> Any:
    """Make all texts visible, within tuples, lists and dicts."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {name: _visible(each) for name, each in value.items()}
    return type(value)(map(_visible, value)) if type(value) in (tuple, list) else value


def accuracy_scale(axes: Axes, values: Iterable[float]) -> None:
    """Scale an axis of accuracies by the logarithm of the error, so that differences near 100% can be seen."""
    axes.set_yscale("function", functions=(_of_error, lambda y: 1 - 10**-y))
    heights = _of_error([value for value in values if math.isfinite(value)] or [0.0, 0.9])
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


def label_powers(axis: Axis, most: int = 9) -> None:
    """Label at most so many positions of a logarithmic axis: some within each power of ten, if it is short."""
    low, high = axis.get_view_interval()
    for subs in ((1, 2, 5), (1, 3), (1,)):
        locator = LogLocator(subs=subs, numticks=most)
        if sum(low <= tick <= high for tick in LogLocator(subs=subs, numticks=99).tick_values(low, high)) <= most:
            break
    ticks = [tick for tick in locator.tick_values(low, high) if low <= tick <= high]
    axis.set_major_locator(locator if len(ticks) > 1 else MaxNLocator(min(most, 4)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:.5g}")


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


def has_lone_points(values: Any) -> bool:
    """Whether a finite value has none beside it, so that no line without markers would show it."""
    is_finite = np.pad(np.isfinite(np.asarray(values, dtype=float)), 1)
    return bool((is_finite[1:-1] & ~is_finite[:-2] & ~is_finite[2:]).any())


def add_tip(axes: Axes, x: float, y: float, words: str) -> None:
    """Let a browser show a text above a point."""
    axes.plot([x], finite([y]), "o", color=SERIES[0], alpha=0, markersize=12, gid=TIP + words)


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an ``<svg>`` element for an HTML page, which defines the element's colours and font.

    ``name`` must differ between the figures of a page, since the ids inside are made from it.
    """
    name = name.replace("\n", " ")
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    label = f' role="img" aria-label="{escape(name)}"'
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', lambda found: found[1] + label, svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r' id="(figure|axes|patch|text|line2d|matplotlib\.axis|xtick|ytick|legend)_\d+"', "", svg)
    svg = re.sub(rf'<g id="{TIP}([^"]*)">', r"<g><title>\1</title>", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
