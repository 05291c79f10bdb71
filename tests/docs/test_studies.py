"""The comparisons in the docs are those of benchmarks/results; `python benchmarks/studies.py` updates them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bighorn.cli.compare import CompareConfig, compare
from studies import DOCS, FIGURES, PAGES, STUDIES, cells_of, command, written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_figures_are_those_of_the_files(page: Path) -> None:
    assert page.read_text() == written(page)


def test_every_study_has_its_place() -> None:
    shown = [match[2] for page in PAGES for match in FIGURES.finditer(page.read_text())]
    assert sorted(shown) == sorted(STUDIES)
    assert all((DOCS / f"{name}.svg").is_file() for name in shown)


@pytest.mark.parametrize("name", STUDIES)
def test_a_result_can_be_judged(name: str) -> None:
    saved = STUDIES[name]
    assert saved["clean"] is True
    assert len(saved["commit"]) == 40
    assert saved["config"]["seeds"] >= 3
    for each, cell in zip(saved["cells"], cells_of(saved), strict=True):
        assert len(each["final"]) == saved["config"]["seeds"]
        assert each["on_edge"] is cell.on_edge
        best = max(each["tuned"], key=lambda tried: tried["accuracy"])
        assert best["accuracy"] == pytest.approx(next(t["accuracy"] for t in each["tuned"] if t["lr"] == cell.lr))


@pytest.mark.parametrize("name", STUDIES)
def test_the_command_of_a_page_is_one_that_there_is(name: str) -> None:
    _, _, *arguments = shlex.split(command(STUDIES[name]))
    params = compare.make_context("compare", arguments).params
    config = CompareConfig(**{option: params[option] for option in CompareConfig.__dataclass_fields__})
    saved = STUDIES[name]["config"]
    assert ", ".join(config.cells()) == saved["optimizers"]
    assert {", ".join(map(str, sizes)) for sizes in config.cells().values()} == {saved["batch_sizes"]}
