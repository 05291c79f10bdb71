"""Which of the collected tests a run has: what cannot run here says so once, and products of parameters are thinned."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from bighorn import kernels
from tests.support.covering_cases import fewest


def why_not(backend: str) -> str | None:
    """Return why tests cannot run on a backend here, or None."""
    status = kernels.status().get(backend)
    if status is None or not status.available:
        return f"backend {backend}: {status.detail if status else 'unknown to kernels.status()'}"
    if status.device != "cpu":
        return f"backend {backend} serves {status.device}: tests/gpu runs it there"
    return None


def one_skip_a_module(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests of a module that lack the same, such as a GPU, leave one, which says what it lacks."""
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
    """Return what a test needs that is not there, or None."""
    for mark in item.iter_markers("skipif"):
        if mark.args and mark.args[0] is True:
            return str(mark.kwargs.get("reason"))
    backend = parameters(item).get("backend")
    # A library of other sources is a failure, and everything says so.
    return backend if backend in OPTIONAL and why_not(backend) else None


OPTIONAL = set(kernels.status()) - {"reference", "foreach", "cpu"}


def parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def mark_beyond_pairs(items: list[pytest.Item]) -> None:
    """Mark as slow what a test adds after each two values of its parameters have met.

    A fault shows with one value of one parameter, or with one of each of two, more often than only where three meet.
    """
    tests: dict[tuple[object, str], dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if len(parameters(item)) > 2 and not item.get_closest_marker("slow"):
            tests[item.path, item.nodeid.split("[", 1)[0]][item.nodeid] = item
    for product in tests.values():
        kept = fewest({name: (pairs(item), 1.0) for name, item in product.items()})
        for name, item in product.items():
            if name not in kept:
                item.add_marker("slow")


def pairs(item: pytest.Item) -> set[tuple[object, ...]]:
    """Return each two of the parameters of a test; a value that has no name is known by its address."""
    named = (str, int, float, type(None))
    values = (
        (name, repr(value) if isinstance(value, named) else id(value)) for name, value in parameters(item).items()
    )
    return set(itertools.combinations(sorted(values), 2))
