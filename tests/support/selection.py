"""Selection of collected tests: one skip for each missing requirement, and a pairwise cover of parameters."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from bighorn import _kernels as kernels
from tests.support.covering_cases import fewest


def why_not(backend: str) -> str | None:
    """Return why tests cannot run on a backend on this machine, or None."""
    status = kernels.status().get(backend)
    if status is None or not status.available:
        return f"backend {backend}: {status.detail if status else 'unknown to kernels.status()'}"
    if status.device != "cpu":
        return f"backend {backend} serves {status.device}: tests/gpu runs it there"
    return None


def one_skip_a_module(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one of the tests in a module that lack the same requirement, such as a GPU; its skip has the reason."""
    said, left_out = set(), []
    for item in items:
        lacks = lacking(item)
        if lacks is None:
            continue
        if (item.path, lacks) in said:
            left_out.append(item)
        said.add((item.path, lacks))
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)


def lacking(item: pytest.Item) -> str | None:
    """Return the missing requirement of a test, or None."""
    for mark in item.iter_markers("skipif"):
        if mark.args and mark.args[0] is True:
            return str(mark.kwargs.get("reason"))
    backend = parameters(item).get("backend")
    # A library of other sources is a failure, not a skip: the fixture `backend` fails.
    return backend if backend in OPTIONAL and why_not(backend) else None


OPTIONAL = set(kernels.status()) - {"reference", "foreach", "cpu"}


def parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def mark_beyond_pairs(items: list[pytest.Item]) -> dict[str, int]:
    """Mark as slow all but a pairwise cover of the values of a test's parameters; return how many of each test.

    Most faults depend on the values of one or two parameters.
    """
    slow: dict[str, int] = defaultdict(int)
    tests: dict[tuple[object, str], dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if len(parameters(item)) > 2 and not item.get_closest_marker("slow"):
            tests[item.path, item.nodeid.split("[", 1)[0]][item.nodeid] = item
    for product in tests.values():
        kept = fewest({name: (pairs(item), 1.0) for name, item in product.items()})
        for name, item in product.items():
            if name not in kept:
                item.add_marker("slow")
                slow[name.split("[", 1)[0]] += 1
    return slow


def pairs(item: pytest.Item) -> set[tuple[object, ...]]:
    """Return each pair of parameter values of a test; a value without a name is identified by its address."""
    named = (str, int, float, type(None))
    values = (
        (name, repr(value) if isinstance(value, named) else id(value)) for name, value in parameters(item).items()
    )
    return set(itertools.combinations(sorted(values), 2))
