"""Pages, notebooks, docstrings, comments, help and messages without turns of phrase that made them hard to read."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

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
    r"\b(un)?settled\b|\bmay settle\b": "clear, cannot be distinguished from, no clear winner",
}
"""Patterns, and what to write instead."""

ALLOWED = {"Not as there": "a mark in the table of presets"}

PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "workbench/README.md",
    "docs/*.md",
    "benchmarks/**/*.md",
    "workbench/benchmarks/**/*.md",
]

SOURCES = [
    *("*", ".github/**/*.yml"),
    *("docs/*.py", "docs/_ext/*.py", "docs/examples/*.py"),
    *("src/**/*", "benchmarks/**/*", "tests/**/*", "workbench/**/*"),
]


def prose() -> Iterator[tuple[str, str]]:
    """Yield pages without code, and the page whose code is the help of commands."""
    for page in sorted(page for pattern in PAGES for page in ROOT.glob(pattern)):
        text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        yield str(page.relative_to(ROOT)), text
    yield "help of commands", (ROOT / "docs" / "command-line.md").read_text()


def remarks() -> Iterator[tuple[str, str]]:
    """Yield the docstrings and comments of files that contain a phrase anywhere."""
    readers = {
        ".py": of_python,
        **dict.fromkeys((".c", ".h", ".cpp"), of_c),
        **dict.fromkeys((".toml", ".yml", ".txt", ""), of_make),
    }
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()}):
        if path.suffix in readers and found(re.sub("[#*/]", " ", source := path.read_text())):  # parsing is slow
            yield from ((str(path.relative_to(ROOT)), text) for text in readers[path.suffix](source))


def of_python(source: str) -> Iterator[str]:
    """Yield docstrings, also of variables, and comments; comments on consecutive lines are one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    lines = dict.fromkeys(range(source.count("\n") + 2), "\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = f" {token.string.lstrip('#')}"
    yield from re.split(r"\n+", "".join(lines.values()))


def of_c(source: str) -> Iterator[str]:
    """Yield the comments."""
    for match in re.finditer(r"/\*.*?\*/|//[^\n]*", source, re.DOTALL):
        yield re.sub(r"^ *\*", "", match[0], flags=re.MULTILINE)


def of_make(source: str) -> Iterator[str]:
    """Yield the comments after `#`; comments on consecutive lines are one."""
    yield from re.split(r"\n{2,}", re.sub(r"^[^#\n]*#?", "", source, flags=re.MULTILINE))


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
    text = " ".join(text.split())
    for words in ALLOWED:
        text = text.replace(words, "")
    return [
        f"{text[max(0, match.start() - 30) : match.end() + 30].strip()}: {remedy}"
        for pattern, remedy in GONE.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def test_phrases_that_are_gone_stay_away() -> None:
    assert {name: phrases for name, text in prose() if (phrases := found(text))} == {}


def test_docstrings_and_comments_do_without_them_too() -> None:
    assert [(name, phrases) for name, text in remarks() if (phrases := found(text))] == []


def test_messages_do_without_them_too() -> None:
    """A terminal may not have ±."""
    gone = {name: found(text.replace("+-", "")) for name, text in messages()}
    assert {name: phrases for name, phrases in gone.items() if phrases} == {}


def test_a_phrase_is_found() -> None:
    phrase = ["The bytes are those of weights: repeat the noun, or say equals, like, as in"]
    assert found("The bytes are those of weights") == phrase
    assert found("The result equals one process") == []
    sources = {
        of_python: [
            '"""The bytes are those\nof weights"""',
            'SIZE = 1\n"""The bytes are those of weights"""',
            "class Size:\n    # The bytes are those\n    # of weights\n    one = 1",
            "size = 1  # The bytes are those of weights",
        ],
        of_c: ["/* The bytes are those\n * of weights */", "int size; // The bytes are those of weights\n"],
        of_make: ["# The bytes are those\n# of weights\nall:", 'size = "1"  # The bytes are those of weights\n'],
    }
    for reader, texts in sources.items():
        for text in texts:
            [(one, *_)] = filter(None, map(found, reader(text)))
            assert "The bytes are those of weights" in one
    assert not any(map(found, of_python("a = 1  # The bytes are those\n\nb = 2  # of weights\n")))
