"""The graph of imports of a package, and helpers for rules on it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias


@cache
def package(path: Path) -> Path:
    """Return the top folder of a file's package, or the file's folder."""
    folder = path.parent
    while (folder / "__init__.py").exists() and (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


def for_types_alone(tree: ast.AST) -> set[ast.AST]:
    """Return all nodes below an `if TYPE_CHECKING:`."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, types: bool = True) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the line and the absolute name, in parts, of each import in a file; `types` includes TYPE_CHECKING."""
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
"""A line, and the rule that it breaks."""


def offenders(rule: Callable[[Path], Iterable[Offence]], files: Iterable[Path]) -> list[str]:
    """Return all places that break a rule."""
    return [
        f"{path.relative_to(package(path).parent)}:{line}: {what}"
        for path in files
        for line, what in sorted(set(rule(path)))
    ]


def none_of(found: list[str]) -> None:
    """Fail with all offences, one a line; pytest would truncate a long list."""
    assert not found, "\n".join(["", *found])


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the largest sets of nodes that all reach each other."""
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
    """Return the modules of a package that each module imports, also in functions, without TYPE_CHECKING."""
    own = {module_of(path): path for path in files}
    return {
        name: {".".join(other) for _, other in imports(path, types=False)} & own.keys() for name, path in own.items()
    }
