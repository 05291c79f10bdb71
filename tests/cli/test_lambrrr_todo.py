"""The figures in docs/lambrrr-todo.md are those of benchmarks/results; run as a program, this writes them there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bighorn.cli.compare import COLUMNS, row, verdicts
from bighorn.cli.config import RunConfig
from bighorn.cli.sweep import Cell, Trial

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lambrrr-todo.md"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("lambrrr-*.json"))
FIGURES = re.compile(r"(?<=<!-- figures: )([^\n]*-->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


def cell(saved: dict[str, Any]) -> Cell:
    """A cell out of a file, without its tuning runs."""
    config = RunConfig(**saved["config"])
    trials = [
        Trial(config, run["accuracy"], run["loss"], saved["steps"], run["steps_to_target"], 0, saved["state_bytes"], ())
        for run in saved["final"]
    ]
    tuned = tuple((tried["lr"], tried["accuracy"]) for tried in saved["tuned"])
    return Cell(config.optimizer, config.batch_size or 0, tuned, config.lr or 0, tuple(trials))


def figures(path: Path) -> str:
    """What a file says, as Markdown."""
    saved = json.loads(path.read_text())
    config, cells = saved["config"], [cell(each) for each in saved["cells"]]
    head = [name.format(target=f"{config['target']:.0%}") for name in COLUMNS[:5]]
    lines = [
        f"{config['task']}, {config['epochs']:g} epochs, {config['seeds']} seeds, fp32 "
        f"([{path.name}](../benchmarks/results/{path.name}); learning rates tried: {config['lrs']}):",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(row(each)[: len(head)]) + " |" for each in cells),
        "",
        *(f"- {line}" for line in verdicts(cells)),
    ]
    return "\n".join(lines) + "\n\n"


def written() -> str:
    """The page with its figures written anew."""
    new = "\n" + "".join(map(figures, RESULTS))
    text, count = FIGURES.subn(lambda match: match[1] + new, PAGE.read_text())
    assert count == 1
    return text


def test_the_figures_are_those_of_the_files() -> None:
    assert PAGE.read_text() == written()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_can_be_judged(path: Path) -> None:
    saved = json.loads(path.read_text())
    assert saved["clean"] is True
    assert len(saved["commit"]) == 40
    assert saved["config"]["seeds"] >= 3
    for each in saved["cells"]:
        assert len(each["final"]) == saved["config"]["seeds"]
        assert each["on_edge"] is False, "no learning rate beyond the best was tried: run it with a wider grid"
        best = max(each["tuned"], key=lambda tried: tried["accuracy"])
        assert best["accuracy"] == pytest.approx(next(t["accuracy"] for t in each["tuned"] if t["lr"] == cell(each).lr))


def test_every_line_of_the_list_has_its_section() -> None:
    """LAMBrrr's README, section TODO, as of its commit a44ee608."""
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert headings[:-1] == [
        "selectively exclude layers from lr adaptation (`exclude_from_layer_adaptation`)",
        "weight norm clipping",
        "grad norm clipping",
        "trust ratio clipping (LAMBC)",
        "compare convergence with Adam and LAMB with 4x batch size",
        "AdamW update",
        "Adagrad update",
    ]


if __name__ == "__main__":
    PAGE.write_text(written())
