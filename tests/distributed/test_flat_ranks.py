"""Flat tensors with fragments of parameters, on several ranks."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, FlatLayout, Fragment, Lamb
from tests.support.case_tensors import ordinal
from tests.support.cases import Kind, Optimizer
from tests.support.flat_runs import (
    LAYOUTS,
    PADDING,
    RUNS,
    Flat,
    Layout,
    Pairs,
    advance,
    flattened,
    grouped,
    last_rank_empty,
    refused,
    whole_rows,
    zero,
)
from tests.support.ranks import ranks
from tests.support.sharded_runs import SHAPES, Bag, Run, assert_close, cost, void
from tests.support.tables import for_every


def some_world(layout: str, name: str) -> int:
    """Return 2 for half of the runs on each layout, and 4 for the other half."""
    return 2 + 2 * ((list(LAYOUTS).index(layout) + list(RUNS).index(name)) % 2)


def other_world(layout: str, name: str) -> int:
    return 6 - some_world(layout, name)


ROWS = [(layout, name) for layout, name in itertools.product(LAYOUTS, RUNS) if layout not in RUNS[name].not_on]


@pytest.mark.parametrize(("layout", "name"), ROWS)
@ranks(some_world)
def test_equals_the_whole_run(layout: str, name: str) -> None:
    equals_the_whole_run(LAYOUTS[layout], RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), ROWS)
@ranks(other_world)
def test_equals_the_whole_run_on_other_ranks(layout: str, name: str) -> None:
    equals_the_whole_run(LAYOUTS[layout], RUNS[name])


def equals_the_whole_run(layout: Layout, run: Run) -> None:
    """Parameters, state and telemetry equal a run with whole parameters; padding does not change."""
    bag = Bag(SHAPES, run.dtype)
    flats, ours = flattened(bag, layout, run)
    theirs = run.optimizer(bag)
    errors: list[str] = []
    for step in range(run.steps):
        advance(bag, flats, (theirs, ours), range(step, step + 1), run)
        if run.options.get("state_dtype") in (torch.float16, torch.bfloat16):
            for flat, named in zip(flats, grouped(bag), strict=True):
                errors += follow_ties(flat, ours, dict(named), theirs)
    assert not errors, errors  # after the last collective: no other rank waits for this one
    for flat, named in zip(flats, grouped(bag), strict=True):
        whole = dict(named)
        for name, part in flat.parts(flat.tensors).items():
            assert_close(part, flat.cut(name, whole[name]), run.tolerance, name)
        for tensor in flat.tensors:
            assert tensor.detach()[-PADDING:].eq(7).all()
        if run.compares_state:
            state_equals(flat, ours, {name: theirs.state[p] for name, p in named}, run)
        taken = run.steps - bool(run.options.get("skip_nonfinite"))
        assert all(ours.state[tensor]["step"] == taken for tensor in flat.tensors if ours.state[tensor])
    told, expected = vars(ours.telemetry()), vars(theirs.telemetry())
    order = [told["names"].index(name) for name in expected["names"]]
    assert len(order) == len(told["names"])
    assert order == sorted(order) or layout in (last_rank_empty, whole_rows)
    assert told["skipped"] == expected["skipped"]
    for field in expected.keys() - {"names", "skipped"}:
        assert_close(told[field][order], expected[field], max(run.tolerance, 1e-6), field)


def follow_ties(flat: Flat, ours: Optimizer, whole: Mapping[str, Tensor], theirs: Optimizer) -> list[str]:
    """Copy the whole run's elements where a few averages were rounded to the other 16-bit neighbour; return errors.

    Sums over a parameter have other last bits if they are added up in parts, which decides near a tie.
    """
    errors = []
    held = [(own, ours.state[tensor]["exp_avg"]) for own, tensor in zip(flat.held, flat.tensors, strict=True) if own]
    averages = Flat([own for own, _ in held], []).parts([exp_avg for _, exp_avg in held])
    elements = flat.parts(flat.tensors)
    for name, exp_avg in averages.items():
        expected = flat.cut(name, theirs.state[whole[name]]["exp_avg"])
        away = (ordinal(exp_avg) - ordinal(expected)).abs()
        tied = away > 0
        if away.max() > 1 or tied.sum() > 1 + tied.numel() // 500:
            errors.append(f"exp_avg of {name}: {tied.sum()} of {tied.numel()} differ, by at most {away.max()} ulps")
        x, exact = elements[name], flat.cut(name, whole[name])
        error = float((x - exact).abs().max() / exact.abs().max())
        if error > torch.finfo(exp_avg.dtype).eps:  # with a learning rate of 0.1, a neighbour moves x by less
            errors.append(f"{name}: {error:.1e}")
        exp_avg[tied], x[tied] = expected[tied], exact[tied]
    return errors


def state_equals(flat: Flat, ours: Optimizer, wholes: Mapping[str, Mapping[str, Tensor]], run: Run) -> None:
    """The state of flat tensors has the elements of whole parameters' state, or averages of rows that they touch."""
    shared = set.intersection(*(set(state) for state in wholes.values()))
    everywhere = {key for key in shared - {"step"} if all(s[key].dim() == s["exp_avg"].dim() for s in wholes.values())}
    for i, (tensor, own) in enumerate(zip(flat.tensors, flat.held, strict=True)):
        state = ours.state[tensor]
        assert {"step", "exp_avg"} <= state.keys() or not own
        for key in state.keys() - {"step"}:
            if key in everywhere:
                assert state[key].shape == tensor.shape
                for name, part in Flat([own], []).parts([state[key]]).items():
                    assert_close(part, flat.cut(name, wholes[name][key]), 10 * run.tolerance, f"{key} of {name}")
            else:
                expected = flat.averages(key, wholes, run.options.get("factor", "matrix"))[i]
                assert_close(state[key], expected, 10 * run.tolerance, f"{key} of tensor {i}")


def mark_as_deepspeed(named: Pairs, flat: Flat) -> None:
    """Write the attributes of DeepSpeed's ZeRO into the parameters of a group that one flat tensor replaces."""
    [tensor], [fragments] = flat.tensors, flat.held
    held = {each.name: each for each in fragments}
    for name, param in named:
        mapping = None
        if each := held.get(name):
            mapping = SimpleNamespace(
                hp_fragment_address=SimpleNamespace(start=each.start, numel=each.numel),
                lp_fragment_address=SimpleNamespace(start=each.offset, numel=each.numel),
                hp_fragment=tensor.detach()[each.start : each.start + each.numel],
            )
        vars(param).update(_dp_group=dist.group.WORLD, _hp_mapping=mapping)


@for_every("name", ["lamb", "came"])
@ranks(2, 4)
def test_deepspeed_replaces_the_parameters_of_groups(name: str) -> None:
    """As ZeRO does, without DeepSpeed; test_deepspeed_zero.py has its own engine."""
    run = RUNS[name]
    bag = Bag(SHAPES, run.dtype)
    replaced = copy.deepcopy(bag)
    theirs, ours = run.optimizer(bag), run.optimizer(replaced)
    flats = []
    for named, group in zip(grouped(replaced), ours.param_groups, strict=True):
        flats.append(Flat.of(named, zero))
        mark_as_deepspeed(named, flats[-1])
        group["params"] = flats[-1].tensors
    advance(bag, flats, (theirs, ours), range(3), run)
    for flat, named in zip(flats, grouped(bag), strict=True):
        whole = dict(named)
        for key, part in flat.parts(flat.tensors).items():
            assert_close(part, flat.cut(key, whole[key]), run.tolerance, key)


@for_every("layout", LAYOUTS)
@ranks(2, 4)
def test_collectives(layout: str) -> None:
    """A step takes one collective for all groups, with two numbers for each parameter, and one more for a clip."""
    for options, count, more in (({}, 1, 0), ({"max_grad_norm": 1.0}, 2, 8), ({"cautious": True}, 2, 8 * len(SHAPES))):
        run = Run(Lamb, options)
        bag = Bag(SHAPES, run.dtype)
        flats, optimizer = flattened(bag, LAYOUTS[layout], run)
        advance(bag, flats, (optimizer,), range(1), run)
        assert cost(optimizer) == (count, 16 * len(SHAPES) + more), (options, cost(optimizer))


@for_every("layout", LAYOUTS)
@ranks(2, 4)
def test_collectives_of_came(layout: str) -> None:
    """A step takes two collectives for all groups, or three if ranks hold parts of a parameter's rows."""
    shapes = {"matrix": (9, 7), "conv": (14, 3, 2), "bias": (5,)}
    for backend, dtype in (("reference", torch.float64), ("auto", torch.float32)):
        run = Run(Came, dtype=dtype, backend=backend)
        bag = Bag(shapes, run.dtype)
        flats, optimizer = flattened(bag, LAYOUTS[layout], run)
        advance(bag, flats, (optimizer,), range(1), run)
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, [each for flat in flats for own in flat.held for each in own])
        cut = {each.name for own in held for each in own if each.numel % each.shape[-1] * (len(each.shape) - 1)}
        cut |= {each.name for own in held for each in own if len(each.shape) == 3 and each.numel % 6}
        numbers = {
            name: 2 * (rows + columns) + 2 if name in cut else 3 * columns + 4
            for name, rows, columns in (("matrix", 9, 7), ("conv", 14, 6))
        }
        count, size = cost(optimizer)
        assert count == (3 if cut else 2), (backend, count)
        assert backend == "auto" or size == 8 * (sum(numbers.values()) + 2), (numbers, size)
        assert bool(cut) == (layout in ("zero", "tensor-each"))


@for_every(("layout", "kind"), itertools.product(LAYOUTS, (Lamb, Came)))
@ranks(2, 4)
def test_resumes(layout: str, kind: Kind) -> None:
    """A loaded run and a copy continue bit for bit."""
    run = Run(kind, {"max_grad_norm": 0.5})
    bag = Bag(SHAPES, run.dtype)
    flats, optimizer = flattened(bag, LAYOUTS[layout], run)
    advance(bag, flats, (optimizer,), range(2), run)
    saved = copy.deepcopy(optimizer.state_dict())
    assert "flat_layout" not in saved["param_groups"][0]
    values = [tensor.detach().clone() for flat in flats for tensor in flat.tensors]
    again, other = flattened(bag, LAYOUTS[layout], run)
    other.load_state_dict(saved)
    tensors = [tensor for flat in again for tensor in flat.tensors]
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    copied, third = copy.deepcopy((again, other))
    advance(bag, [*flats, *again, *copied], (optimizer, other, third), range(2, 4), run)
    for flat, *rest in zip(flats, again, copied, strict=True):
        for its in rest:
            assert all(p.equal(q) for p, q in zip(flat.tensors, its.tensors, strict=True))
    moved = [not p.equal(q) for p, q in zip(tensors, values, strict=True)]
    assert moved == [any(own) for flat in again for own in flat.held]


@ranks(2, 4)
def test_bad_layouts() -> None:
    """Every rank raises the same error for an argument of one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def lamb(own: Sequence[Fragment], size: int = 12, dtype: torch.dtype = torch.float32, **more: Any) -> Lamb:
        flat = Parameter(torch.ones(size, dtype=dtype))
        return Lamb([{"params": [flat], "flat_layout": FlatLayout([own]), **more}], lr=0.1)

    def part(numel: int = 2, start: int = 0, offset: int | None = None, **other: Any) -> Fragment:
        """Return a fragment of w with one of its two elements on each rank."""
        given = {"name": "w", "shape": (world, 2), **other}
        return Fragment(**given, numel=numel, start=start, offset=2 * rank if offset is None else offset)

    lamb([part()])
    last = rank == world - 1
    what, on_last = "param_groups[0] cannot be optimized as flat tensors", f"rank {world - 1}"
    mistyped: list[dict[str, Any]] = [{"numel": 2.0}, {"start": "0"}, {"offset": None}, {"shape": 4}, {"name": 3}]
    bad: list[tuple[Any, ...]] = [
        ([part(numel=3 if last else 2)], f"on {on_last}", f"ends at element {2 * world + 1} of a parameter that has"),
        ([part(start=11 if last else 0)], f"on {on_last}", "ends beyond params[0], which has 12 elements"),
        ([part(), *[part(name="v", start=1)] * last], f"on {on_last}", "overlaps", "'w'", "belongs to one parameter"),
        ([part(offset=0 if last else 2 * rank)], on_last, "which another rank holds as well"),
        ([] if last else [part()], f"no rank holds elements {2 * world - 2} to {2 * world - 1} of w"),
        ([] if rank == 0 else [part()], "no rank holds elements 0 to 1 of w"),
        ([part(shape=(2, world, 1) if last else (world, 2))], "shape of the whole parameter", on_last),
        ([part(), *[part(start=2, numel=0)] * last], f"{on_last} has 2 fragments of w"),
        ([part(start=-1 if last else 0)], "must be at least 0"),
        *[
            ([replace(part(), **wrong) if last else part()], f"on {on_last}", *map(repr, wrong.values()), "integers")
            for wrong in mistyped
        ],
        ([("w", (world, 2), 2) if last else part()], f"on {on_last}", "no bighorn.Fragment"),
    ]
    for mine, *texts in bad:
        refused(partial(lamb, mine), what, *texts)
    refused(lambda: lamb(part() if last else [part()]), f"on {on_last}", "list of Fragments for each flat tensor")  # type: ignore[arg-type]
    lamb([part(), part(name="none", shape=(0,), numel=0, offset=0)])  # an empty fragment at the start of the other
    refused(lambda: lamb([part()], dtype=torch.float64 if last else torch.float32), "torch.float64", on_last)
    refused(lambda: lamb([part()], stacked=True), "stacked")
    refused(lambda: lamb([part()], grad_centralization=True), "grad_centralization=True", "rows")
    refused(lambda: lamb([part()], state_dtype="int8"), 'state_dtype="int8"', "rows")


@ranks(2, 4)
def test_cut_rows() -> None:
    """Plain torch steps fragments that begin or end inside a row, as explain() reports; named backends refuse them."""
    bag = Bag({"matrix": (9, 7)}, torch.float32)
    named = list(bag.named_parameters())

    def optimizer(backend: str) -> Came:
        flat = Flat.of(named, zero)
        return Came([{"params": flat.tensors, "flat_layout": FlatLayout(flat.held)}], lr=0.1, backend=backend)

    assert "foreach" in optimizer("auto").explain()
    assert "not cpu: ranks hold parts of its rows" in optimizer("auto").explain()
    cpu = optimizer("cpu")
    for tensor in cpu.param_groups[0]["params"]:
        tensor.grad = torch.ones_like(tensor)
    refused(cpu.step, 'matrix: backend="cpu" cannot serve this tensor: ranks hold parts of its rows', 'backend="auto"')
    assert not cpu.state


@ranks(2, 4)
def test_bad_steps() -> None:
    """A step without a gradient, or of a part of the parameters, is refused before any collective."""
    run = Run(Lamb)
    bag = Bag(SHAPES, run.dtype)
    flats, optimizer = flattened(bag, zero, run)
    refused(optimizer.step, "param_groups[0].params[0] is a flat tensor without a gradient")
    advance(bag, flats, (optimizer,), range(1), run)
    refused(lambda: optimizer.step_in_parts([[*flats[0].tensors]], void), "taken in parts")
    refused(lambda: optimizer.step_param(flats[0].tensors[0]), "ahead of the others")
    others, other = flattened(bag, zero, Run(Lamb, {"eps": 1e-3} if dist.get_rank() else {}))
    with pytest.raises(ValueError, match=r"(?s)first difference.*eps=1e-06.*rank 1 has param_groups\[0\]: eps=0\.001"):
        advance(bag, others, (other,), range(1), run)


@ranks(4)
def test_some_ranks() -> None:
    """Each half of the ranks holds a model."""
    half = dist.get_world_size() // 2
    halves = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
    which, place = divmod(dist.get_rank(), half)
    weight = torch.arange(12.0, dtype=torch.float64).view(3, 4) + which
    alone, flat = Parameter(weight.clone()), Parameter(weight.flatten()[place * 6 : place * 6 + 6].clone())
    layout = FlatLayout([[Fragment("w", (3, 4), 6, offset=place * 6)]], halves[which])
    ours, theirs = Lamb([{"params": [flat], "flat_layout": layout}], lr=0.1), Lamb([("w", alone)], lr=0.1)
    flat.grad, alone.grad = torch.ones_like(flat), torch.ones_like(alone)
    ours.step()
    theirs.step()
    assert_close(flat, alone.flatten()[place * 6 : place * 6 + 6], 1e-12, "w")
    with pytest.raises(TypeError, match=r"(?s)process_group.*state_dict"):
        pickle.dumps(ours)
