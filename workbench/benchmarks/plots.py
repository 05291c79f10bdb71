"""Figures of this project's pages, in addition to the reports' figures."""

from __future__ import annotations

import re

import matplotlib as mpl
from matplotlib.figure import Figure

from bighorn_workbench.reports.plots import Panels
from bighorn_workbench.reports.style import (
    GRID,
    INK,
    SERIES,
    STYLE,
    VARIABLES,
    WIDTH,
    label_powers,
    to_svg,
)

LIGHT = {INK: "#565b66", GRID: "#dddbd5"} | dict(
    zip(
        SERIES,
        ("#2f5fd0", "#d5600f", "#12866a", "#8a3ffc", "#b4235a", "#6b7280", "#a37b00", "#0b8fa8"),
        strict=True,
    )
)
DARK = {INK: "#a9adb7", GRID: "#363a43"} | dict(
    zip(
        SERIES,
        ("#83a8ff", "#ff9a56", "#4fd0ab", "#c09bff", "#ff85ae", "#a3a9b5", "#e0bd4a", "#5cc8de"),
        strict=True,
    )
)
"""The colours of a page with a report, light and dark."""


def side_by_side(panels: Panels, xlabel: str) -> str:
    """Draw panels that share their x and the names of their lines; each has its own logarithmic y."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6))
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (name, lines) in zip(grid, panels, strict=True):
            for index, (label, xs, ys) in enumerate(lines):
                axes.plot(xs, ys, color=SERIES[index % len(SERIES)], label=label if axes is grid[0] else None)
            axes.set_yscale("log")
            label_powers(axes.yaxis)
            axes.set_title(name, fontsize=11, loc="left")
            axes.set_xlabel(xlabel)
        figure.legend(loc="outside upper left", ncols=4)
        return to_svg(figure, " and ".join(name for name, _ in panels))


FALLBACKS = {variable: LIGHT[name] for name, variable in VARIABLES.items()}


def _with_attributes(style: re.Match[str]) -> str:
    """A style, after attributes with the light colours of its variables."""
    coloured = re.findall(r"(fill|stroke): (var\(--[\w-]+\))", style[1])
    return "".join(f'{name}="{FALLBACKS[variable]}" ' for name, variable in coloured) + style[0]


def standalone(svg: str, width: int | None = None) -> str:
    """Return a figure as a file with the page's colours, light or dark by the reader's system; `width` is in pixels.

    `docs/_ext/pictures.py` removes these rules, and the site's own colours hold. Viewers without CSS variables ignore
    a style that has one, and take the light colours from attributes.
    """
    light, dark = (
        "".join(f"{variable[4:-1]}:{colours[name]};" for name, variable in VARIABLES.items())
        for colours in (LIGHT, DARK)
    )
    rules = (
        f"<style>:root{{font-family:sans-serif;background:#fff;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{background:#15171b;{dark}}}}}</style>"
    )
    svg = re.sub(r'style="([^"]*)"', _with_attributes, svg)
    drawn = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    assert drawn is not None
    svg = svg.replace("<svg", f'<svg width="{width or float(drawn[1]) * 4 / 3:.0f}"', 1)
    return re.sub(r"(<svg[^>]*>)", rf"\1{rules}", svg, count=1) + "\n"
