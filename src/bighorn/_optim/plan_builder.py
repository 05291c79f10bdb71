"""Building a step plan from parameters and gradients: the bucket of each parameter, and the kernel of each bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bighorn import _kernels as kernels
from bighorn._arguments import about
from bighorn._capabilities import wide
from bighorn._distributed import sharding
from bighorn._distributed.flat import FlatGroup
from bighorn._distributed.sharding import RankSums, ReduceGroup, ShardedDims
from bighorn._kernels import Bucket
from bighorn._kernels.storage import address_of, has_memory
from bighorn._optim.algorithm import Variant
from bighorn._optim.entry import Entry
from bighorn._optim.placed import Placed
from bighorn._optim.state import REAL_DTYPES, is_dense, refuse_freed
from bighorn._optim.step_plan import BucketPlan, Launch, StepPlan

State = dict[str, Any]
Backends = dict[tuple[str, torch.device, ShardedDims | FlatGroup | None, bool], list[BucketPlan]]
"""Buckets by the name of the backend, their device, and the ranks that add up their sums."""

InitState = Callable[[Entry, Tensor], State]
"""A function of an entry and the dense tensor that kernels will use for its parameter; it returns the state."""


def build(
    params: list[Tensor],
    grads: list[Tensor],
    entries: list[Entry],
    options: dict[Variant, Any],
    options_version: int,
    init_state: InitState,
    backend: str,
) -> tuple[StepPlan, list[State]]:
    """Return a plan for the parameters, and the complete state of each. The optimizer itself is not changed.

    Args:
        params: The parameters that take part, in the optimizer's order; some may be flat tensors.
        grads: Their gradients, or tensors like the expected gradients; the plan is bound to them.
        entries: The entries of the parameters, or of the parameters in flat tensors.
        options: The options of each variant.
        options_version: The version of these options.
        init_state: The function that makes or checks the state of a parameter.
        backend: The requested backend, or "auto".

    Raises:
        RuntimeError: A gradient is sparse.
        ValueError: A gradient does not fit its parameter, parameters share memory, or the requested backend does not
            serve one.
    """
    indices = {id(param): index for index, param in enumerate(params)}
    local_grads = list(map(sharding.local, grads))
    builder = PlanBuilder(options, init_state, backend)
    for entry in entries:
        index = indices[id(entry.param)]
        _check_grad(entry, grads[index])
        builder.add(entry, index, local_grads[index])
    plan = builder.plan(local_grads, options_version)
    states = [builder.states.get(index, {}) for index in range(len(params))]
    return plan, states


class PlanBuilder:
    """The parts of a plan while entries are added; its arguments are as for `build`."""

    def __init__(self, options: dict[Variant, Any], init_state: InitState, backend: str) -> None:
        self.options, self.init_state, self.backend = options, init_state, backend
        self.states: dict[int, State] = {}
        """The state of each tensor of the optimizer, by its index."""
        self.entries: list[tuple[Placed, BucketPlan]] = []
        self.bucket_plans: dict[tuple[object, ...], BucketPlan] = {}
        self.backends: Backends = {}
        self.picked: dict[tuple[object, ...], str] = {}
        """The names of the backends that were picked, by what the choice depends on."""
        self.wrappers: list[tuple[BucketPlan, str]] = []
        """(bucket, label) of each wrapper tensor; each has its own bucket."""

    def add(self, entry: Entry, index: int, grad: Tensor) -> None:
        """Add an entry of the tensor with this index, with its gradient on this rank."""
        placed = Placed(entry, index)
        moments = self._moments(placed)
        solid = self._has_memory(placed, grad, moments)
        placed.expect(grad, copies=solid)
        bucket_plan = self._bucket_of(placed, self._pick(placed, solid), solid)
        bucket_plan.add(placed, moments)
        self.entries.append((placed, bucket_plan))

    def _moments(self, placed: Placed) -> State:
        """Return the state that kernels use for an entry, whose memory is known then."""
        like = placed.take_memory()
        placed.counts = placed.index not in self.states
        if placed.counts:
            self.states[placed.index] = self.init_state(placed.entry, like)
        placed.step = self.states[placed.index]["step"]
        return placed.moments(self.states[placed.index])

    def _has_memory(self, placed: Placed, grad: Tensor, moments: State) -> bool:
        """Whether all tensors of an entry have memory of their own, as wrappers have not.

        Raises:
            ValueError: The memory of the parameter or its gradient was freed.
        """
        if all(map(has_memory, (placed.dense, placed.entry.part(grad), *moments.values()))):
            return True
        refuse_freed(placed.view, placed.entry.label)
        refuse_freed(placed.entry.part(grad), f"the gradient of {placed.entry.label}")
        return False

    def _bucket_of(self, placed: Placed, backend: str, solid: bool) -> BucketPlan:
        """Return the bucket of entries that one call of a kernel can step."""
        variant, device = placed.entry.variant, placed.dense.device
        # A matrix that is excluded from Hyperball has a radius, a vector has none.
        state = frozenset(placed.entry.state_parts or placed.entry.spec)
        of_one = None if solid else placed.index
        key = (variant, backend, device, placed.dense.dtype, placed.entry.ranks, state, of_one)
        if key not in self.bucket_plans:
            made = BucketPlan(Bucket(self.options[variant], [], {}, [], [], torch.empty(0)), variant)
            self.backends.setdefault((backend, device, placed.entry.ranks, variant.centres), []).append(made)
            self.bucket_plans[key] = made
        if not solid:
            self.wrappers.append((self.bucket_plans[key], placed.entry.label))
        return self.bucket_plans[key]

    def plan(self, grads: Sequence[Tensor], options_version: int) -> StepPlan:
        """Return the plan, bound to this rank's gradients of all tensors of the optimizer."""
        self._check_disjoint()
        for (_, device, *_), used_by in self.backends.items():
            for bucket_plan in used_by:
                bucket = bucket_plan.bucket
                size = len(bucket.params), len(bucket.options.metrics)
                bucket.metrics = torch.zeros(size, dtype=torch.float32, device=device)
                bucket_plan.is_plan = [placed.index for placed in bucket_plan.entries] == list(range(len(grads)))
        labels, slot_indices = self._report_slots(len(grads))
        plan = StepPlan(
            buckets=list(self.bucket_plans.values()),
            kernels=[],
            meshes={},
            labels=labels,
            slot_indices=slot_indices,
            options_version=options_version,
        )
        plan.bind([*grads], [True] * len(grads))
        for bucket_plan, label in self.wrappers:
            _try_on_copies(bucket_plan.bucket, label)
        self._add_kernels(plan)
        plan.note_reads()
        return plan

    def _pick(self, placed: Placed, solid: bool) -> str:
        """Return the name of the backend that serves an entry, as `kernels.pick`."""
        dense, shard, options = placed.dense, placed.entry.slot_shard, self.options[placed.entry.variant]
        key = placed.entry.variant, dense.dtype, dense.device, dense.shape, shard, solid
        if key not in self.picked:
            with about(placed.entry.label):
                self.picked[key], _ = kernels.pick(self.backend, dense, options, shard, solid)
        return self.picked[key]

    def _check_disjoint(self) -> None:
        """Raise if two parameters share memory: it would be stepped twice, by two threads at once."""
        spans = sorted(
            (start, start + placed.view.nbytes, placed.entry.label)
            for placed, _ in self.entries
            if (start := address_of(placed.view)) and (placed.view.is_contiguous() or is_dense(placed.view, 0))
        )
        for (_, end, first), (start, _, second) in itertools.pairwise(spans):
            if start < end and first == second:
                raise ValueError(f"{first} is among the parameters twice: take one of the two out of its group")
            if start < end:
                raise ValueError(f"{first} and {second} share memory: pass only one of them, or clone() one")

    def _report_slots(self, count: int) -> tuple[list[list[str]], list[list[int]]]:
        """Return the labels of each tensor in reports, and the slots of all buckets with its metrics."""
        sizes = [len(bucket_plan.bucket.params) for bucket_plan in self.bucket_plans.values()]
        starts = dict(zip(map(id, self.bucket_plans.values()), itertools.accumulate(sizes, initial=0), strict=False))
        labels: list[list[str]] = [[] for _ in range(count)]
        slot_indices: list[list[int]] = [[] for _ in range(count)]
        homes: dict[int, int] = {}
        for placed, bucket_plan in self.entries:
            # Reports have the parameters in all flat tensors of a group in one order on every rank.
            home = homes.setdefault(placed.entry.variant.group, placed.index) if placed.entry.fragment else placed.index
            slots = range(len(placed.slots))
            labels[home] += (
                [f"{placed.entry.label}[{i}]" for i in slots] if placed.entry.stacked else [placed.entry.label]
            )
            slot_indices[home] += [starts[id(bucket_plan)] + slot for slot in placed.slots]
        return labels, slot_indices

    def _add_kernels(self, plan: StepPlan) -> None:
        """Make the kernels of a plan, which is bound to gradients."""
        sharded_dims = [dims for _, _, dims, _ in self.backends if isinstance(dims, ShardedDims)]
        for (name, device, dims, centres), used_by in self.backends.items():
            buckets = [bucket_plan.bucket for bucket_plan in used_by]
            kernel = kernels.kernel(name, buckets[0].options.algorithm)(buckets)
            launch = Launch(kernel, device, wide(device), dims, used_by if centres else [])
            if dims is None:
                plan.kernels.append(launch)
            else:
                ranks: RankSums = dims if isinstance(dims, FlatGroup) else _reduce_group(dims, sharded_dims)
                plan.meshes.setdefault(ranks, []).append(launch)


def _reduce_group(dims: ShardedDims, all_dims: list[ShardedDims]) -> ReduceGroup:
    return ReduceGroup.of([other for other in all_dims if other.mesh == dims.mesh])


def _try_on_copies(bucket: Bucket[Any], label: str) -> None:
    """Step copies of a wrapper subclass's tensors, whose operations may not be supported; nothing else changes.

    Raises:
        ValueError: The tensors cannot be stepped.
    """

    def copies(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors]

    try:
        counts = copies(bucket.unique_steps)
        trial = replace(
            bucket,
            params=copies(bucket.params),
            state={name: copies(tensors) for name, tensors in bucket.state.items()},
            steps=counts * len(bucket.params),
            unique_steps=counts,
            metrics=bucket.metrics.clone(),
            grads=copies(bucket.grads),
        )
        for _ in kernels.kernel("reference", bucket.options.algorithm)([trial]).sharded_step():
            pass
    except Exception as error:
        kinds = {type(tensor).__name__ for tensor in (*bucket.params, *bucket.grads)}
        raise ValueError(
            f"{label} cannot be stepped: it or its gradient is a {' or a '.join(sorted(kinds))}, and a step of copies "
            f"failed: {error}"
        ) from error


def _check_grad(entry: Entry, grad: Tensor) -> None:
    param = entry.param
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {entry.label} has layout {grad.layout}, but only dense gradients are supported: build "
            "the embedding with sparse=False, or give its parameters to torch.optim.SparseAdam"
        )
    layout, its = entry.layout, sharding.layout_of(grad)
    if layout != its:
        raise ValueError(
            f"the gradient of {entry.label} is {its or 'a plain tensor'}, the parameter is "
            f"{layout or 'a plain tensor'}: redistribute it first, "
            "p.grad = p.grad.redistribute(placements=p.placements)"
        )
    fits = grad.shape == param.shape and grad.is_complex() == param.is_complex() and grad.device == param.device
    if not fits or not (grad.is_complex() or grad.dtype in REAL_DTYPES):
        raise ValueError(
            f"the gradient of {entry.label} has shape {tuple(grad.shape)} and dtype {grad.dtype} on {grad.device}, the "
            f"parameter {tuple(param.shape)} and {param.dtype} on {param.device}: compute it anew, after zero_grad(), "
            "in a floating dtype of 16 bits or more"
        )
