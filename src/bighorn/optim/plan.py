"""From parameters and gradients to buckets: made when something changed, then only fed with gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bighorn import kernels
from bighorn.kernels import Bucket, Kernel, LambOptions
from bighorn.state import real_view

State = dict[str, Any]


class Variant(NamedTuple):
    """Which options hold for a bucket: its group's, less what exclusions take away, and whether they centre."""

    group: int
    decays: bool
    adapts: bool
    centres: bool


@dataclass
class Part:
    """A parameter that takes part in a step."""

    param: Tensor
    grad: Tensor
    label: str
    variant: Variant
    stacked: bool

    @property
    def leading(self) -> int:
        """How many leading dims must be the outermost in memory, since kernels take them apart."""
        return self.stacked + self.variant.centres


@dataclass
class Feed:
    """How one part's gradient reaches its rows at each step."""

    index: int  # among the parts
    view: Tensor  # the parameter, real, in its own memory
    dense: Tensor  # what kernels work on: `view`, or a dense copy of it
    stacked: bool

    def rows(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The rows of a gradient."""
        return real_view(grad).unbind() if self.stacked else (real_view(grad),)


@dataclass
class Plan:
    """Everything about a step that stays as it is until the fingerprint changes."""

    fingerprint: object
    buckets: dict[tuple[object, ...], Bucket] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    feeds: list[list[Feed]] = field(default_factory=list)
    direct: list[bool] = field(default_factory=list)
    """Per bucket: its gradients can be used as they are."""
    kernels: list[tuple[torch.device, Kernel]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    positions: list[tuple[int, int]] = field(default_factory=list)
    """Per label: bucket and row."""

    def feed(self, grads: list[Tensor], options: dict[Variant, LambOptions]) -> None:
        """Hand this step's gradients and options to the buckets."""
        buckets = zip(self.buckets.values(), self.variants, self.feeds, self.direct, strict=True)
        for bucket, variant, feeds, direct in buckets:
            bucket.options = options[variant]
            if direct:
                bucket.grads = [grads[feed.index] for feed in feeds]
                continue
            bucket.grads = [row for feed in feeds for row in feed.rows(grads[feed.index])]
            for feed in feeds:
                if feed.dense is not feed.view:
                    feed.dense.copy_(feed.view)

    def finish(self) -> None:
        """Write dense copies back to the parameters that they stand for, and let go of the gradients."""
        for bucket, feeds, direct in zip(self.buckets.values(), self.feeds, self.direct, strict=True):
            bucket.grads = []
            if direct:
                continue
            for feed in feeds:
                if feed.dense is not feed.view:
                    feed.view.copy_(feed.dense)

    def norms(self) -> Tensor:
        """Weight norm, update norm and trust ratio of the last step, `[labels, 3]`."""
        buckets = list(self.buckets.values())
        if not self.positions:
            return torch.zeros(0, 3, dtype=torch.float32)
        first = buckets[0].norms.device
        return torch.stack([buckets[bucket].norms[row].to(first) for bucket, row in self.positions])


def fingerprint(parts: list[tuple[Tensor, Tensor]], state: dict[Tensor, State]) -> list[object]:
    """What must be as it was for a plan to hold: which tensors, where they lie, and how."""
    tensors = [
        (id(p), p.data_ptr(), p.dtype, p.shape, p.stride(), g.dtype, g.shape, g.stride(), g.device) for p, g in parts
    ]
    states = list(state.values())
    values = itertools.chain.from_iterable(map(dict.values, states))
    return [tensors, list(map(id, states)), [*map(Tensor.data_ptr, values)]]


def build(
    parts: list[Part],
    options: dict[Variant, LambOptions],
    complete: Callable[[Part, Tensor], State],
    backend: str,
    algorithm: str,
) -> tuple[Plan, list[State]]:
    """A plan for the parts, and each part's state, complete but not yet the optimizer's: nothing has changed so far.

    Args:
        parts: What takes part, in the optimizer's order.
        options: The options of each variant.
        complete: Gives the state of a part whose parameter kernels will see as the tensor that is handed over.
        backend: The one that is asked for, or "auto".
        algorithm: The name of its kernels in `kernels.Backend`.

    Raises:
        ValueError: The backend that is asked for does not serve a part.
    """
    plan = Plan(fingerprint=None)
    states: list[State] = []
    backends: dict[tuple[str, torch.device], list[Bucket]] = {}
    for index, part in enumerate(parts):
        view = real_view(part.param)
        kind = (part.param.is_complex(), part.param.is_floating_point())
        if (part.grad.is_complex(), part.grad.is_floating_point()) != kind or real_view(part.grad).shape != view.shape:
            raise ValueError(
                f"the gradient of {part.label} has shape {tuple(part.grad.shape)} and dtype {part.grad.dtype}, the "
                f"parameter {tuple(part.param.shape)} and {part.param.dtype}: compute it anew, after zero_grad()"
            )
        if overlaps(view):
            raise ValueError(f"{part.label} has elements that share memory (an expanded tensor): clone() it first")
        dense = view if _is_dense(view, part.leading) else view.clone(memory_format=torch.contiguous_format)
        state = complete(part, dense)
        states.append(state)
        name, _ = kernels.pick(backend, dense, options[part.variant])
        feed = Feed(index, view, dense, part.stacked)
        moments = {key: value for key, value in state.items() if key != "step"}
        key = (part.variant, name, dense.device, dense.dtype, state["exp_avg"].dtype)
        if key not in plan.buckets:
            bucket = Bucket(options[part.variant], [], {key: [] for key in moments}, [], [], torch.empty(0))
            plan.buckets[key] = bucket
            plan.variants.append(part.variant)
            plan.feeds.append([])
            backends.setdefault((name, dense.device), []).append(bucket)
        _add(plan, list(plan.buckets).index(key), feed, moments, state["step"], part.label)

    for bucket in plan.buckets.values():
        bucket.norms = torch.zeros(len(bucket.params), 3, dtype=torch.float32, device=bucket.params[0].device)
    plan.direct = [
        all(not feed.stacked and feed.dense is parts[feed.index].param for feed in feeds) for feeds in plan.feeds
    ]
    plan.feed([part.grad for part in parts], options)
    plan.kernels = [
        (device, getattr(kernels.BACKENDS[name], algorithm)(buckets)) for (name, device), buckets in backends.items()
    ]
    return plan, states


def _add(plan: Plan, index: int, feed: Feed, moments: State, step: Tensor, label: str) -> None:
    bucket = list(plan.buckets.values())[index]
    rows = feed.dense.unbind() if feed.stacked else (feed.dense,)
    for i, row in enumerate(rows):
        plan.labels.append(f"{label}[{i}]" if feed.stacked else label)
        plan.positions.append((index, len(bucket.params)))
        bucket.params.append(row)
        bucket.steps.append(step)
    for name, value in moments.items():
        bucket.state[name].extend(value.unbind() if feed.stacked else (value,))
    bucket.counts.append(step)
    plan.feeds[index].append(feed)


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do, so that writing one writes others."""
    return tensor.numel() > 0 and any(
        step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_dense(tensor: Tensor, leading: int) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, the first `leading` dims in order."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return False
    inner = [math.prod(tensor.shape[i + 1 :]) for i in range(leading)]
    return tensor.numel() == 0 or list(tensor.stride()[:leading]) == inner
