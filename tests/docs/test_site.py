"""The extensions of the site fail the build if a page and the code differ."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", ["lamb", "came"])
def test_every_backend_in_python_carries_tags_of_the_reference(name: str) -> None:
    kernels = Path(bighorn.__file__).parent / "kernels"
    known = set(algorithm.tagged((kernels / "reference" / f"{name}.py").read_text(), name.upper()))
    theirs = set(algorithm.tagged((kernels / "foreach" / f"{name}.py").read_text(), name.upper()))
    assert known
    assert theirs <= known


def test_the_citation_has_the_version() -> None:
    lines = (Path(__file__).parents[2] / "CITATION.cff").read_text().splitlines()
    assert f"version: {bighorn.__version__}" in lines
