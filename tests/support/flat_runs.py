"""Flat tensors of several layouts, and the options with which their optimizers run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, FlatLayout, Fragment, Lamb, Lars
from tests.support.cases import Optimizer
from tests.support.sharded_runs import (
    ALONE,
    AUTO,
    BALL,
    BITWISE,
    CLIPPED,
    CLIPPED_LARS,
    CORRECTED,
    CPU,
    EPS,
    SMALL_TRUST,
    STOCHASTIC,
    Bag,
    Run,
    gradients,
)

PADDING = 5
"""Elements after the last parameter of a buffer."""

OVERFLOWS = 1
"""The step whose gradient of one element overflows, in runs that skip such steps."""

Pairs = Sequence[tuple[str, Tensor]]
Held = Sequence[Sequence[Fragment]]
Layout = Callable[[Pairs], Held]
"""Returns the fragments of each flat tensor of a group on this rank."""


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
    """Return the fragments of ZeRO, each in a separate tensor; ranks have different numbers of tensors."""
    return [[Fragment(each.name, each.shape, each.numel, 0, each.offset)] for each in zero(named)[0]] or [[]]


def last_rank_empty(named: Pairs) -> Held:
    """Return whole parameters, dealt to all ranks but the last."""
    found, start = [], 0
    for i, (name, p) in enumerate(named):
        if i % (dist.get_world_size() - 1) == dist.get_rank():
            found.append(Fragment(name, tuple(p.shape), p.numel(), start))
            start += p.numel()
    return [found]


def whole_rows(named: Pairs) -> Held:
    """Return rows of each parameter; some ranks have none."""
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
        """Return for each flat tensor the state of its fragments, cut from the state of whole parameters."""
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
    """Return the parameters of 2 dims or more, and the others, in the groups of `Run.optimizer`."""
    named = list(bag.named_parameters())
    return [[pair for pair in named if pair[1].dim() >= 2], [pair for pair in named if pair[1].dim() < 2]]


def flattened(bag: Bag, layout: Layout, run: Run, **more: Any) -> tuple[list[Flat], Optimizer]:
    """Return the flat tensors of a model on this rank, and their optimizer."""
    flats = [Flat.of(named, layout) for named in grouped(bag)]
    options = {"lr": 0.1, "weight_decay": 0.1, "backend": run.backend, **run.options, **more}
    groups = [{"params": flat.tensors, "flat_layout": FlatLayout(flat.held)} for flat in flats]
    return flats, run.kind([{**groups[0], **run.group}, groups[1]], **options)


def advance(bag: Bag, flats: Sequence[Flat], optimizers: Sequence[Optimizer], steps: range, run: Run) -> None:
    """Step a whole model and its flat tensors with the same gradients; one overflows if the run skips such steps."""
    for step in steps:
        grads = dict(zip(dict(bag.named_parameters()), gradients(bag, step, run.dtype), strict=True))
        if run.options.get("skip_nonfinite") and step == OVERFLOWS:
            grads["few"].fill_(torch.inf)
        for name, p in bag.named_parameters():
            p.grad = grads[name]
        for flat in flats:
            for tensor in flat.tensors:
                tensor.grad = torch.full_like(tensor, 3.0)  # also in the padding
            flat.copy_in(grads, [tensor.grad for tensor in flat.tensors if tensor.grad is not None])
        for optimizer in optimizers:
            optimizer.step()


FOR_MATRICES: Mapping[str, Any] = {"weight_decay": 0.01, "lr": 0.05}
CUTS_ROWS = ("zero", "tensor-each")

RUNS: Mapping[str, Run] = {
    "lamb": Run(Lamb, steps=10, compares_state=True),
    "clip": Run(Lamb, CLIPPED, FOR_MATRICES, steps=5, compares_state=True),
    "cautious": Run(Lamb, {"cautious": True, "decay_mode": "l2"}),
    "decoupled": Run(Lamb, {"decay_mode": "decoupled", "bias_correction": "lr", "trust_ratio_bounds": (0.0, 1.0)}),
    "ball": Run(Lamb, BALL, steps=5),
    "ball-cpu": Run(Lamb, {**BALL, "max_grad_norm": 0.5}, steps=5, **CPU),
    "foreach": Run(Lamb, {"max_grad_norm": 0.5}, backend="foreach"),
    "cpu": Run(Lamb, {"max_grad_norm": 0.5}, steps=5, compares_state=True, **CPU),
    "cpu-bfloat16-state": Run(Lamb, {"state_dtype": torch.bfloat16}, **CPU),
    "lars": Run(Lars, CLIPPED_LARS, compares_state=True),
    "lars-cpu": Run(Lars, {**SMALL_TRUST, "nesterov": True}, **CPU),
    "came": Run(Came, steps=10, compares_state=True),
    "came-everything": Run(
        Came, {**CORRECTED, "decay_rate": 0.8, "factor": "last_two"}, FOR_MATRICES, compares_state=True
    ),
    "came-clip": Run(
        Came,
        {"max_grad_norm": 0.5, "skip_nonfinite": True, "exclude_from_weight_decay": ["bias", "even"], "maximize": True},
    ),
    "came-foreach": Run(Came, EPS, backend="foreach", compares_state=True),
    "came-foreach-cautious": Run(Came, {**EPS, "cautious": True}, backend="foreach"),
    "came-auto": Run(Came, {**EPS, "scale_parameter": True, "max_grad_norm": 1.0}, compares_state=True, **AUTO),
    "came-auto-last-two": Run(
        Came, {**EPS, "factor": "last_two", "state_dtype": torch.bfloat16}, **{**AUTO, "tolerance": 2e-5}
    ),
    "came-auto-float16": Run(Came, {**EPS, "state_dtype": torch.float16}, **{**AUTO, "tolerance": 2e-5}),
    "came-cpu": Run(Came, EPS, compares_state=True, not_on=CUTS_ROWS, **CPU),
    # Without a clip, few sums cross ranks, since rows are whole.
    "came-cpu-stochastic": Run(Came, {**EPS, "clip_threshold": 1e3, **STOCHASTIC}, not_on=CUTS_ROWS, **BITWISE),
    # Without trust ratios no sums are exchanged: every bit equals the whole run's, with the same random bits.
    "cpu-stochastic": Run(Lamb, {**STOCHASTIC, **ALONE}, **BITWISE),
    "cpu-kahan": Run(Lamb, {"weight_rounding": "kahan", **ALONE}, **BITWISE),
    "reference-master": Run(Lamb, {"weight_rounding": "master", **ALONE}, **{**BITWISE, "backend": "reference"}),
}


def refused(make: Callable[[], object], *texts: str) -> None:
    """Check that a call raises a ValueError with all texts on this rank, and that ranks can still communicate."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the texts are compared
        make()
    assert all(text in str(caught.value) for text in texts), (texts, str(caught.value))
    dist.barrier()
