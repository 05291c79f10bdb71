"""The architecture of the package: which module imports which, what is documented, and that it is true."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import bighorn
from bighorn import groups, kernels, schedules, telemetry
from bighorn.kernels.options import table
from bighorn.optim.optimizer import KernelOptimizer
from bighorn.optim.settings import Settings

ROOT = Path(bighorn.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

FACES = [f"bighorn.compat.{path.stem}" for path in FILES if path.parent.name == "compat" and path.stem[0] != "_"]

# A room and the rooms of bighorn that it may import from; `bighorn` itself stands for the public names.
MAY_IMPORT: dict[str, set[str]] = {
    "bighorn": {"groups", "offloading", "optim", "scaling", "distributed", "schedules", "telemetry"},
    "arguments": set(),
    "deferred": set(),
    "optim": {"arguments", "optim", "kernels", "distributed", "names", "schedules"},
    "kernels": {"arguments", "kernels"},
    "groups": {"arguments", "names"},
    "names": {"arguments"},
    "schedules": {"arguments"},
    "telemetry": {"arguments"},
    "integrations": {"arguments", "bighorn", "telemetry"},
    "scaling": {"arguments", "deferred", "distributed"},
    "distributed": {"deferred", "kernels"},
    "offloading": {"arguments", "distributed", "kernels", "offloading"},
    "compat": {"arguments", "bighorn", "compat", "schedules"},
    "cli": {"arguments", "bighorn", "kernels", "schedules", "cli"},
}
OPEN_KERNELS = {"bucket", "codec", "options", "reference", "rounding", "storage"}
"""The modules of bighorn.kernels that everyone may import; the others are between `pick()` and a step."""

TERMINAL = {"click", "rich", "matplotlib", "jinja2", "sklearn", "scipy", "numpy"}
PEERS = {"jax", "keras", "optax", "pytorch_optimizer", "timm"}
TRAINERS = {"accelerate", "axolotl", "deepspeed", "lightning", "torchtitan", "transformers"}


def room(parts: tuple[str, ...]) -> str:
    """The first part below the package: a folder or a file's name."""
    return "bighorn" if len(parts) < 2 or parts[1] == "__init__" else parts[1]


def for_types_alone(tree: ast.AST) -> set[ast.AST]:
    """Everything below an `if TYPE_CHECKING:`."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


def imports(path: Path, types: bool = True) -> Iterator[tuple[str, ...]]:
    """Everything a file imports, anywhere in it, as absolute dotted names in parts; with imports for types or not."""
    here = ("bighorn", *path.relative_to(ROOT).with_suffix("").parts)
    tree = ast.parse(path.read_text())
    left_out = set() if types else for_types_alone(tree)
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                submodule = ROOT.joinpath(*module[1:], alias.name)
                is_module = module[:1] == ("bighorn",) and (submodule.is_dir() or submodule.with_suffix(".py").exists())
                yield (*module, alias.name) if is_module else module


def crossings(path: Path, allowed: dict[str, set[str]]) -> list[str]:
    own = room(("bighorn", *path.relative_to(ROOT).with_suffix("").parts))
    ours = {room(name) for name in imports(path) if name[0] == "bighorn"}
    return sorted(ours - allowed[own] - ({own} if (ROOT / own).is_dir() else set()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    assert crossings(path, MAY_IMPORT) == []


def test_the_import_rule_sees_a_crossing() -> None:
    plan = ROOT / "optim" / "plan_builder.py"
    assert crossings(plan, {**MAY_IMPORT, "optim": {"optim"}}) != []
    assert ("bighorn", "kernels") in set(imports(plan))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_command_line_needs_more_than_torch(path: Path) -> None:
    foreign = {name[0] for name in imports(path)} & (TERMINAL | PEERS | TRAINERS)
    its_trainer = {path.stem} if path.parent == ROOT / "integrations" else set()
    assert path.is_relative_to(ROOT / "cli") or foreign == its_trainer - {"__init__"}


def test_only_the_sharding_room_names_distributed_tensors() -> None:
    naming = set()
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {part for name in imports(path) for part in name}
        if names & {"DTensor", "to_local", "placements"}:
            naming.add(path.relative_to(ROOT).name)
    assert naming <= {"sharding.py"}


@pytest.mark.parametrize("path", sorted((ROOT / "compat").glob("*.py")), ids=lambda path: path.name)
def test_faces_of_other_systems_are_thin(path: Path) -> None:
    tree = ast.parse(path.read_text())
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    docstrings = {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = {i for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip()} - docstrings
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            assert len(code & set(range(node.lineno, (node.end_lineno or 0) + 1))) <= 100, node.name


def test_only_one_place_probes_for_backends() -> None:
    """Only `pick()` and `status()` ask a backend's module whether it works; the command line shows their answers."""
    for path in FILES:
        if not {ROOT / "kernels", ROOT / "cli"} & set(path.parents):
            inner = {name[2] for name in imports(path) if name[:2] == ("bighorn", "kernels") and len(name) > 2}
            assert inner <= OPEN_KERNELS, path


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


def import_graph() -> dict[str, set[str]]:
    """The modules of the package that each module imports, also within functions; without imports for types alone."""
    own = {
        ".".join(part for part in path.relative_to(ROOT.parent).with_suffix("").parts if part != "__init__"): path
        for path in FILES
    }
    return {name: {".".join(other) for other in imports(path, types=False)} & own.keys() for name, path in own.items()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(import_graph()) == set()


def test_a_cycle_is_seen() -> None:
    assert cycles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}) == {
        frozenset({"a", "b", "c"}),
        frozenset({"d"}),
    }
    assert "bighorn.cli.reports.train" in import_graph()["bighorn.cli.train"]  # in a function
    assert cycles(import_graph() | {"bighorn.cli.errors": {"bighorn.cli.train"}})


def test_every_rule_names_what_is_there() -> None:
    graph = import_graph()
    rooms = set(MAY_IMPORT) | set().union(*MAY_IMPORT.values())
    named = {f"bighorn.{name}" for name in rooms - {"bighorn"}}
    named |= {f"bighorn.kernels.{name}" for name in OPEN_KERNELS}
    assert named - graph.keys() == set()


GONE = {
    *("Ahead", "Cut", "Drive", "Feed", "Fingerprint", "Flight", "Held", "Kept", "Late", "Looks", "Part", "Places"),
    *("Ready", "Suspects", "Watch", "Whereabouts", "kept_for", "laid_by", "lay_out", "owners"),
    *("step_ahead", "strays", "take_over", "unrounded", "why_not", "why_refused", "why_unfit", "why_whole"),
    *("Gauge", "gauge", "gauges"),
}
"""Names that the glossary has replaced."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_the_glossary_replaced_are_gone(path: Path) -> None:
    names = {token.string for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)}
    assert names & GONE == set()


# ---- what is documented -----------------------------------------------------------------------------------------


def public() -> list[tuple[str, object]]:
    """Every public name of the package, its groups, schedules, kernels and faces, and the methods of the classes."""
    found: list[tuple[str, object]] = []
    for module in (bighorn, groups, schedules, telemetry, kernels, *map(importlib.import_module, FACES)):
        for name in module.__all__:
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            found.append((f"{module.__name__}.{name}", thing))
            if inspect.isclass(thing):
                methods = inspect.getmembers(
                    thing, lambda member: inspect.isfunction(member) or inspect.ismethod(member)
                )
                found += [
                    (f"{module.__name__}.{name}.{method}", function)
                    for method, function in methods
                    if not method.startswith("_") and function.__module__.startswith("bighorn")
                ]
    return found


@pytest.mark.parametrize(("name", "thing"), public(), ids=[name for name, _ in public()])
def test_every_public_name_is_documented(name: str, thing: object) -> None:
    assert (inspect.getdoc(thing) or "").strip(), name


def documented_defaults(doc: str) -> dict[str, str]:
    """The arguments of a google-style docstring, each with the text after its last "Default: "."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n|\n)+)", doc, re.MULTILINE)
    if not section:
        return {}
    defaults = {}
    for entry in re.split(r"\n(?=    \w)", section.group(1).rstrip()):
        name, _, text = entry.strip().partition(":")
        said = re.findall(r"Default: (.+?)\.?$", " ".join(text.split()))
        defaults[name] = said[-1].split(", which")[0] if said else ""
    return defaults


# Python knows no signature of an exception that has no constructor of its own.
SIGNED = [(name, thing) for name, thing in public() if not (inspect.isclass(thing) and issubclass(thing, Warning))]


@pytest.mark.parametrize(("name", "thing"), SIGNED, ids=[name for name, _ in SIGNED])
def test_documented_defaults_are_those_of_the_signature(name: str, thing: object) -> None:
    assert callable(thing)
    documented = documented_defaults(inspect.getdoc(thing) or "")
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for argument in inspect.signature(thing).parameters.values():
        if argument.name not in documented:
            continue
        assert argument.kind not in kinds
        if argument.default is inspect.Parameter.empty:
            assert documented[argument.name] == "", f"{name}: {argument.name} has no default"
        else:
            said = documented[argument.name]
            assert said, f"{name}: the default of {argument.name} is not documented"
            assert ast.literal_eval(said) == argument.default, f"{name}: {argument.name}"


@pytest.mark.parametrize(("kind", "betas"), [(bighorn.Lamb, "(0.9, 0.999)"), (bighorn.Came, "(0.9, 0.999, 0.9999)")])
def test_every_argument_of_an_optimizer_is_documented(kind: type, betas: str) -> None:
    documented = documented_defaults(inspect.getdoc(kind) or "")
    signature = inspect.signature(kind).parameters.values()
    assert set(documented) == {a.name for a in signature if a.kind is not inspect.Parameter.VAR_KEYWORD}
    assert documented["betas"] == betas


@pytest.mark.parametrize("kind", [bighorn.Lamb, bighorn.Came])
def test_the_arguments_of_an_optimizer_are_the_options_of_its_tables(kind: type[KernelOptimizer]) -> None:
    arguments = set(inspect.signature(kind).parameters) - {"params", "unknown"}
    algorithm, whole = kind.algorithm, table(Settings)
    of_groups = set(algorithm.options) - set(algorithm.group_only)
    assert arguments - of_groups <= set(whole)
    assert of_groups <= arguments
    assert set(whole) - arguments <= {"exclude_from_layer_adaptation"}
    assert algorithm.group_only.keys() <= algorithm.options.keys()


def modules() -> list[str]:
    """By their files: the folder of an installed package holds the C library too, which looks importable."""
    files = [path for path in FILES if path.stem != "__main__"]
    parts = [path.relative_to(ROOT.parent).with_suffix("").parts for path in files]
    return [".".join(part for part in module if part != "__init__") for module in parts]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str) -> None:
    if name.startswith("bighorn.integrations."):
        pytest.importorskip(name.rpartition(".")[2], reason="make integrations")
    module: ModuleType = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("kind", [bighorn.Lamb, bighorn.Came])
def test_there_are_examples(kind: type) -> None:
    finder = doctest.DocTestFinder()
    assert sum(len(test.examples) for test in finder.find(kind, "kind")) > 0
