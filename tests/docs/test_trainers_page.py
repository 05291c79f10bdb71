"""The page of the trainers has the rows of its table, and every trainer's page is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations import page

DOCS = Path(__file__).parents[2] / "docs"
VERSIONS = re.compile(r"^(\| .*? \|) .*? (\|)", re.MULTILINE)


def without_versions(text: str) -> str:
    return re.sub(r"^Run on .*", "", VERSIONS.sub(r"\1\2", text), flags=re.MULTILINE)


def test_the_rows_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.PAGE.read_text()
    monkeypatch.setattr(page, "version", lambda _: "any")
    assert without_versions(text) == without_versions(page.page()), (
        "make integrations, or python -m tests.integrations.page"
    )
    assert re.search(r"^Run on \d{4}-\d\d-\d\d with torch ", text, re.MULTILINE)


def test_every_page_of_a_trainer_is_linked() -> None:
    assert {path.name for path in DOCS.glob("with-*.md")} == set(
        re.findall(r"\((with-[\w-]+\.md)\)", page.PAGE.read_text())
    )


@pytest.mark.parametrize("path", sorted(DOCS.glob("with-*.md")), ids=lambda path: path.name)
def test_a_page_is_about_one_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 110
