"""The tables of docs/presets.md and benchmarks/results/presets.md, which `tests/math/test_presets.py` writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from bighorn import Preset
from bighorn import _kernels as kernels
from tests.support.cases import DOUBLE, LEFT_OUT

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "presets.md", ROOT / "benchmarks" / "results" / "presets.md"
FIGURE = re.compile(r"\| (\d+e[+-]\d+) \| (\d+e[+-]\d+) \|$", re.MULTILINE)


def backends(dtype: torch.dtype) -> list[str]:
    """Return the backends that work on this machine and support a dtype."""
    of = [name for name, found in kernels.status().items() if found.available and found.device == "cpu"]
    return [name for name in of if name not in LEFT_OUT or dtype not in DOUBLE]


def named(preset: Preset) -> str:
    """Return the names of a preset as a cell."""
    return ", ".join(f"`{name}`" for name in (preset.name, *preset.aliases))


def listed(presets: Sequence[Preset]) -> str:
    """Return the table of the page: the differences of each preset, and its options."""
    text = "\n| preset | differs from the paper | options beyond the defaults |\n|---|---|---|\n"
    for preset in presets:
        options = ", ".join(f"`{name}={value!r}`" for name, value in preset.options.items())
        differs = preset.differs.replace("|", r"\|")  # bars of a norm are not cells
        text += f"| {named(preset)} | {differs} | {options or 'none'} |\n"
    return text + "\n"


def versions(packages: Iterable[str]) -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))


def tables(presets: Sequence[Preset], measured: str, rows: Iterable[str]) -> str:
    """Return the tables of presets: the source of each, and the figures measured with some versions."""
    text = "\n| preset | read in |\n|---|---|\n"
    text += "".join(f"| {named(preset)} | {preset.source} |\n" for preset in presets)
    text += f"\nMeasured with {measured}.\n"
    text += "\n| preset | with | against | float64 | float32 |\n|---|---|---|---|---|\n"
    return text + "".join(f"{row}\n" for row in rows) + "\n"


def written(name: str, page: Path = RESULTS) -> str:
    """Return the tables between the comments of this name in a page."""
    [text] = _between(name).findall(page.read_text())
    return str(text)


def write(name: str, text: str, page: Path = RESULTS) -> None:
    """Replace the tables between the comments of this name in a page."""
    page.write_text(_between(name).sub(lambda _: text, page.read_text()))


def check_figures(text: str, proofs: int, bounds: Mapping[torch.dtype, float]) -> None:
    """Check that tables have a row for each proof, and that no figure is above the bound of its dtype."""
    figures = FIGURE.findall(text)
    assert len(figures) == proofs
    assert max(float(double) for double, _ in figures) <= bounds[torch.float64]
    assert max(float(single) for _, single in figures) <= bounds[torch.float32]


def without_figures(text: str) -> str:
    """Return tables without figures and versions."""
    return FIGURE.sub("| | |", re.sub(r"^Measured with .*$", "", text, flags=re.MULTILINE))


def _between(name: str) -> re.Pattern[str]:
    start, end = f"<!-- {name}: written by a test's module -->\n", f"<!-- end of {name} -->"
    return re.compile(f"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.DOTALL)
