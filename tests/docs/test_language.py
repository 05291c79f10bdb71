"""README, pages, public docstrings, help and messages without turns of phrase that made them hard to read."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bighorn_workbench.commands import bighorn as commands

pytest.importorskip("sphinx")
sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))

import complete

ROOT = Path(__file__).parents[2]

GONE = {
    r"\bof (these|those)\b(?= (and|is|are|has|have|that|of|in|on)\b|[,.:;])": "name the noun",
    r"\b(those|that) of\b": "repeat the noun, or say equals, like, as in",
    r"\bwhat reads\b": "begin with the subject",
    r"\btold from\b|\btells? \w+ apart\b": "distinguish",
    r"\bnobody\b|\bno one\b": "use the passive, or name who",
    r"\+-": "write ±",
    r"\bof late\b": "recently",
    r"\bshipped class\b": "name the package",
    r"\b(says|tells) (so|nothing|what|which|how)\b": "software prints, reports, warns, raises",
    r"\bwhatever the\b": "for any, independent of",
    r"\bbut for\b": "except",
    r"\bas there\b": "as in, and the package",
}
"""Patterns, and what to write instead."""

ALLOWED = {"Not as there": "a mark in the table of presets"}


def prose() -> Iterator[tuple[str, str]]:
    """Yield texts by name: pages without code, docstrings of public names, help of commands, and messages."""
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        yield page.name, re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name, thing in complete.public():
        yield name, inspect.getdoc(thing) or ""
    context = click.Context(commands, info_name="bighorn")
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        yield f"bighorn {name}", command.get_help(click.Context(command, info_name=name, parent=context))


def messages() -> Iterator[tuple[str, str]]:
    """Yield the strings of both packages that are not docstrings, by file and line."""
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("workbench/src/**/*.py")]):
        tree = ast.parse(path.read_text())
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if id(node) in documented | parts:
                continue
            if isinstance(node, ast.JoinedStr):
                values = [part.value for part in node.values if isinstance(part, ast.Constant)]
                yield f"{path.name}:{node.lineno}", " X ".join(map(str, values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.name}:{node.lineno}", node.value


def found(text: str) -> list[str]:
    """The gone phrases of a text, each with its neighbours and the remedy."""
    for words in ALLOWED:
        text = text.replace(words, "")
    return [
        f"{' '.join(text[max(0, match.start() - 30) : match.end() + 30].split())}: {remedy}"
        for pattern, remedy in GONE.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def test_phrases_that_are_gone_stay_away() -> None:
    assert {name: phrases for name, text in prose() if (phrases := found(text))} == {}


def test_messages_do_without_them_too() -> None:
    """A terminal may not have ±."""
    gone = {name: found(text.replace("+-", "")) for name, text in messages()}
    assert {name: phrases for name, phrases in gone.items() if phrases} == {}


def test_a_phrase_is_found() -> None:
    assert found("The bytes are those of weights") == [
        "The bytes are those of weights: repeat the noun, or say equals, like, as in"
    ]
    assert found("The result equals one process") == []
