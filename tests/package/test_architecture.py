"""The architecture of the package: the graph of imports, and complete and correct docstrings.

Each rule is one test, which lists every offence as `file:line: what`.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bighorn
from bighorn import _kernels as kernels
from bighorn import groups, schedules, telemetry
from bighorn._kernels.options import table
from bighorn._optim.optimizer import KernelOptimizer
from bighorn._optim.settings import Settings
from tests.support.imports import Offence, cycles, import_graph, imports, module_of, none_of, offenders, parsed

ROOT = Path(bighorn.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

FACES = [f"bighorn.compat.{path.stem}" for path in FILES if path.parent.name == "compat" and path.stem[0] != "_"]

# Each part of bighorn, with the parts that it may import from; `bighorn` means the public names.
MAY_IMPORT: dict[str, set[str]] = {
    "bighorn": {
        "_backend_status",
        "groups",
        "offloading",
        "_optim",
        "_scaling",
        "_distributed",
        "schedules",
        "telemetry",
    },
    "__main__": {"bighorn"},
    "_arguments": {"_foreign_options"},
    "_backend_status": {"_arguments", "_capabilities", "_kernels", "_optim"},
    "_capabilities": set(),
    "_deferred": set(),
    "_foreign_options": set(),
    "_square_sums": {"_capabilities"},
    "_optim": {
        *(
            "_arguments",
            "_capabilities",
            "_distributed",
            "_foreign_options",
            "_kernels",
            "_names",
            "_optim",
            "schedules",
        ),
        "_square_sums",
    },
    "_kernels": {"_arguments", "_capabilities", "_kernels", "_square_sums"},
    "groups": {"_arguments", "_names"},
    "_names": {"_arguments"},
    "schedules": {"_arguments"},
    "telemetry": {"_arguments"},
    "integrations": {"_arguments", "bighorn", "telemetry"},
    "_scaling": {"_arguments", "_capabilities", "_deferred", "_distributed"},
    "_distributed": {"_capabilities", "_deferred", "_kernels"},
    "offloading": {"_arguments", "_distributed", "_kernels", "offloading", "_square_sums"},
    "compat": {"_arguments", "bighorn", "compat", "_names", "schedules"},
}
OPEN_KERNELS = {"bucket", "codec", "options", "reference", "rounding", "storage"}
"""The modules of bighorn._kernels that all parts may import; the others are between `pick()` and a step."""

TERMINAL = {"click", "rich", "matplotlib", "jinja2", "optuna", "sklearn", "scipy", "numpy"}
PEERS = {"jax", "keras", "optax", "pytorch_optimizer", "timm"}
TRAINERS = {"accelerate", "axolotl", "deepspeed", "lightning", "torchtitan", "transformers"}


def room(parts: tuple[str, ...]) -> str:
    """Return the first name below the package: a folder or a file."""
    return "bighorn" if len(parts) < 2 or parts[1] == "__init__" else parts[1]


def crossings(path: Path, allowed: dict[str, set[str]] = MAY_IMPORT) -> Iterator[Offence]:
    own = room(("bighorn", *path.relative_to(ROOT).with_suffix("").parts))
    may = allowed[own] | ({own} if (ROOT / own).is_dir() else set())
    for line, name in imports(path):
        if name[0] == "bighorn" and room(name) not in may:
            yield line, f"{own} may not import {room(name)}"


def test_a_room_imports_only_what_it_may() -> None:
    none_of(offenders(crossings, FILES))


def test_the_import_rule_sees_a_crossing() -> None:
    plan = ROOT / "_optim" / "plan_builder.py"
    found = offenders(lambda path: crossings(path, {**MAY_IMPORT, "_optim": {"_optim"}}), [plan])
    assert "_optim may not import _kernels" in found[0]
    at = int(found[0].split(":")[1])
    assert re.search(r"\b_kernels\b", plan.read_text().splitlines()[at - 1])
    assert ("bighorn", "_kernels") in {name for _, name in imports(plan)}


def test_the_library_needs_only_torch() -> None:
    def foreign(path: Path) -> Iterator[Offence]:
        for line, (package, *_) in imports(path):
            if package in (TERMINAL | PEERS | TRAINERS) - own_trainer(path):
                yield line, f"imports {package}"

    def without_its_trainer(path: Path) -> Iterator[Offence]:
        for trainer in own_trainer(path) - {name[0] for _, name in imports(path)}:
            yield 1, f"does not import {trainer}"

    none_of(offenders(foreign, FILES) + offenders(without_its_trainer, FILES))


WORKBENCH = re.compile(r"\bbighorn[-_]workbench\b|\bbighorn (train|compare|lr-find|bench|memory|doctor)\b")


def of_the_workbench(path: Path) -> Iterator[Offence]:
    for line, text in enumerate(path.read_text().splitlines(), 1):
        yield from ((line, f"names {found[0]}") for found in WORKBENCH.finditer(text))


def test_the_library_knows_nothing_of_the_workbench() -> None:
    """It neither imports it nor names its commands in messages, since it may not be installed."""
    none_of(offenders(of_the_workbench, [*FILES, *(ROOT / "_kernels" / "csrc").glob("*.[ch]")]))


def from_the_workbench(path: Path) -> Iterator[Offence]:
    yield from ((line, ".".join(name)) for line, name in imports(path) if name[0] == "bighorn_workbench")


def test_tests_and_counts_import_nothing_of_the_workbench() -> None:
    """They run where it is not installed."""
    tests = Path(__file__).parents[1]
    files = [path for folder in (tests, tests.with_name("benchmarks")) for path in sorted(folder.rglob("*.py"))]
    assert {"published.py", "test_architecture.py"} <= {path.name for path in files}
    none_of(offenders(from_the_workbench, files))


def test_the_wall_sees_the_workbench(tmp_path: Path) -> None:
    planted = tmp_path / "bighorn" / "planted.py"
    planted.parent.mkdir()
    (planted.parent / "__init__.py").touch()
    planted.write_text("import torch\nfrom bighorn_workbench import train\nHELP = 'see bighorn doctor'\n")
    assert offenders(from_the_workbench, [planted]) == ["bighorn/planted.py:2: bighorn_workbench"]
    assert offenders(of_the_workbench, [planted]) == [
        "bighorn/planted.py:2: names bighorn_workbench",
        "bighorn/planted.py:3: names bighorn doctor",
    ]


def own_trainer(path: Path) -> set[str]:
    """Return the package that a module of bighorn.integrations is named after; `diffusion` imports none."""
    names_it = path.parent == ROOT / "integrations" and path.stem[0] != "_"
    return {path.stem} - {"diffusion"} if names_it else set()


def test_only_the_sharding_room_names_distributed_tensors() -> None:
    names = {"DTensor", "to_local", "placements"}

    def naming(path: Path) -> Iterator[Offence]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if name in names:
                    yield node.lineno, f"names {name}"
        for line, parts in imports(path):
            yield from ((line, f"names {part}") for part in parts if part in names)

    none_of(offenders(naming, [path for path in FILES if path.name != "sharding.py"]))


def test_only_one_place_probes_for_backends() -> None:
    """Only `pick()` and `status()` ask a backend's module whether it works; `bighorn.status` shows their answers."""

    def inner(path: Path) -> Iterator[Offence]:
        for line, name in imports(path):
            if name[:2] == ("bighorn", "_kernels") and len(name) > 2 and name[2] not in OPEN_KERNELS:
                yield line, f"imports {'.'.join(name)}, a module between pick() and a step"

    others = [path for path in FILES if ROOT / "_kernels" not in path.parents and path.stem != "_backend_status"]
    none_of(offenders(inner, others))


def test_no_modules_import_each_other_in_a_circle() -> None:
    circles = cycles(import_graph(FILES))

    def within(path: Path) -> Iterator[Offence]:
        own = module_of(path)
        for line, name in imports(path, types=False):
            if any({own, ".".join(name)} <= circle for circle in circles):
                yield line, f"imports {'.'.join(name)}, which imports {own}"

    none_of(offenders(within, FILES))
    assert circles == set()


def test_a_cycle_is_seen() -> None:
    assert cycles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}) == {
        frozenset({"a", "b", "c"}),
        frozenset({"d"}),
    }
    assert cycles(import_graph(FILES) | {"bighorn._arguments": {"bighorn.groups"}})


def test_every_rule_names_what_is_there() -> None:
    graph = import_graph(FILES)
    rooms = set(MAY_IMPORT) | set().union(*MAY_IMPORT.values())
    named = {f"bighorn.{name}" for name in rooms - {"bighorn"}}
    named |= {f"bighorn._kernels.{name}" for name in OPEN_KERNELS}
    assert named - graph.keys() == set()


# ---- documentation ----------------------------------------------------------------------------------------------


def public() -> list[tuple[str, Any]]:
    """Return the public names of the package and its modules, and the methods of classes."""
    found: list[tuple[str, Any]] = []
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


def looks_public(path: Path) -> Iterator[Offence]:
    """Yield the names that a public module defines, without an underscore, and does not list in `__all__`."""
    listed: set[str] = set()
    defined: dict[str, int] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node.lineno
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for name in [target.id for target in targets if isinstance(target, ast.Name)]:
            defined[name] = node.lineno
            if name == "__all__":
                listed = set(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    yield from ((line, name) for name, line in defined.items() if name[0] != "_" and name not in listed)


def test_names_that_are_not_public_begin_with_an_underscore(tmp_path: Path) -> None:
    """Or a module or folder on their path does."""
    modules = [path for path in FILES if not re.search(r"/_(?!_init__)", f"/{path.relative_to(ROOT)}")]
    names = {str(path.relative_to(ROOT)) for path in modules}
    assert {"groups.py", "compat/apex.py", "schedules/__init__.py"} <= names
    assert {"_names.py", "_optim/lamb.py", "offloading/_copies.py"}.isdisjoint(names)
    none_of(offenders(looks_public, modules))
    planted = tmp_path / "planted.py"
    planted.write_text("__all__ = ['LISTED']\nLISTED = _PRIVATE = 1\nUNLISTED: int = 2\n")
    assert [name for _, name in looks_public(planted)] == ["UNLISTED"]


def place(name: str, thing: Any) -> str:
    """Return the file and line of a definition, and its name."""
    path = Path(inspect.getsourcefile(thing) or "")
    return f"{path.relative_to(ROOT.parent)}:{inspect.getsourcelines(thing)[1]}: {name}"


def documented_defaults(doc: str) -> dict[str, str]:
    """Return the arguments of a google-style docstring, each with the text after its last "Default: "."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n|\n)+)", doc, re.MULTILINE)
    if not section:
        return {}
    defaults = {}
    for entry in re.split(r"\n(?=    \w)", section.group(1).rstrip()):
        name, _, text = entry.strip().partition(":")
        said = re.findall(r"Default: (.+?)\.?$", " ".join(text.split()))
        defaults[name] = said[-1].split(", which")[0] if said else ""
    return defaults


def wrong_defaults(thing: Callable[..., Any]) -> Iterator[str]:
    """Yield the errors of a docstring about the arguments of a class or a function."""
    documented = documented_defaults(inspect.getdoc(thing) or "")
    for argument in inspect.signature(thing).parameters.values():
        if argument.name not in documented:
            continue
        said = documented[argument.name]
        if argument.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            yield f"{argument.name} stands for any number of arguments"
        elif argument.default is inspect.Parameter.empty:
            if said:
                yield f"{argument.name} has no default"
        elif not said:
            yield f"the default of {argument.name} is not documented"
        elif ast.literal_eval(said) != argument.default:
            yield f"the default of {argument.name} is {argument.default!r}, not {said}"


def test_documented_defaults_are_those_of_the_signature() -> None:
    # An exception without a constructor has no signature.
    signed = [(name, thing) for name, thing in public() if not (inspect.isclass(thing) and issubclass(thing, Warning))]
    none_of([f"{place(name, thing)}: {wrong}" for name, thing in signed for wrong in wrong_defaults(thing)])


FIRST = {bighorn.Lamb: "(0.9, 0.999)", bighorn.Came: "(0.9, 0.999, 0.9999)", bighorn.Lars: "0.9"}
"""The default of betas or of momentum."""


@pytest.mark.parametrize("kind", FIRST)
def test_every_argument_of_an_optimizer_is_documented(kind: type[KernelOptimizer]) -> None:
    documented = documented_defaults(inspect.getdoc(kind) or "")
    signature = inspect.signature(kind).parameters.values()
    assert set(documented) == {a.name for a in signature if a.kind is not inspect.Parameter.VAR_KEYWORD}
    assert documented.get("betas", documented.get("momentum")) == FIRST[kind]


@pytest.mark.parametrize("kind", FIRST)
def test_the_arguments_of_an_optimizer_are_the_options_of_its_tables(kind: type[KernelOptimizer]) -> None:
    arguments = set(inspect.signature(kind).parameters) - {"params", "unknown"}
    algorithm, whole = kind.algorithm, table(Settings)
    of_groups = set(algorithm.options) - set(algorithm.group_only)
    assert arguments - of_groups <= set(whole)
    assert of_groups <= arguments
    assert set(whole) - arguments <= {"exclude_from_layer_adaptation"}
    assert algorithm.group_only.keys() <= algorithm.options.keys()


# A list of files, since the C library in the folder of an installed package looks importable.
MODULES = {module_of(path) for path in FILES if path.stem != "__main__"}
OF_TRAINERS = sorted(name for name in MODULES if re.match(r"bighorn\.integrations\.(?!_|diffusion)", name))


def failed_examples(modules: Iterable[str]) -> list[str]:
    """Return the failures of the examples in docstrings, with files and lines."""
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in modules:
        for test in doctest.DocTestFinder().find(importlib.import_module(name)):
            runner.run(test, out=report.append)
    return report


def test_examples_in_docstrings_run() -> None:
    none_of(failed_examples(sorted(MODULES - set(OF_TRAINERS))))


@pytest.mark.parametrize("name", OF_TRAINERS)
def test_examples_of_trainers_run(name: str) -> None:
    pytest.importorskip(name.rpartition(".")[2], reason="make integrations")
    none_of(failed_examples([name]))


@pytest.mark.parametrize("kind", FIRST)
def test_there_are_examples(kind: type) -> None:
    finder = doctest.DocTestFinder()
    assert sum(len(test.examples) for test in finder.find(kind, "kind")) > 0


OF_ALGORITHMS = re.compile(
    r"_optim/(lamb|came|lars|layerwise|presets|checkpoint_formats)|_foreign_options|_kernels/options|_kernels/\w+/(lamb|came|lars|layer)|"
    r"_kernels/triton/columns|_kernels/\w+/__init__|compat/|integrations/|_arguments|__init__|__main__|_backend_status|"
    r"_distributed/megatron_map|_kernels/triton/trial"
)
"""The files that may name an algorithm: its own, tables of other packages' options, public names, trials of a
backend, and Megatron's map."""

NAMES_OF_ALGORITHMS = re.compile(r"exp_avg|(?<![a-z])(lamb(?!da)|came|lars)(?![a-z])", re.IGNORECASE)


def naming_algorithms(path: Path) -> Iterator[Offence]:
    """Yield names, attributes and strings without spaces that have the name of an algorithm or of its state."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                pass
            case ast.ClassDef(name=name) | ast.alias(name=name):
                pass
            case ast.Constant(value=str() as name) if not re.search(r"\s", name):
                pass
            case _:
                continue
        if NAMES_OF_ALGORITHMS.search(name):
            yield getattr(node, "lineno", 1), f"names {name}"


def test_generic_files_name_no_algorithm() -> None:
    """What they need of an algorithm is a declaration of `Algorithm` or `KernelOptions`."""
    none_of(
        offenders(naming_algorithms, [path for path in FILES if not OF_ALGORITHMS.match(str(path.relative_to(ROOT)))])
    )


def test_the_rule_of_names_sees_them(tmp_path: Path) -> None:
    planted = tmp_path / "bighorn" / "planted.py"
    planted.parent.mkdir()
    (planted.parent / "__init__.py").touch()
    planted.write_text(
        "from bighorn._optim.lamb import Lamb\n\n\ndef of(state):\n    return state['exp_avg'], lambda: state\n"
    )
    assert offenders(naming_algorithms, [planted]) == [
        "bighorn/planted.py:1: names Lamb",
        "bighorn/planted.py:5: names exp_avg",
    ]
