"""The Python code of the README and of the pages in docs runs, and the README's links exist."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))

import readme_links

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a page, each after as many empty lines as lines precede it, for tracebacks."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def imported(text: str) -> Iterator[str]:
    """Yield the packages that a page's Python code imports."""
    for node in ast.walk(ast.parse("".join(blocks(text)))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks run from top to bottom, as one program in an empty folder."""
    if page.name.startswith("with-"):
        absent = sorted({name for name in imported(page.read_text()) if find_spec(name) is None})
        if absent:
            pytest.skip(f"{', '.join(absent)} not installed: make integrations")
        warnings.simplefilter("ignore")  # the trainers' own warnings
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page.read_text()):
        if page.name == "README.md":  # its examples are pasted one by one
            names = {"__name__": page.stem}
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("batch", [64, 4096, 16384])
def test_the_tutorial_carries_a_rate_to_other_batches(batch: int) -> None:
    """With a fixed share of warm-up its own call raised at 4,096."""
    page = next(page for page in PAGES if page.name == "grow-the-batch.md")
    text = blocks(page.read_text())[0]
    assert "large = 0.01, 64, 1024" in text
    exec(compile(text.replace("large = 0.01, 64, 1024", f"large = 0.01, 64, {batch}"), str(page), "exec"), {})


def test_blocks_are_found_with_their_lines() -> None:
    assert blocks("text\n```python\nx = 1\n```\n```\nno\n```\n```python\ny\n```\n") == ["\n\nx = 1\n", "\n" * 8 + "y\n"]
    assert PAGES


def test_what_a_page_imports_is_seen() -> None:
    assert set(imported("```python\nimport a.b, c\n```\n```python\nfrom d.e import f\n```\n")) == {"a", "c", "d"}


def test_code_on_a_page_needs_no_scrolling() -> None:
    """A page shows 84 characters; `docs/ruff.toml` has the length, too. Two pages have files of the package."""
    long = []
    for page in PAGES:
        for block in re.finditer(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [] if block[1].startswith("{") else block[2].splitlines()
            long += [f"{page.name}: {line}" for line in lines if len(line) > 84 and len(line.split()) > 2]
    assert [line for line in long if not line.startswith("adding-an-")] == []


def test_the_readme_is_two_screens_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
    assert len(links) >= 15
    assert all(words for words in re.findall(r"!\[([^]]*)\]", text))


@pytest.mark.parametrize("folder", ["", "workbench"])
def test_the_readme_of_a_package_has_no_relative_links(folder: str) -> None:
    repository = re.search(r'^Repository = "(.*)"', (ROOT / folder / "pyproject.toml").read_text(), re.MULTILINE)
    assert repository is not None
    text = (ROOT / folder / "README.md").read_text()
    found = readme_links.absolute(text, repository[1], folder)
    links = re.findall(r"\]\(([^)#]+)", found)
    assert [link for link in links if not link.startswith("https://")] == []
    places = [link.removeprefix(f"{repository[1]}/") for link in links]
    ours = [place.partition("/main/")[2] for place in places if place.startswith(("blob/main/", "raw/main/"))]
    assert ours
    assert [place for place in ours if not (ROOT / place).exists()] == []
    assert all(place.startswith("raw/") for place in places if place.endswith(".svg"))


def test_no_page_names_the_owner() -> None:
    assert [page.name for page in PAGES if "OWNER" in page.read_text()] == []
