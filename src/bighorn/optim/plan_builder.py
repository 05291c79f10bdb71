"""From parameters and gradients to a step plan: which bucket each one is in, and which kernels serve the buckets."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bighorn import kernels
from bighorn.arguments import about
from bighorn.distributed import sharding
from bighorn.distributed.sharding import Cut, Ranks
from bighorn.kernels import Bucket
from bighorn.kernels.storage import has_memory
from bighorn.optim.algorithm import Variant
from bighorn.optim.param_info import Part, row_shard
from bighorn.optim.state import REAL_DTYPES, local_view, overlaps, refuse_freed
from bighorn.optim.step_plan import BucketPlan, ParamBinding, ShardLaunch, StepPlan

State = dict[str, Any]


def build(
    parts: list[Part],
    grads: list[Tensor],
    options: dict[Variant, Any],
    options_version: int,
    complete: Callable[[Part, Tensor], tuple[State, list[str]]],
    backend: str,
) -> tuple[StepPlan, list[State]]:
    """A plan for the parts, and each part's state, complete but not yet the optimizer's: nothing has changed so far.

    Args:
        parts: What takes part, in the optimizer's order.
        grads: Their gradients, or tensors like those that are expected; the plan is bound to them.
        options: The options of each variant.
        options_version: Which ones these are.
        complete: Gives the state of a part whose parameter kernels will see as the tensor that is handed over, and
            the names of the tensors in it that kernels work on.
        backend: The one that is asked for, or "auto".

    Raises:
        RuntimeError: A gradient is sparse.
        ValueError: A gradient does not fit its parameter, parameters share memory, or the backend that is asked for
            does not serve one.
    """
    bucket_plans: dict[tuple[object, ...], BucketPlan] = {}
    backends: dict[tuple[str, torch.device, Cut | None], list[Bucket[Any]]] = {}
    states: list[State] = []
    bindings: list[tuple[ParamBinding, BucketPlan]] = []
    wrappers: list[tuple[BucketPlan, str]] = []
    for index, (part, grad) in enumerate(zip(parts, grads, strict=True)):
        _check_grad(part, grad)
        view, grad = local_view(part.param), sharding.local(grad)
        refuse_freed(view, part.label)
        refuse_freed(grad, f"the gradient of {part.label}")
        if overlaps(view):
            raise ValueError(f"{part.label} has elements that share memory (an expanded tensor): clone() it first")
        dense = view if is_dense(view, part.leading) else view.clone(memory_format=torch.contiguous_format)
        state, kept = complete(part, dense)
        states.append(state)
        mine = {entry: sharding.local(state[entry]) for entry in kept}
        shard, solid = row_shard(part.param, part.stacked), all(map(has_memory, (dense, grad, *mine.values())))
        with about(part.label):
            name, _ = kernels.pick(backend, dense, options[part.variant], shard, solid)
        wrapper = None if solid else index  # its kind of tensor has its own bucket
        key = (part.variant, name, dense.device, dense.dtype, mine[kept[0]].dtype, part.cut, wrapper, *kept)
        if key not in bucket_plans:
            bucket_plans[key] = BucketPlan(Bucket(options[part.variant], [], {}, [], [], torch.empty(0)), part.variant)
            backends.setdefault((name, dense.device, part.cut), []).append(bucket_plans[key].bucket)
        bucket_plan = bucket_plans[key]
        if not solid:
            wrappers.append((bucket_plan, part.label))
        binding = ParamBinding(index, view, dense, state["step"], part.stacked, sharding.shard_of(part.param))
        bucket_plan.add(binding, mine, zlib.crc32(part.label.encode()))
        bucket_plan.direct &= not part.stacked and dense is view and not part.param.is_complex() and not grad.is_neg()
        bindings.append((binding, bucket_plan))
    _check_disjoint([(part, binding) for part, (binding, _) in zip(parts, bindings, strict=True)])

    for (_, device, _), buckets in backends.items():
        for bucket in buckets:
            bucket.norms = torch.zeros(len(bucket.params), 3, dtype=torch.float32, device=device)
    sizes = [len(bucket_plan.bucket.params) for bucket_plan in bucket_plans.values()]
    starts = dict(zip(map(id, bucket_plans.values()), itertools.accumulate(sizes, initial=0), strict=False))
    plan = StepPlan(
        buckets=list(bucket_plans.values()),
        kernels=[],
        meshes={},
        labels=[_labels(part, len(binding.rows)) for part, (binding, _) in zip(parts, bindings, strict=True)],
        places=[[starts[id(bucket_plan)] + row for row in binding.rows] for binding, bucket_plan in bindings],
        options_version=options_version,
    )
    plan.bind(list(map(sharding.local, grads)))
    for bucket_plan, label in wrappers:
        _try_on_copies(bucket_plan.bucket, label)
    cuts = [cut for _, _, cut in backends if cut is not None]
    for (name, device, cut), buckets in backends.items():
        kernel = getattr(kernels.BACKENDS[name], buckets[0].options.algorithm)(buckets)
        if cut is None:
            plan.kernels.append((device, kernel))
        else:
            ranks = Ranks.of([other for other in cuts if other.mesh == cut.mesh])
            plan.meshes.setdefault(ranks, []).append(ShardLaunch(kernel, device, cut))
    return plan, states


def _labels(part: Part, rows: int) -> list[str]:
    return [f"{part.label}[{i}]" for i in range(rows)] if part.stacked else [part.label]


def _try_on_copies(bucket: Bucket[Any], label: str) -> None:
    """Step copies of a wrapper subclass's tensors, since what these can do is not known before; nothing else changes.

    Raises:
        ValueError: They cannot be stepped.
    """

    def copies(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors]

    try:
        counts = copies(bucket.counts)
        trial = replace(
            bucket,
            params=copies(bucket.params),
            state={name: copies(tensors) for name, tensors in bucket.state.items()},
            steps=counts * len(bucket.params),
            counts=counts,
            norms=bucket.norms.clone(),
            grads=copies(bucket.grads),
        )
        for _ in getattr(kernels.BACKENDS["reference"], bucket.options.algorithm)([trial]).rounds():
            pass
    except Exception as error:
        kinds = {type(tensor).__name__ for tensor in (*bucket.params, *bucket.grads)}
        raise ValueError(
            f"{label} cannot be stepped: it or its gradient is a {' or a '.join(sorted(kinds))}, and a step of copies "
            f"failed: {error}"
        ) from error


def _check_grad(part: Part, grad: Tensor) -> None:
    param = part.param
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {part.label} has layout {grad.layout}, but only dense gradients are supported: build the "
            "embedding with sparse=False, or give its parameters to torch.optim.SparseAdam"
        )
    layout, its = part.layout, sharding.layout_of(grad)
    if layout != its:
        raise ValueError(
            f"the gradient of {part.label} lies as {its or 'a plain tensor'}, the parameter as "
            f"{layout or 'a plain tensor'}: redistribute it first, "
            "p.grad = p.grad.redistribute(placements=p.placements)"
        )
    fits = grad.shape == param.shape and grad.is_complex() == param.is_complex() and grad.device == param.device
    if not fits or not (grad.is_complex() or grad.dtype in REAL_DTYPES):
        raise ValueError(
            f"the gradient of {part.label} has shape {tuple(grad.shape)} and dtype {grad.dtype} on {grad.device}, the "
            f"parameter {tuple(param.shape)} and {param.dtype} on {param.device}: compute it anew, after zero_grad(), "
            "in a floating dtype of 16 bits or more"
        )


def _check_disjoint(bindings: list[tuple[Part, ParamBinding]]) -> None:
    """Two parameters in the same memory would be stepped twice, by two threads at once."""
    spans = sorted(
        (binding.view.data_ptr(), binding.view.data_ptr() + binding.view.nbytes, part.label)
        for part, binding in bindings
        if binding.view.device.type != "meta"
        and binding.view.numel()
        and has_memory(binding.view)
        and is_dense(binding.view, 0)
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end and first == second:
            raise ValueError(f"{first} is among the parameters twice: take one of the two out of its group")
        if start < end:
            raise ValueError(f"{first} and {second} share memory: pass only one of them, or clone() one")


def is_dense(tensor: Tensor, leading: int) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, the first `leading` dims in order."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return False
    inner = [math.prod(tensor.shape[i + 1 :]) for i in range(leading)]
    return tensor.numel() == 0 or list(tensor.stride()[:leading]) == inner
