"""The scenarios of test_flat.py, run on each rank: `python flat_worker.py RANK WORLD FOLDER`."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, FlatLayout, Fragment, Lamb, Lars
from tests.support.case_tensors import ordinal
from tests.support.cases import KINDS, Optimizer
from tests.support.processes import run_as_rank
from tests.support.sharded_runs import (
    ALONE,
    BITWISE,
    SHAPES,
    Bag,
    Run,
    assert_close,
    cost,
    gradients,
    not_matrices,
    void,
)

PADDING = 5
"""The elements after the last parameter of a buffer."""

Pairs = Sequence[tuple[str, Tensor]]
Held = Sequence[Sequence[Fragment]]
Layout = Callable[[Pairs], Held]
"""The fragments of each flat tensor that this rank has of a group."""


def zero(named: Pairs) -> Held:
    """Return the fragments of DeepSpeed's ZeRO: ranks have equal parts of one buffer of parameters and padding."""
    ends = list(accumulate(p.numel() for _, p in named))
    each = -(-(ends[-1] + PADDING) // dist.get_world_size())
    here = range(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    found = []
    for (name, p), end in zip(named, ends, strict=True):
        first, last = max(end - p.numel(), here.start), min(end, here.stop)
        if first < last:
            offset = first - (end - p.numel())
            found.append(Fragment(name, tuple(p.shape), last - first, start=first - here.start, offset=offset))
    return [found]


def tensor_each(named: Pairs) -> Held:
    """Return the fragments of ZeRO, each in a tensor of its own, of which ranks have different numbers."""
    return [[Fragment(each.name, each.shape, each.numel, 0, each.offset)] for each in zero(named)[0]] or [[]]


def last_rank_empty(named: Pairs) -> Held:
    """Return whole parameters in turn, of which the last rank has none."""
    found, start = [], 0
    for i, (name, p) in enumerate(named):
        if i % (dist.get_world_size() - 1) == dist.get_rank():
            found.append(Fragment(name, tuple(p.shape), p.numel(), start))
            start += p.numel()
    return [found]


def whole_rows(named: Pairs) -> Held:
    """Return rows of each parameter, of which some ranks have none."""
    found, start, rank, world = [], 0, dist.get_rank(), dist.get_world_size()
    for name, p in named:
        row = p[0].numel()
        first, last = (len(p) * each // world * row for each in (rank, rank + 1))
        if first < last:
            found.append(Fragment(name, tuple(p.shape), last - first, start, first))
            start += last - first
    return [found]


LAYOUTS: Mapping[str, Layout] = {
    "zero": zero,
    "tensor-each": tensor_each,
    "last-rank-empty": last_rank_empty,
    "whole-rows": whole_rows,
}


@dataclass
class Flat:
    """The flat tensors of a group on this rank."""

    held: Held
    tensors: list[Parameter]

    @classmethod
    def of(cls, named: Pairs, layout: Layout, fill: float = 7.0) -> Flat:
        """Return flat tensors with the parameters' values, and padding."""
        held = layout(named)
        ends = [max([each.start + each.numel for each in own], default=0) + PADDING for own in held]
        flat = cls(held, [Parameter(torch.full((end,), fill, dtype=named[0][1].dtype)) for end in ends])
        flat.copy_in({name: p.detach() for name, p in named}, [p.detach() for p in flat.tensors])
        return flat

    def copy_in(self, values: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy whole tensors to the fragments."""
        for own, tensor in zip(self.held, tensors, strict=True):
            for each in own:
                whole = values[each.name].flatten()
                tensor[each.start : each.start + each.numel] = whole[each.offset : each.offset + each.numel]

    def parts(self, tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Return the fragments by name."""
        return {
            each.name: tensor.detach()[each.start : each.start + each.numel]
            for own, tensor in zip(self.held, tensors, strict=True)
            for each in own
        }

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's elements of a whole tensor."""
        each = next(each for own in self.held for each in own if each.name == name)
        return whole.detach().flatten()[each.offset : each.offset + each.numel]

    def averages(self, key: str, wholes: Mapping[str, Mapping[str, Tensor]], factor: str) -> list[Tensor]:
        """Return for each flat tensor the state of its fragments, of that of whole parameters, one after another."""
        found = []
        for own in self.held:
            parts = [torch.empty(0, dtype=torch.float64)]
            for each in own if own else ():
                if (whole := wholes[each.name].get(key)) is None:
                    continue
                row, by_rows = (
                    math.prod(each.shape[1:]),
                    key.endswith("row") or (factor == "last_two" and len(each.shape) > 2),
                )
                if not key.endswith(("row", "col")):
                    parts.append(self.cut(each.name, whole))
                elif by_rows:
                    parts.append(whole[each.offset // row : -(-(each.offset + each.numel) // row)].flatten())
                else:
                    parts.append(whole.flatten())
            found.append(torch.cat(parts))
        return found


def grouped(bag: Bag) -> list[Pairs]:
    """Return the parameters of 2 dims or more, and the others, as `Run.optimizer` groups them."""
    named = list(bag.named_parameters())
    return [[pair for pair in named if pair[1].dim() >= 2], [pair for pair in named if pair[1].dim() < 2]]


def flattened(bag: Bag, layout: Layout, run: Run, **more: Any) -> tuple[list[Flat], Optimizer]:
    """Return the flat tensors of a model on this rank, and their optimizer."""
    flats = [Flat.of(named, layout) for named in grouped(bag)]
    options = {"lr": 0.1, "weight_decay": 0.1, "backend": run.backend, **run.options, **more}
    groups = [{"params": flat.tensors, "flat_layout": FlatLayout(flat.held)} for flat in flats]
    return flats, run.kind([{**groups[0], **run.group}, groups[1]], **options)


def advance(bag: Bag, flats: Sequence[Flat], optimizers: Sequence[Optimizer], steps: range, run: Run) -> None:
    """Step a whole model, and its flat tensors, with the same gradients."""
    for step in steps:
        grads = dict(zip(dict(bag.named_parameters()), gradients(bag, step, run.dtype), strict=True))
        for name, p in bag.named_parameters():
            p.grad = grads[name]
        for flat in flats:
            for tensor in flat.tensors:
                tensor.grad = torch.full_like(tensor, 3.0)  # also in the padding
            flat.copy_in(grads, [tensor.grad for tensor in flat.tensors if tensor.grad is not None])
        for optimizer in optimizers:
            optimizer.step()


RUNS: Mapping[str, Run] = {
    "lamb": Run(Lamb, steps=10, compares_state=True),
    "clip": Run(
        Lamb,
        {
            "max_grad_norm": 0.5,
            "skip_nonfinite": True,
            "second_moment": "amsgrad",
            "exclude_from_weight_decay": ["bias", "few$"],
            "exclude_from_layer_adaptation": not_matrices,
        },
        {"weight_decay": 0.01, "lr": 0.05},
        steps=5,
        compares_state=True,
    ),
    "cautious": Run(Lamb, {"cautious": True, "decay_mode": "l2"}),
    "decoupled": Run(Lamb, {"decay_mode": "decoupled", "bias_correction": "lr", "trust_ratio_bounds": (0.0, 1.0)}),
    "foreach": Run(Lamb, {"max_grad_norm": 0.5}, backend="foreach"),
    "cpu": Run(
        Lamb, {"max_grad_norm": 0.5}, dtype=torch.float32, backend="cpu", tolerance=1e-5, steps=5, compares_state=True
    ),
    "cpu-bfloat16-state": Run(
        Lamb, {"state_dtype": torch.bfloat16}, dtype=torch.float32, backend="cpu", tolerance=1e-5
    ),
    "lars": Run(Lars, {"trust_coefficient": 0.3, "max_grad_norm": 0.5, "denominator": "joint"}, compares_state=True),
    "lars-cpu": Run(
        Lars, {"trust_coefficient": 0.3, "nesterov": True}, dtype=torch.float32, backend="cpu", tolerance=1e-5
    ),
    "came": Run(Came, steps=10, compares_state=True),
    "came-everything": Run(
        Came,
        {"scale_parameter": True, "bias_correction": True, "decay_rate": 0.8, "factor": "last_two"},
        {"weight_decay": 0.01, "lr": 0.05},
        compares_state=True,
    ),
    "came-clip": Run(
        Came,
        {"max_grad_norm": 0.5, "skip_nonfinite": True, "exclude_from_weight_decay": ["bias", "even"], "maximize": True},
    ),
    "came-foreach": Run(Came, {"eps": (1e-3, 1e-3)}, backend="foreach", compares_state=True),
    "came-auto": Run(
        Came,
        {"eps": (1e-3, 1e-3), "scale_parameter": True, "max_grad_norm": 1.0},
        dtype=torch.float32,
        backend="auto",
        tolerance=1e-5,
        compares_state=True,
    ),
    "came-auto-last-two": Run(
        Came,
        {"eps": (1e-3, 1e-3), "factor": "last_two", "state_dtype": torch.bfloat16},
        dtype=torch.float32,
        backend="auto",
        tolerance=2e-5,
    ),
    "came-auto-float16": Run(
        Came, {"eps": (1e-3, 1e-3), "state_dtype": torch.float16}, dtype=torch.float32, backend="auto", tolerance=2e-5
    ),
    "came-cpu": Run(
        Came,
        {"eps": (1e-3, 1e-3)},
        dtype=torch.float32,
        backend="cpu",
        tolerance=1e-5,
        compares_state=True,
        not_on=("zero", "tensor-each"),
    ),
    # Without a clip hardly any sum matters: rows are whole.
    "came-cpu-stochastic": Run(
        Came,
        {"eps": (1e-3, 1e-3), "clip_threshold": 1e3, "weight_rounding": "stochastic"},
        **BITWISE,
        not_on=("zero", "tensor-each"),
    ),
    # Without trust ratios no sums matter, so every bit is that of the whole run, random ones included.
    "cpu-stochastic": Run(Lamb, {"weight_rounding": "stochastic", **ALONE}, **BITWISE),
    "cpu-kahan": Run(Lamb, {"weight_rounding": "kahan", **ALONE}, **BITWISE),
    "reference-master": Run(Lamb, {"weight_rounding": "master", **ALONE}, **{**BITWISE, "backend": "reference"}),
}


def equals_the_whole_run(layout: Layout, run: Run) -> None:
    """Parameters, state and telemetry equal those of the run that holds everything; the padding does not change."""
    bag = Bag(SHAPES, run.dtype)
    flats, ours = flattened(bag, layout, run)
    theirs = run.optimizer(bag)
    errors: list[str] = []
    for step in range(run.steps):
        advance(bag, flats, (theirs, ours), range(step, step + 1), run)
        if run.options.get("state_dtype") in (torch.float16, torch.bfloat16):
            for flat, named in zip(flats, grouped(bag), strict=True):
                errors += follow_ties(flat, ours, dict(named), theirs)
    assert not errors, errors  # after the last collective, so that no other rank waits for this one
    for flat, named in zip(flats, grouped(bag), strict=True):
        whole = dict(named)
        for name, part in flat.parts(flat.tensors).items():
            assert_close(part, flat.cut(name, whole[name]), run.tolerance, name)
        for tensor in flat.tensors:
            assert tensor.detach()[-PADDING:].eq(7).all()
        if run.compares_state:
            state_equals(flat, ours, {name: theirs.state[p] for name, p in named}, run)
        assert all(ours.state[tensor]["step"] == run.steps for tensor in flat.tensors if ours.state[tensor])
    told, expected = vars(ours.telemetry()), vars(theirs.telemetry())
    order = [told["names"].index(name) for name in expected["names"]]
    assert len(order) == len(told["names"])
    assert order == sorted(order) or layout in (last_rank_empty, whole_rows)
    for field in expected.keys() - {"names", "skipped"}:
        assert_close(told[field][order], expected[field], max(run.tolerance, 1e-6), field)


def follow_ties(flat: Flat, ours: Optimizer, whole: Mapping[str, Tensor], theirs: Optimizer) -> list[str]:
    """Continue with the whole run's element where few averages were rounded to the 16-bit neighbour; return errors.

    The sums over a parameter have other last bits if they are added up in parts, which decides near a tie.
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
    """The state of flat tensors has the elements of that of whole parameters, or the averages that they touch."""
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


def collectives(layout: Layout) -> None:
    """A step needs one collective for all groups, with two numbers for each parameter, and one more for a clip."""
    for options, count, more in (({}, 1, 0), ({"max_grad_norm": 1.0}, 2, 8), ({"cautious": True}, 2, 8 * len(SHAPES))):
        run = Run(Lamb, options)
        bag = Bag(SHAPES, run.dtype)
        flats, optimizer = flattened(bag, layout, run)
        advance(bag, flats, (optimizer,), range(1), run)
        assert cost(optimizer) == (count, 16 * len(SHAPES) + more), (options, cost(optimizer))


def came_collectives(layout: Layout) -> None:
    """A step needs two collectives for all groups, or three if ranks hold parts of a parameter's rows."""
    shapes = {"matrix": (9, 7), "conv": (14, 3, 2), "bias": (5,)}
    for backend, dtype in (("reference", torch.float64), ("auto", torch.float32)):
        run = Run(Came, dtype=dtype, backend=backend)
        bag = Bag(shapes, run.dtype)
        flats, optimizer = flattened(bag, layout, run)
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
        assert bool(cut) == (layout in (zero, tensor_each))


def resumes(layout: Layout, run: Run) -> None:
    """A run that was saved and loaded continues bit for bit, and so does a copy."""
    bag = Bag(SHAPES, run.dtype)
    flats, optimizer = flattened(bag, layout, run)
    advance(bag, flats, (optimizer,), range(2), run)
    saved = copy.deepcopy(optimizer.state_dict())
    assert "flat_layout" not in saved["param_groups"][0]
    values = [tensor.detach().clone() for flat in flats for tensor in flat.tensors]
    again, other = flattened(bag, layout, run)
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


def skips_everywhere(layout: Layout, run: Run) -> None:
    """Where one rank's gradients overflow, no rank writes anything."""
    bag = Bag(SHAPES, run.dtype)
    flats, optimizer = flattened(bag, layout, run)
    advance(bag, flats, (optimizer,), range(1), run)
    before = [tensor.detach().clone() for flat in flats for tensor in flat.tensors]
    tensors = [tensor for flat in flats for tensor in flat.tensors]
    grad = tensors[0].grad
    assert grad is not None
    if dist.get_rank() == 0:
        grad[0] = torch.inf
    optimizer.step()
    assert all(p.equal(q) for p, q in zip(tensors, before, strict=True))
    assert optimizer.telemetry().skipped == 1
    grad[0] = 1.0
    optimizer.step()
    assert not all(p.equal(q) for p, q in zip(tensors, before, strict=True)) or not flats[0].held[0]


def refused(make: Callable[[], object], *texts: str) -> None:
    """Raise unless it raises a ValueError with these texts, on this rank; then all ranks can still exchange."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the texts are compared
        make()
    assert all(text in str(caught.value) for text in texts), (texts, str(caught.value))
    dist.barrier()


def bad_layouts() -> None:
    """Every rank raises, with the same words, for what one of them has given."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def lamb(own: Sequence[Fragment], size: int = 12, dtype: torch.dtype = torch.float32, **more: Any) -> Lamb:
        flat = Parameter(torch.ones(size, dtype=dtype))
        return Lamb([{"params": [flat], "flat_layout": FlatLayout([own]), **more}], lr=0.1)

    def part(numel: int = 2, start: int = 0, offset: int | None = None, **other: Any) -> Fragment:
        """Return one of two elements of w on each rank."""
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
    lamb([part(), part(name="none", shape=(0,), numel=0, offset=0)])  # begins where the other does, and holds nothing
    refused(lambda: lamb([part()], dtype=torch.float64 if last else torch.float32), "torch.float64", on_last)
    refused(lambda: lamb([part()], stacked=True), "stacked")
    refused(lambda: lamb([part()], grad_centralization=True), "grad_centralization=True", "rows")
    refused(lambda: lamb([part()], state_dtype="int8"), 'state_dtype="int8"', "rows")


def cut_rows() -> None:
    """Fragments that begin or end inside a row are for plain torch, which explain() says, and a backend by name not."""
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


def bad_steps() -> None:
    """A step without a gradient, or of a part, is refused before anything is exchanged."""
    run = Run(Lamb)
    bag = Bag(SHAPES, run.dtype)
    flats, optimizer = flattened(bag, zero, run)
    refused(optimizer.step, "param_groups[0].params[0] is a flat tensor without a gradient")
    advance(bag, flats, (optimizer,), range(1), run)
    refused(lambda: optimizer.step_in_parts([[*flats[0].tensors]], void), "taken in parts")
    refused(lambda: optimizer.step_param(flats[0].tensors[0]), "ahead of the others")
    group = dist.group.WORLD
    refused(
        lambda: flattened(bag, zero, run, max_grad_norm=1.0, grad_norm_group=group), "grad_norm_group holds several"
    )
    others, other = flattened(bag, zero, Run(Lamb, {"eps": 1e-3} if dist.get_rank() else {}))
    with pytest.raises(ValueError, match=r"(?s)first difference.*eps=1e-06.*rank 1 has param_groups\[0\]: eps=0\.001"):
        advance(bag, others, (other,), range(1), run)


def some_ranks() -> None:
    """Two halves of the ranks hold a model each."""
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


def scenarios(world: int, *, all_of_them: bool = False) -> Mapping[str, Callable[[], None]]:
    """Return the scenarios of `world` ranks: half of the runs on each layout, the other half with twice the ranks."""
    todo: dict[str, Callable[[], None]] = {}
    for place, (on, layout) in enumerate(LAYOUTS.items()):
        for turn, (name, run) in enumerate(RUNS.items()):
            if on not in run.not_on and (all_of_them or (place + turn) % 2 == world // 4):
                todo[f"{on}-{name}"] = partial(equals_the_whole_run, layout, run)
        todo[f"{on}-collectives"] = partial(collectives, layout)
        todo[f"{on}-came-collectives"] = partial(came_collectives, layout)
        todo[f"{on}-resumes"] = partial(resumes, layout, Run(Lamb, {"max_grad_norm": 0.5}))
        todo[f"{on}-came-resumes"] = partial(resumes, layout, Run(Came, {"max_grad_norm": 0.5}))
        for kind in KINDS:
            skip = Run(kind, {"skip_nonfinite": True}, dtype=torch.float32, backend="auto")
            todo[f"{on}-{kind.algorithm.name}-skips"] = partial(skips_everywhere, layout, skip)
    todo["bad-layouts"], todo["bad-steps"], todo["cut-rows"] = bad_layouts, bad_steps, cut_rows
    if world == 4:
        todo["some-ranks"] = some_ranks
    return todo


if __name__ == "__main__":
    run_as_rank(lambda world, _: scenarios(world, all_of_them=bool(sys.argv[4:])))
