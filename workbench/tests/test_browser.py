"""Reports and the site in a real browser: nothing is cut off, on a telephone, a tablet and a desk, in light and dark.

With SCREENSHOTS=folder, screenshots of all pages are written to the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.browser import BROWSER, SCHEMES, WIDTHS, faults, screenshot
from workbench.tests.command_line import Invoke

pytestmark = [
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed"),
]

SITE = Path(__file__).parents[2] / "build" / "site"
MOST_READ = (
    *("index", "start", "tutorial", "rates", "grow-the-batch", "with-transformers", "trainers"),
    *("lamb", "came", "command-line", "from-apex", "fit-the-model", "comparisons"),
)
SHORT = ("--trials", 2, "--seeds", 2, "--epochs", 1, "--processes", 1)
REPORTS = {
    "train": ("train", "--optimizer", "came", "--steps", 30),
    "compare": ("compare", "--optimizers", "lamb,adamw,came", "--batch-sizes", "128,256", *SHORT),
    "one-batch": ("compare", "--optimizers", "lamb,adamw", "--batch-sizes", "256", *SHORT),
    "lr-find": ("lr-find", "--steps", 40),
    "state": ("memory", "--shapes", "llama_1b", "--offload"),
    "bench": ("bench", "--shapes", "tiny", "--seconds", "1e-9"),
}


def check(pages: list[Path], folder: Path) -> None:
    for scheme in SCHEMES:
        found = faults(pages, scheme, folder)
        assert len(found) == len(pages) * len(WIDTHS)
        assert {page: wrong for page, wrong in found.items() if wrong} == {}
    if wanted := os.environ.get("SCREENSHOTS"):
        Path(wanted).mkdir(parents=True, exist_ok=True)
        for page in pages:
            for width in WIDTHS:
                for scheme in SCHEMES:
                    screenshot(page, width, scheme, Path(wanted))


def test_reports_fit_a_screen(invoke: Invoke, tmp_path: Path) -> None:
    for name, words in REPORTS.items():
        invoke(*words, "--report", f"{name}.html")
    check([tmp_path / f"{name}.html" for name in REPORTS], tmp_path)


def test_pages_fit_a_screen(tmp_path: Path) -> None:
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: make docs")
    check([SITE / f"{name}.html" for name in MOST_READ], tmp_path)


def test_what_does_not_fit_is_seen(tmp_path: Path) -> None:
    wide = tmp_path / "wide.html"
    svg = '<svg role="img" viewBox="0 0 100 20" style="width: 300px"><text x="90" y="10" font-size="9">cut</text></svg>'
    wide.write_text(f'<h1>Wide</h1><div style="width: 900px">x</div>{svg}')
    found = faults([wide], "dark", tmp_path)
    assert {key.rpartition(" ")[2]: wrong for key, wrong in found.items()} == {
        "400": ["it is 908 wide", "cut off: cut"],
        "768": ["it is 908 wide", "cut off: cut"],
        "1280": ["cut off: cut"],
    }
