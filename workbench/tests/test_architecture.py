"""The workbench imports public names of `bighorn` only, and no two of its modules import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import bighorn
import bighorn_workbench
from bighorn_workbench.optimizers import BACKENDS
from tests.support.imports import Offence, cycles, import_graph, none_of, offenders, parsed

ROOT = Path(bighorn_workbench.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))

MODULES = {f"bighorn.{name}" for name in ("compat", "groups", "integrations", "schedules", "telemetry")}
"""The modules of the library with public names."""

EXPERIMENTS = {"four_bits.py", "state_codecs.py"}
"""Scripts that replace a codec of the library."""

INSTRUMENTS = {"gpu_host_share.py", "gpu_tuning.py", "offload.py", "plain_torch.py"}
"""Scripts that measure a part of the library."""


def is_public(module: str, name: str) -> bool:
    """Whether a name is public in a module of the library, or exists in every module."""
    whole = f"{module}.{name}"
    if whole in MODULES or (name.startswith("__") and name.endswith("__")):
        return True
    return (module == "bighorn" or module in MODULES) and name in import_module(module).__all__


def private(path: Path) -> Iterator[Offence]:
    """Yield the private names of the library that a file imports, or reads from an imported module."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "bighorn" and alias.name not in {"bighorn", *MODULES}:
                    yield node.lineno, f"imports {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bighorn":
            for alias in node.names:
                if not is_public(node.module or "", alias.name):
                    yield node.lineno, f"imports {node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            module = ast.unparse(node.value)
            if (module == "bighorn" or module in MODULES) and not is_public(module, node.attr):
                yield node.lineno, f"reads {module}.{node.attr}"


def test_only_public_names_of_the_library_are_used() -> None:
    none_of(offenders(private, [*FILES, *(path for path in SCRIPTS if path.name not in EXPERIMENTS | INSTRUMENTS)]))


def test_experiments_need_private_names() -> None:
    assert {path.name for path in SCRIPTS if offenders(private, [path])} == EXPERIMENTS | INSTRUMENTS


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph(FILES)
    assert cycles(graph) == set()
    assert "bighorn_workbench.reports.train" in graph["bighorn_workbench.train"]  # in a function
    assert cycles(graph | {"bighorn_workbench.errors": {"bighorn_workbench.train"}})


def test_the_values_of_options_are_the_librarys() -> None:
    assert tuple(row.name for row in bighorn.status(trial=False).backends if not row.has) == BACKENDS
