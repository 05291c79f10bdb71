"""Reports have their required contents, and load no other resources."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bighorn_workbench.reports import plots, render, style
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke, Page, assert_self_contained


def test_report_of_a_run(invoke: Invoke) -> None:
    invoke("train", "--epochs", 3, "--seed", 7, "--report", "run.html", "--json", "run.json")
    page = assert_self_contained(Path("run.html"))
    assert page.tags.count("svg") == 4
    layers = ("Effective learning rate by layer", "hidden1.weight", "head.weight")
    for word in ("Loss", "Accuracy", *layers, "Evaluations"):
        assert word in page.text
    assert "bighorn train --epochs 3 --seed 7 --report run.html --json run.json" in page.text
    assert re.search(r"torch\s+\d", page.text)
    assert re.search(r"seed\s+7", page.text)
    # Defaults are shown, too.
    assert re.search(r"batch size\s+128", page.text)
    assert re.search(r"weight decay\s+0\.01", page.text)


def test_no_heat_map_without_trust_ratios(invoke: Invoke) -> None:
    invoke("train", "--optimizer", "adamw", "--epochs", 1, "--report", "run.html")
    page = assert_self_contained(Path("run.html"))
    assert page.tags.count("svg") == 3
    assert "trust ratio" not in page.text


def test_came_shows_confidence_and_the_size_of_its_updates(invoke: Invoke) -> None:
    options = ["--optimizer", "came", "--state-dtype", "int8", "--steps", 8]
    invoke("train", *options, "--report", "r.html", "--json", "r.json")
    page = assert_self_contained(Path("r.html"))
    assert page.tags.count("svg") == 5
    for words in ("mean confidence", "Update size by layer", "hidden1.weight", "state dtype int8"):
        assert words in page.text
    history = json.loads(Path("r.json").read_text())["history"]
    assert history["layers"] == ["hidden1.weight", "hidden2.weight", "head.weight"]
    found = {name: np.shape(rows) for name, rows in history["metrics"].items()}
    assert found == {"confidence": (8, 3), "update_rms": (8, 3)}
    # In the first step of the published formula the second moment is g^2 / 1000, so u is about 1/sqrt(0.001).
    assert min(history["metrics"]["update_rms"][0]) > 20


def test_report_of_a_resumed_run_shows_the_whole_run(invoke: Invoke, interrupt_after: Callable[[int], None]) -> None:
    interrupt_after(5)
    invoke("train", "--steps", 10, "--save", "run.pt", "--report", "run.html", code=130)
    interrupt_after(0)
    assert "Stopped after step 5 of 10" in Page(Path("run.html")).text
    invoke("train", "--resume", "run.pt", "--report", "run.html")
    page = assert_self_contained(Path("run.html"))
    assert "bighorn train --steps 10 --save run.pt --report run.html\nbighorn train --resume run.pt" in page.text
    invoke("train", "--steps", 10, "--report", "whole.html")
    drawn, whole = (re.findall("(?s)<svg.*?</svg>", Path(name).read_text()) for name in ("run.html", "whole.html"))
    assert drawn == whole


def test_a_report_that_fails_loses_nothing(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ZeroDivisionError("no figure")

    words = ["--steps", 2, "--report", "run.html", "--json", "run.json", "--save", "run.pt"]
    with monkeypatch.context() as patch:
        patch.setattr(plots, "curves", fail)
        output = invoke("train", *words, code=1).output
        diverged = invoke("train", "--lr", "1e30", "--warmup", 0, "--report", "run.html", code=1).output
    assert "Test accuracy" in output
    assert "Checkpoint: run.pt" in output
    assert "Error: --report run.html cannot be drawn (ZeroDivisionError: no figure)." in output
    assert len(json.loads(Path("run.json").read_text())["history"]["loss"]) == 2
    assert "the loss became nan" in diverged
    assert "--report run.html cannot be drawn" in diverged
    invoke("train", "--resume", "run.pt", "--report", "run.html")
    invoke("train", "--lr", "1e30", "--warmup", 0, "--report", "diverged.html", code=1)
    assert "Stopped after step" in assert_self_contained(Path("diverged.html")).text


def test_heat_map_of_many_layers_gives_each_its_line() -> None:
    layers = [f"blocks.{number}.attention.query.weight" for number in range(60)]
    values = np.geomspace(1e-5, 1, 60 * 50).reshape(60, 50)
    values[3, 4], values[5, 6] = 0, np.nan
    svg = plots.heat_map(layers, range(1, 51), values, "lr x trust ratio")
    rows = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>blocks', svg)]
    assert len(rows) == 60
    assert min(np.diff(rows)) > 9  # the font size


def test_smoothing_keeps_a_constant_and_the_ends() -> None:
    np.testing.assert_allclose(plots.smoothed([2.0] * 500, 6), 2.0)
    line = np.arange(500.0)
    np.testing.assert_allclose(plots.smoothed(line.tolist(), 6), line)


@for_every("xlabel", ["epoch", "learning rate"])
def test_the_legend_has_the_lines_that_are_drawn(xlabel: str) -> None:
    """A run of one evaluation is a point, a diverged one is absent, and colours are the same in all panels."""
    nothing, gap = ([1.0, 2.0], [math.inf, math.nan]), ([1.0, 2.0, 3.0], [math.nan, 0.3, math.nan])
    first = [("whole", [1.0, 2.0], [0.5, 0.25]), ("lost", *nothing), ("single", [2.0], [0.5]), ("gap", *gap)]
    svg = plots.lines_in_panels([("a", first), ("b", [("gap", *gap)])], xlabel, "error", "optimizer", "loss")
    drawn = svg.partition('<g id="legend')[0] if '<g id="legend' in svg else svg
    assert "lost" not in re.sub(r"<title>.*?</title>", "", svg)
    assert all(f">{name}</text>" in svg for name in ("whole", "single", "gap"))
    points = re.findall(r'<use [^>]*style="fill: (var\(--s\d\))[^"]*"', drawn)
    assert points.count("var(--s3)") >= 1
    assert points.count("var(--s4)") >= 2
    ranges = plots.ranges(
        [("whole", [8, 16], [(0.1, 0.2, 0.3)] * 2), ("lost", [8], [(math.inf,) * 3])], "batch", "loss"
    )
    assert ">lost</text>" not in ranges
    assert ">whole</text>" in ranges


def test_a_busy_machine_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report was lost where warnings are errors, since the best place of a legend was found after a second."""
    monkeypatch.setattr("time.perf_counter", itertools.count(step=2).__next__)
    assert ">training</text>" in plots.curves([1, 2], [2.0, 1.0], [(2, 0.5)], "loss")


def test_points_have_titles() -> None:
    svg = plots.ranges([("a & b", [32, 64], [(0.7, 0.8, 0.9), (0.98, 0.99, 0.995)])], "batch size")
    assert "<title>a &amp; b, batch size 32: 80.0% (70.0% to 90.0%)</title>" in svg
    assert svg.count("<title>") == 2


SPREAD = (1.2, 1.25, 1.4)
TIPS = {
    "training, step 1: loss 2": plots.curves([1, 2], [2.0, 1.0], [(2, 0.5)], "loss"),
    "validation, step 2: accuracy 50.00%": plots.curves([1, 2], [0.2, 0.3], [(2, 0.5)], "accuracy"),
    "a, 22 steps: learning rate 0.01, loss 0.5": plots.lines_in_panels(
        [("a", [("22 steps", [0.001, 0.01], [1.0, 0.5])])], "learning rate", "loss", "run", "loss"
    ),
    "step 3: lr 0.1": plots.line([1, 2, 3], [0.3, 0.2, 0.1], "lr"),
    "lamb, 2 of 3x4: 8 bytes": plots.bars(["came", "lamb"], [("2 of 3x4", [4.0, 8.0])], "bytes"),
    "Lamb: 1.25 (1.20 to 1.40)": plots.dots([("AdamW", SPREAD), ("Lamb", SPREAD)], "ratio", mark=1.0),
}


@for_every("words", TIPS)
def test_every_figure_says_its_values(words: str) -> None:
    assert f"<title>{words}</title>" in TIPS[words]


def test_a_long_curve_has_titles_at_some_points_and_the_last() -> None:
    svg = plots.line(range(1, 1001), [0.5] * 999 + [0.25], "lr")
    assert "<title>step 1000: lr 0.25</title>" in svg
    assert svg.count("<title>") <= style.MOST_TIPS


def test_an_axis_of_accuracies_tells_99_from_99_5_percent() -> None:
    """Between equal ratios of errors are equal distances."""
    svg = plots.ranges([("a", [1, 2, 4], [(0.9,) * 3, (0.99,) * 3, (0.999,) * 3])], "batch size")
    assert {"90%", "99%", "99.9%"} <= set(re.findall(r">([\d.]+%)<", svg))
    points = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*fill-opacity: 0', svg)
    heights = [float(y) for _, y in points]
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], rel=1e-3)
    everywhere = plots.ranges([("a", [1, 2], [(0.0, 0.5, 1.0), (1.0, 1.0, 1.0)])], "batch size")
    assert "nan" not in everywhere


def test_a_report_without_figures_has_no_tiles() -> None:
    assert '<div class="tiles"' not in render("title", "lead", {}, [], ["bighorn"], {})
