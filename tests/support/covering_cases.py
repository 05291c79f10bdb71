"""A few cases that together have all traits of many: the default for interpreted kernels, which are slow."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping

import torch
from torch.nn import Parameter

from bighorn._optim.settings import OF_THE_WHOLE
from bighorn._optim.state import StateSpec
from tests.support.cases import Case

COMPILED = {
    "decay_mode": "ratio",
    "adam": False,
    "hyperball": False,
    "factor": "matrix",
}
"""Options that kernels are compiled for, and their defaults: every combination in the table is a separate kernel."""

OF_THE_PLAN = {"exclude_from_weight_decay", "exclude_from_layer_adaptation", "grad_centralization"}
"""Options that are not passed to kernels: the plan uses them to choose buckets, or to centre gradients."""

WORDS = (str, bool, torch.dtype)
"""Types of options whose values select code; other values are numbers, which kernels read at run time."""


def traits(case: Case, *, of_kernels: bool = False) -> set[tuple[object, ...]]:
    """Return properties that can fail independently: each option, kernel, parameter, and combination with a dtype.

    Args:
        case: The case.
        of_kernels: Whether to distinguish only what kernels do, not ways to name parameters. Default: False.
    """
    groups = [{**case.options, **group} for group in case.groups]
    has: set[tuple[object, ...]] = {
        (name, value if isinstance(value, WORDS) else type(value)) for group in groups for name, value in group.items()
    }
    if of_kernels:
        has = {trait[:1] if trait[0] in OF_THE_PLAN else trait for trait in has}
    centred = [None if of_kernels else group.get("grad_centralization", False) for group in groups]
    combined = [tuple(group.get(name, default) for name, default in COMPILED.items()) for group in groups]
    has |= {(*each, centring) for each, centring in zip(combined, centred, strict=True)}
    has |= {("groups", len(groups))}
    state_dtype, weight_rounding = (case.options.get(name) for name in ("state_dtype", "weight_rounding"))
    for leaf in case.leaves:
        dtype = leaf.dtype or case.dtype
        has |= {("leaf", leaf.name), ("gradient", dtype, case.gradient_dtype(leaf))}
        has |= {("state", dtype, state_dtype), ("weights", dtype, weight_rounding)}
    return {(case.kind.algorithm.name, *trait) for trait in has}


def state_traits(case: Case, *, details: bool = True) -> set[tuple[object, ...]]:
    """Return properties that saving, loading and copying can lose: options, groups, layouts and state.

    Args:
        case: The case.
        details: Whether to distinguish the values of options and the dtypes and dims of state tensors. Default: True.
    """
    has: set[tuple[object, ...]] = {("groups", len(case.groups)), ("scheduled", "lr" in case.options)}
    has |= {("layout", leaf.layout) for leaf in case.leaves} | {
        ("whole", name) for name in OF_THE_WHOLE & {*case.options}
    }
    for options in (case.options, *case.groups) if details else ():
        has |= {(name, value if isinstance(value, (str, bool)) else None) for name, value in options.items()}
    for param, spec in state_specs(case):
        has.add(("state", frozenset(spec)))
        if details:
            has.add(("dtypes", param.dtype, frozenset((name, each.dtype) for name, each in spec.items())))
            has |= {("dims", name, len(each.dims) - param.dim()) for name, each in spec.items()}
    return {(case.kind.algorithm.name, *trait) for trait in has}


@functools.cache
def state_specs(case: Case) -> list[tuple[Parameter, StateSpec]]:
    """Return each parameter of a case, on the meta device, with its state; an optimizer would take milliseconds."""
    leaves = [torch.empty(leaf.shape, dtype=leaf.dtype or case.dtype, device="meta") for leaf in case.leaves]
    optimizer = case.optimizer([Parameter(leaf) for leaf in leaves], "auto")
    groups = optimizer.param_groups
    return [(param, optimizer.algorithm.state_spec(group, param)) for group in groups for param in group["params"]]


def cost(case: Case) -> float:
    """Return the approximate time in seconds; even a short row of a launch takes time."""
    options = {**case.options, **case.groups[0]}
    stacked, matrices = bool(options.get("stacked")), options.get("factor") == "last_two"
    rows = sum(
        math.prod(leaf.shape[:-2]) if matrices else leaf.shape[0] if stacked else 1
        for leaf in case.leaves
        if leaf.shape
    )
    centred = 2 if options.get("grad_centralization") else 1
    blocks = 10 if options.get("state_dtype") in ("int4", "int8") else 1
    return centred * blocks * (0.04 * rows + 1e-5 * case.size)


def covering_states(cases: Iterable[Case], *, details: bool = True) -> list[Case]:
    """Return cases that together have every trait of `state_traits`."""
    cases = list(cases)
    chosen = fewest({case.id: (state_traits(case, details=details), cost(case)) for case in cases})
    return [case for case in cases if case.id in chosen]


def covering(cases: Iterable[Case], *, of_kernels: bool = False) -> set[str]:
    """Return the ids of cases that together have every trait of all."""
    return fewest({case.id: (traits(case, of_kernels=of_kernels), cost(case)) for case in cases})


def covering_pairs(cases: Iterable[Case]) -> set[str]:
    """Return the ids of cases that together have every trait of all, and each pair of options in a group."""
    return fewest({case.id: (traits(case) | pairs(case), cost(case)) for case in cases})


def pairs(case: Case) -> set[tuple[object, ...]]:
    """Return each pair of options in a group; dtypes of the case count as options, and numbers as one value."""
    has: set[tuple[object, ...]] = set()
    for group in ({**case.options, **group} for group in case.groups):
        values = sorted((name, str(v if isinstance(v, WORDS) else type(v))) for name, v in group.items())
        values += [("dtype", str(case.dtype)), ("gradient", str(case.grad_dtype))]
        has |= set(itertools.combinations(values, 2))
    return {(case.kind.algorithm.name, *pair) for pair in has}


def fewest(candidates: Mapping[str, tuple[set[tuple[object, ...]], float]]) -> set[str]:
    """Return the ids of candidates that together have every trait, chosen greedily by new traits per cost."""
    left = dict(candidates)
    missing: set[tuple[object, ...]] = set().union(*(has for has, _ in left.values()))
    chosen: set[str] = set()
    while missing:
        best = max(left, key=lambda id_: len(left[id_][0] & missing) / left[id_][1])
        missing -= left.pop(best)[0]
        chosen.add(best)
    return chosen
