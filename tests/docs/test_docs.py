"""The Python code of the README, of the pages in docs and of notebooks runs, and links between them exist."""

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

from tests.support.processes import assert_ended_well, outcomes
from tests.support.tables import for_every

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
NOTEBOOKS = sorted([*ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("workbench/benchmarks/results/*.md")])
"""Pages beside result files."""


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a page, each after as many empty lines as lines precede it, for tracebacks."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def imports(program: str) -> Iterator[str]:
    """Yield the packages that a program imports."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def programs() -> Iterator[tuple[Path, str]]:
    """Yield the programs of pages: all blocks of a page, or of a section if sections need different packages."""
    for page in [*PAGES, *NOTEBOOKS]:
        whole = blocks(page.read_text())
        if page.name in ("README.md", "trainers.md", "recipes.md"):
            for section in re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE):
                yield from ((page, "".join(found)) for found in [blocks(section)] if found)
        elif whole:
            yield page, "\n".join(whole)


@pytest.mark.parametrize(("page", "program"), [*programs()], ids=lambda each: getattr(each, "name", ""))
def test_the_python_of_a_page_runs(page: Path, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks run from top to bottom, as one program in an empty folder."""
    if page.name.startswith("with-") or page.name in ("trainers.md", "recipes.md"):
        absent = sorted({name for name in imports(program) if find_spec(name) is None})
        if absent:
            pytest.skip(f"{', '.join(absent)} not installed: make integrations")
        warnings.simplefilter("ignore")  # the trainers' own warnings
    if "init_process_group" in program:
        # gloo's group may wait for its own thread for ever when it is freed (torch 2.7), beyond the limit of a test.
        as_module = f"exec(compile({program!r}, {str(page)!r}, 'exec'), {{'__name__': {page.stem!r}}})"
        assert_ended_well(outcomes(as_module, [()], folder=tmp_path))
        return
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(page), "exec"), {"__name__": page.stem})


@pytest.mark.parametrize("batch", [64, 4096, 16384])
def test_the_tutorial_carries_a_rate_to_other_batches(batch: int) -> None:
    """With a fixed share of warm-up the tutorial's call raised at 4,096."""
    page = next(page for page in PAGES if page.name == "grow-the-batch.md")
    text = blocks(page.read_text())[0]
    assert "large = 0.01, 64, 1024" in text
    exec(compile(text.replace("large = 0.01, 64, 1024", f"large = 0.01, 64, {batch}"), str(page), "exec"), {})


def test_blocks_are_found_with_their_lines() -> None:
    assert blocks("text\n```python\nx = 1\n```\n```\nno\n```\n```python\ny\n```\n") == ["\n\nx = 1\n", "\n" * 8 + "y\n"]
    assert PAGES


def test_what_a_program_imports_is_seen() -> None:
    assert set(imports("import a.b, c\nfrom d.e import f\n")) == {"a", "c", "d"}


def test_code_on_a_page_needs_no_scrolling() -> None:
    """A page shows 84 characters; `docs/ruff.toml` has the length, too. Two pages have files of the package.

    Examples of docstrings have the length of the code.
    """
    long = []
    for page in PAGES:
        for block in re.finditer(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [] if block[1] in ("math", "pycon") else block[2].splitlines()
            long += [f"{page.name}: {line}" for line in lines if len(line) > 84 and len(line.split()) > 2]
    assert [line for line in long if not line.startswith("adding-an-")] == []


@for_every("page", [*PAGES, *NOTEBOOKS, *ROOT.glob("*.md"), *ROOT.glob("*/README.md")], ids=lambda page: page.name)
def test_a_row_of_a_table_is_one_line_with_all_cells(page: Path) -> None:
    """A row that is wrapped, or a bar without a backslash in a cell, also in code, loses words on the site."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.finditer(r"^(\|(?: ?:?-+:? ?\|)+)\n((?:(?!<!--).+\n)*)", text, re.MULTILINE):
        rows = table[2].splitlines()
        bars = {row: len(re.findall(r"(?<!\\)\|", row)) if row[0] == row[-1] == "|" else 0 for row in rows}
        assert [row for row, found in bars.items() if found != table[1].count("|")] == []


WRITTEN = re.compile(r"<!-- (?!end)[^\n]*-->\n.*?<!-- end[^\n]*-->", re.DOTALL)
"""A part of a page that a program writes."""


def test_the_site_is_short() -> None:
    """Details of a measurement are in the notebook beside its result file; parts that programs write do not count."""
    pages = PAGES[1:]
    assert len(pages) <= 40
    assert sum(len(WRITTEN.sub("", page.read_text()).split()) for page in pages) <= 30_000


def test_the_readme_is_two_screens_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
    assert len(links) >= 15
    assert all(words for words in re.findall(r"!\[([^]]*)\]", text))


@for_every("page", [*PAGES, *NOTEBOOKS, *ROOT.glob("*.md"), *ROOT.glob("*/README.md")], ids=lambda page: page.name)
def test_a_link_to_a_file_leads_somewhere(page: Path) -> None:
    """The site's build checks links between its pages; links out of docs and between notebooks are checked here."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("https://", "http://", "#"))]
    for path, _, anchor in (link.partition("#") for link in links):
        target = page.parent / path
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, path


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
