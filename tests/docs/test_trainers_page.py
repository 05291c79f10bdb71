"""The pages of the trainers have the rows of their tables, and every trainer's page is linked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations import page
from tests.support.tables import for_every

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "trainers.md").read_text()
VERSIONS = re.compile(r"^(\| .*? \|) .*? (\|)", re.MULTILINE)


def without_versions(text: str) -> str:
    return VERSIONS.sub(r"\1\2", text)


def test_the_rows_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    names = re.findall(r"^\| (\[.*?) \|", PAGE, re.MULTILINE)
    assert [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", name) for name in names] == list(page.PACKAGES)
    text = page.RESULTS.read_text()
    monkeypatch.setattr(page, "version", lambda _: "any")
    tested = text.partition(page.BEGIN)[2].partition("\nRun on")[0]
    assert without_versions(tested) == without_versions(page.table()), "python -m tests.integrations.page"
    assert re.search(r"^Run on \d{4}-\d\d-\d\d with torch ", text, re.MULTILINE)


def test_every_page_of_a_trainer_is_linked() -> None:
    assert {path.name for path in DOCS.glob("with-*.md")} == set(re.findall(r"\((with-[\w-]+\.md)\)", PAGE))


@for_every("path", sorted(DOCS.glob("with-*.md")), ids=lambda path: path.name)
def test_a_page_is_about_two_screens(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 155
