"""The parts of pages that `make docs` writes equal the code, and pages have nothing that a code host cannot show."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import bighorn
from tests.support.tables import for_every

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))

import generated
import reference

PAGES = sorted(generated.DOCS.glob("*.md"))
TEXTS = {page.stem: page.read_text() for page in PAGES}
OF_THE_WORKBENCH = {"command-line"}
"""Pages that need the workbench, and have a test there."""
ALGORITHMS = "lamb", "came", "lars"


@for_every("name", [name for name, text in TEXTS.items() if generated.PART.search(text)], ids=str)
def test_a_page_has_what_the_code_says(name: str) -> None:
    if name not in OF_THE_WORKBENCH:
        assert TEXTS[name] == generated.written(TEXTS[name]), "run make docs"


def test_every_public_name_has_a_place_in_the_reference() -> None:
    headings = {
        heading for text in TEXTS.values() for heading in re.findall(r"^### (bighorn[\w.]+)$", text, re.MULTILINE)
    }
    assert {name for name, _ in reference.public()} - headings == set()


def test_a_public_name_without_a_docstring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bighorn.LossScaler, "__doc__", "")
    with pytest.raises(ValueError, match=r"the public name bighorn.LossScaler has no docstring"):
        reference.reference("bighorn.LossScaler")


@pytest.mark.parametrize("kind", [bighorn.Lamb, bighorn.Came, bighorn.Lars])
def test_every_option_has_a_place_in_a_table(kind: type[Any]) -> None:
    said = reference.meanings(kind)
    listed = [word for words in reference.SUBJECTS.values() for word in words.split()]
    assert len(listed) == len(set(listed))
    assert set(reference.parameters(kind)) == set(said) <= set(listed)
    assert all(said.values())
    assert not any("Default:" in words for words in said.values())


def test_an_option_without_a_subject_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reference.SUBJECTS, "Where it runs", "")
    with pytest.raises(ValueError, match=r"bighorn.Lamb has no subject, or two, for \['backend'\]"):
        reference.options("bighorn.Lamb")


def test_a_reference_has_signature_arguments_errors_and_example() -> None:
    text = "\n".join(reference.reference("bighorn.schedules.Cosine"))
    assert "```text\nCosine(lr, decay_steps, end_lr=0.0)\n```" in text
    assert "| `end_lr` | float, `0.0` | The value at the end. |" in text
    assert "```pycon\n>>> [round(lr, 3) for lr in Cosine(lr=1.0, decay_steps=4, end_lr=0.2)" in text
    assert "* `ValueError`: " in "\n".join(reference.reference("bighorn.status"))


def test_a_reference_says_what_is_returned() -> None:
    text = "\n".join(reference.reference("bighorn.offloading.OffloadedOptimizer"))
    assert "\nexplain() -> str\n" in text
    assert "\naccumulate() -> ContextManager[None]\n" in text
    assert "\nzero_grad(set_to_none=True)\n" in text
    assert "\n) -> Status\n" in "\n".join(reference.reference("bighorn.status"))


def test_attributes_are_no_arguments() -> None:
    """The arguments of a class that others make are left out, and a Protocol is not called."""
    text = "\n".join(reference.reference("bighorn.offloading.OffloadedOptimizer"))
    assert "OffloadedOptimizer(" not in text
    assert "| attribute | type | meaning |\n|---|---|---|\n| `optimizer` | Optimizer | " in text
    assert "Copies(" not in "\n".join(reference.reference("bighorn.offloading.Copies"))
    text = "\n".join(reference.reference("bighorn.Fragment"))
    assert "Fragment(name, shape, numel, start=0, offset=0)" in text
    assert "| attribute | type, default | meaning |" in text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_formulas_of_a_page_have_the_tags_of_the_code(name: str) -> None:
    source = Path(bighorn.__file__).parent / "_kernels" / "reference" / f"{name}.py"
    [formulas] = re.findall(r"```math\n(\\begin\{aligned\}.*?)```", TEXTS[name], re.DOTALL)
    known = set(generated.tagged(source.read_text(), name.upper()))
    assert known
    assert set(re.findall(rf"\\text\{{{name.upper()}-(\w+)\}}", formulas)) == known


def test_tags_are_read_from_code_alone() -> None:
    text = "# LAMB-z\nm = 1  # LAMB-m\nr, c = f()  # LAMB-r, LAMB-c\nm += 1  # LAMB-m\nx = 1  # CAME-x\n"
    assert generated.tagged(text, "LAMB") == {"m": ["m = 1", "m += 1"], "r": ["r, c = f()"], "c": ["r, c = f()"]}


@for_every("name", list(TEXTS), ids=str)
def test_a_page_has_no_directives_of_the_site(name: str) -> None:
    """A code host shows them as boxes of code, and formulas between two dollars lose their backslashes there."""
    text = TEXTS[name]
    assert re.findall(r"^(?:```|:::)\{.*|.*\$\$.*", text, re.MULTILINE) == []
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [formula for formula in re.findall(r"\$([^$\n]+)\$", prose) if re.search(r"\\[^a-zA-Z]", formula)] == []


def test_a_default_that_is_explained_stays() -> None:
    assert reference.without_default("The ranks. Default: None, which is all of them.") == (
        "The ranks. Default: None, which is all of them."
    )
    assert reference.without_default("Decay, in [0, 1). Default: (0.9, 0.999).") == "Decay, in [0, 1)."
