"""Which module of a package imports which, and rules of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias


@cache
def package(path: Path) -> Path:
    """The top folder of the package that a file is in, or the file's folder."""
    folder = path.parent
    while (folder / "__init__.py").exists() and (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


def for_types_alone(tree: ast.AST) -> set[ast.AST]:
    """Everything below an `if TYPE_CHECKING:`."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, types: bool = True) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The line and absolute dotted name, in parts, of each import anywhere in a file; with imports for types or not."""
    root = package(path)
    here = (root.name, *path.relative_to(root).with_suffix("").parts)
    left_out = set() if types else for_types_alone(parsed(path))
    for node in ast.walk(parsed(path)):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                submodule = root.joinpath(*module[1:], alias.name)
                is_module = module[:1] == (root.name,) and (submodule.is_dir() or submodule.with_suffix(".py").exists())
                yield node.lineno, (*module, alias.name) if is_module else module


Offence: TypeAlias = tuple[int, str]
"""The line and what is wrong there."""


def offenders(rule: Callable[[Path], Iterable[Offence]], files: Iterable[Path]) -> list[str]:
    """All places that break a rule."""
    return [
        f"{path.relative_to(package(path).parent)}:{line}: {what}"
        for path in files
        for line, what in sorted(set(rule(path)))
    ]


def none_of(found: list[str]) -> None:
    """Fail with all that breaks a rule, one a line; of a long list, pytest would show the beginning."""
    assert not found, "\n".join(["", *found])


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of nodes that all reach each other."""
    reached: dict[str, set[str]] = {}
    for node in graph:
        reached[node], waiting = set(), [node]
        while waiting:
            new = graph[waiting.pop()] - reached[node]
            reached[node] |= new
            waiting += new
    return {
        frozenset(other for other in reached[node] if node in reached[other]) for node in graph if node in reached[node]
    }


def module_of(path: Path) -> str:
    return ".".join(part for part in path.relative_to(package(path).parent).with_suffix("").parts if part != "__init__")


def import_graph(files: Iterable[Path]) -> dict[str, set[str]]:
    """The modules of a package that each module imports, also within functions; without imports for types alone."""
    own = {module_of(path): path for path in files}
    return {
        name: {".".join(other) for _, other in imports(path, types=False)} & own.keys() for name, path in own.items()
    }
