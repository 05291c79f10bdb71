"""The extensions of the site fail the build if a page and the code differ."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bighorn

pytest.importorskip("sphinx")
sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))

import algorithm
import complete
import llms
import optiontable
import pictures
import ranges


def warnings_for(names: set[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the warnings of the site's build for an API reference with these names."""
    said: list[str] = []
    monkeypatch.setattr(complete.logger, "warning", lambda text, *values, **_: said.append(text % values))
    env: Any = SimpleNamespace(domains=SimpleNamespace(python_domain=SimpleNamespace(objects=set(names))))
    complete.check(None, env)  # type: ignore[arg-type]
    return said


def test_a_public_name_without_a_place_in_the_reference_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name, _ in complete.public()}
    assert {"bighorn.Lamb", "bighorn.schedules.Cosine", "bighorn.compat.mindspore.Lamb"} <= names
    assert warnings_for(names, monkeypatch) == []
    [said] = warnings_for(names - {"bighorn.Came"}, monkeypatch)
    assert "bighorn.Came is missing" in said


def test_a_public_name_without_a_docstring_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name, _ in complete.public()}
    monkeypatch.setattr(bighorn.Lamb, "__doc__", "")
    assert [said for said in warnings_for(names, monkeypatch) if "docstring" in said and "bighorn.Lamb" in said]


def test_tags_are_read_from_code_alone() -> None:
    text = "# LAMB-z\nm = 1  # LAMB-m\nr, c = f()  # LAMB-r, LAMB-c\nm += 1  # LAMB-m\nx = 1  # CAME-x\n"
    assert algorithm.tagged(text, "LAMB") == {"m": ["m = 1", "m += 1"], "r": ["r, c = f()"], "c": ["r, c = f()"]}


@pytest.mark.parametrize("folder", ["foreach", "csrc", "triton"])
@pytest.mark.parametrize("name", ["lamb", "came", "lars"])
def test_every_backend_carries_the_tags_of_the_reference(name: str, folder: str) -> None:
    """A tag is beside code, in Python and in C: a reader finds a rule in every backend."""
    kernels, prefix = Path(bighorn.__file__).parent / "kernels", name.upper()
    known = set(algorithm.tagged((kernels / "reference" / f"{name}.py").read_text(), prefix))
    sources = [path.read_text() for path in (kernels / folder).iterdir() if path.suffix in {".py", ".c", ".h"}]
    texts = [re.sub(r"/\* (.*?) \*/", r"  # \1", text) for text in sources]
    assert known
    assert {tag for text in texts for tag in algorithm.tagged(text, prefix)} == known


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


@pytest.mark.parametrize("kind", [bighorn.Lamb, bighorn.Came, bighorn.Lars])
def test_every_option_has_a_place_in_a_table(kind: type[Any]) -> None:
    said = optiontable.meanings(kind)
    listed = [word for words in optiontable.SUBJECTS.values() for word in words.split()]
    assert len(listed) == len(set(listed))
    own = set(inspect.signature(kind).parameters) - {"unknown"}
    assert own == set(said) <= set(listed)
    assert all(said.values())


def test_the_list_for_programs_has_first_sentences() -> None:
    assert llms.first_sentence("Version 5 (arXiv:1904.00962v5). More.") == "Version 5 (arXiv:1904.00962v5)."
    assert llms.first_sentence("no end") == "no end"
