"""The extensions of the site fail the build if a page and the code differ."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import bighorn

pytest.importorskip("sphinx")
sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))

import generated
import llms
import pages
import pictures
import ranges


@pytest.mark.parametrize("folder", ["foreach", "csrc", "triton"])
@pytest.mark.parametrize("name", ["lamb", "came", "lars"])
def test_every_backend_carries_the_tags_of_the_reference(name: str, folder: str) -> None:
    """A tag is beside code, in Python and in C: a reader finds a rule in every backend."""
    kernels, prefix = Path(bighorn.__file__).parent / "_kernels", name.upper()
    known = set(generated.tagged((kernels / "reference" / f"{name}.py").read_text(), prefix))
    sources = [path.read_text() for path in (kernels / folder).iterdir() if path.suffix in {".py", ".c", ".h"}]
    texts = [re.sub(r"/\* (.*?) \*/", r"  # \1", text) for text in sources]
    assert known
    assert {tag for text in texts for tag in generated.tagged(text, prefix)} == known


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("CITATION.cff", "version: {}"),
        ("docs/faq.md", "  version = {{{}}},"),
        ("pyproject.toml", 'cli = ["bighorn-workbench=={}"]'),
        ("pyproject.toml", 'study = ["bighorn-workbench[study]=={}"]'),
        ("workbench/pyproject.toml", '    "bighorn=={}",'),
        ("workbench/src/bighorn_workbench/__init__.py", '__version__ = "{}"'),
    ],
)
def test_other_files_have_the_version(file: str, line: str) -> None:
    """The files are the citation, and the workbench, which requires the library of its own version."""
    assert line.format(bighorn.__version__) in (Path(__file__).parents[2] / file).read_text().splitlines()


def test_pictures_take_the_colours_of_the_page() -> None:
    svg = (Path(__file__).parents[2] / "docs" / "front-speed.svg").read_text()
    found = pictures.inline(svg, 'a "picture"')
    assert 'class="picture" aria-label="a &quot;picture&quot;"' in found
    assert "<style>" in svg
    assert "<style>" not in found
    css = (Path(__file__).parents[2] / "docs" / "_static" / "site.css").read_text()
    assert {name for name in re.findall(r"var\((--[\w-]+)\)", found) if f"{name}:" not in css} == set()


def test_a_range_of_figures_is_not_broken() -> None:
    found = [str(node) for node in ranges.marked("1.31 (1.26-1.52) of torch (2.13)")]
    assert found == ["1.31 ", '<inline classes="range">(1.26-1.52)</inline>', " of torch (2.13)"]
    css = (Path(__file__).parents[2] / "docs" / "_static" / "site.css").read_text()
    assert ".range { white-space: nowrap; }" in css


def test_a_list_of_pages_is_a_table_of_contents() -> None:
    content = ["# Title\n\n## Use\n\n<!-- make docs: pages start lamb -->\n* [A](a.md)\n<!-- end of make docs -->\n"]
    pages.add(None, "index", content)  # type: ignore[arg-type]
    assert content[0].endswith("\n```{toctree}\n:hidden:\n:caption: Use\n\nstart\nlamb\n```\n")


def test_the_list_for_programs_has_first_sentences() -> None:
    assert llms.first_sentence("Version 5 (arXiv:1904.00962v5). More.") == "Version 5 (arXiv:1904.00962v5)."
    assert llms.first_sentence("no end") == "no end"
