"""Building a step plan from parameters and gradients: the bucket of each parameter, and the kernel of each bucket."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bighorn import kernels
from bighorn.arguments import about
from bighorn.distributed import sharding
from bighorn.distributed.sharding import ReduceGroup, ShardedDims
from bighorn.kernels import Bucket
from bighorn.kernels.storage import address_of, has_memory
from bighorn.optim.algorithm import Variant
from bighorn.optim.param_info import ParamInfo, row_shard
from bighorn.optim.state import REAL_DTYPES, is_dense, local_view, overlaps, refuse_freed
from bighorn.optim.step_plan import BucketPlan, ParamBinding, ShardLaunch, StepPlan

State = dict[str, Any]


def build(
    infos: list[ParamInfo],
    grads: list[Tensor],
    options: dict[Variant, Any],
    options_version: int,
    init_state: Callable[[ParamInfo, Tensor], tuple[State, list[str]]],
    backend: str,
) -> tuple[StepPlan, list[State]]:
    """Return a plan for the parameters, and the complete state of each. The optimizer itself is not changed.

    Args:
        infos: The parameters that take part, in the optimizer's order.
        grads: Their gradients, or tensors like the expected gradients; the plan is bound to them.
        options: The options of each variant.
        options_version: The version of these options.
        init_state: A function of a ParamInfo and the dense tensor that kernels will use for its parameter. It returns
            the state, and the names of the tensors in it that kernels use.
        backend: The requested backend, or "auto".

    Raises:
        RuntimeError: A gradient is sparse.
        ValueError: A gradient does not fit its parameter, parameters share memory, or the requested backend does not
            serve one.
    """
    bucket_plans: dict[tuple[object, ...], BucketPlan] = {}
    backends: dict[tuple[str, torch.device, ShardedDims | None], list[Bucket[Any]]] = {}
    states: list[State] = []
    bindings: list[tuple[ParamBinding, BucketPlan]] = []
    wrappers: list[tuple[BucketPlan, str]] = []
    for index, (info, grad) in enumerate(zip(infos, grads, strict=True)):
        _check_grad(info, grad)
        view, grad = local_view(info.param), sharding.local(grad)
        dense = view if is_dense(view, info.leading) else _dense_copy(view, info.label)
        state, kept = init_state(info, dense)
        states.append(state)
        mine = {entry: sharding.local(state[entry]) for entry in kept}
        shard, solid = row_shard(info.param, info.stacked), all(map(has_memory, (dense, grad, *mine.values())))
        if not solid:
            refuse_freed(view, info.label)
            refuse_freed(grad, f"the gradient of {info.label}")
        with about(info.label):
            name, _ = kernels.pick(backend, dense, options[info.variant], shard, solid)
        wrapper = None if solid else index  # each such tensor has its own bucket
        key = (info.variant, name, dense.device, dense.dtype, mine[kept[0]].dtype, info.sharded_dims, wrapper, *kept)
        if key not in bucket_plans:
            bucket_plans[key] = BucketPlan(Bucket(options[info.variant], [], {}, [], [], torch.empty(0)), info.variant)
            backends.setdefault((name, dense.device, info.sharded_dims), []).append(bucket_plans[key].bucket)
        bucket_plan = bucket_plans[key]
        if not solid:
            wrappers.append((bucket_plan, info.label))
        used = view if name == kernels.SERVES_STRIDED else dense
        binding = ParamBinding(index, view, used, state["step"], info.stacked, sharding.shard_of(info.param))
        bucket_plan.add(binding, mine, zlib.crc32(info.label.encode()))
        bucket_plan.direct &= not info.stacked and used is view and not info.param.is_complex() and not grad.is_neg()
        bindings.append((binding, bucket_plan))
    _check_disjoint([(info, binding) for info, (binding, _) in zip(infos, bindings, strict=True)])

    for (_, device, _), buckets in backends.items():
        for bucket in buckets:
            bucket.metrics = torch.zeros(len(bucket.params), 3, dtype=torch.float32, device=device)
    sizes = [len(bucket_plan.bucket.params) for bucket_plan in bucket_plans.values()]
    starts = dict(zip(map(id, bucket_plans.values()), itertools.accumulate(sizes, initial=0), strict=False))
    plan = StepPlan(
        buckets=list(bucket_plans.values()),
        kernels=[],
        meshes={},
        labels=[_labels(info, len(binding.rows)) for info, (binding, _) in zip(infos, bindings, strict=True)],
        row_indices=[[starts[id(bucket_plan)] + row for row in binding.rows] for binding, bucket_plan in bindings],
        options_version=options_version,
    )
    plan.bind(list(map(sharding.local, grads)))
    for bucket_plan, label in wrappers:
        _try_on_copies(bucket_plan.bucket, label)
    sharded_dims = [dims for _, _, dims in backends if dims is not None]
    for (name, device, dims), buckets in backends.items():
        kernel = getattr(kernels.BACKENDS[name], buckets[0].options.algorithm)(buckets)
        if dims is None:
            plan.kernels.append((device, kernel))
        else:
            reduce_group = ReduceGroup.of([other for other in sharded_dims if other.mesh == dims.mesh])
            plan.meshes.setdefault(reduce_group, []).append(ShardLaunch(kernel, device, dims))
    return plan, states


def _labels(info: ParamInfo, rows: int) -> list[str]:
    return [f"{info.label}[{i}]" for i in range(rows)] if info.stacked else [info.label]


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
        for _ in getattr(kernels.BACKENDS["reference"], bucket.options.algorithm)([trial]).sharded_step():
            pass
    except Exception as error:
        kinds = {type(tensor).__name__ for tensor in (*bucket.params, *bucket.grads)}
        raise ValueError(
            f"{label} cannot be stepped: it or its gradient is a {' or a '.join(sorted(kinds))}, and a step of copies "
            f"failed: {error}"
        ) from error


def _check_grad(info: ParamInfo, grad: Tensor) -> None:
    param = info.param
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {info.label} has layout {grad.layout}, but only dense gradients are supported: build the "
            "embedding with sparse=False, or give its parameters to torch.optim.SparseAdam"
        )
    layout, its = info.layout, sharding.layout_of(grad)
    if layout != its:
        raise ValueError(
            f"the gradient of {info.label} lies as {its or 'a plain tensor'}, the parameter as "
            f"{layout or 'a plain tensor'}: redistribute it first, "
            "p.grad = p.grad.redistribute(placements=p.placements)"
        )
    fits = grad.shape == param.shape and grad.is_complex() == param.is_complex() and grad.device == param.device
    if not fits or not (grad.is_complex() or grad.dtype in REAL_DTYPES):
        raise ValueError(
            f"the gradient of {info.label} has shape {tuple(grad.shape)} and dtype {grad.dtype} on {grad.device}, the "
            f"parameter {tuple(param.shape)} and {param.dtype} on {param.device}: compute it anew, after zero_grad(), "
            "in a floating dtype of 16 bits or more"
        )


def _check_disjoint(bindings: list[tuple[ParamInfo, ParamBinding]]) -> None:
    """Raise if two parameters share memory: it would be stepped twice, by two threads at once."""
    spans = sorted(
        (start, start + binding.view.nbytes, info.label)
        for info, binding in bindings
        if (start := address_of(binding.view)) and (binding.view.is_contiguous() or is_dense(binding.view, 0))
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end and first == second:
            raise ValueError(f"{first} is among the parameters twice: take one of the two out of its group")
        if start < end:
            raise ValueError(f"{first} and {second} share memory: pass only one of them, or clone() one")


def _dense_copy(view: Tensor, label: str) -> Tensor:
    """Return a copy that kernels can step.

    Raises:
        ValueError: Elements of the parameter share memory, or its memory was freed.
    """
    refuse_freed(view, label)
    if overlaps(view):
        raise ValueError(f"{label} has elements that share memory (an expanded tensor): clone() it first")
    return view.clone(memory_format=torch.contiguous_format)
