"""The step plan: buckets and kernels, prepared once. Also computes the factor of the gradients and the apply mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bighorn.capabilities import wide
from bighorn.distributed.flat import FlatGroup
from bighorn.distributed.sharding import RankSums, ShardedDims
from bighorn.kernels import Bucket
from bighorn.kernels.bucket import Shard
from bighorn.optim.algorithm import Group, Variant
from bighorn.optim.centring import Centred, centre
from bighorn.optim.flat_tensors import FlatView
from bighorn.optim.settings import Settings
from bighorn.optim.state import real_view
from bighorn.square_sums import no_square_sums, root, square_sum_on, square_sums

LARGEST_NORM = 2.0**53
"""Up to this 2-norm of all gradients, no square overflows float32, the dtype of moments.

A sum of 2^18 squares of CAME's updates, which can be as large as the largest gradient, does not overflow either.
"""


PartCall = Callable[[int], None]
"""A function that is called with the index of a part of a step."""


@dataclass
class ParamBinding:
    """A parameter of a plan: the rows that it becomes, and how its gradient is bound to them at each step."""

    index: int
    """The index of the parameter in the plan."""
    view: Tensor
    """This rank's shard of the parameter, as a real tensor in the same memory."""
    dense: Tensor
    """The tensor that kernels use: `view`, or a dense copy of it."""
    step: Tensor
    stacked: bool
    shard: Shard | None
    """The box of the parameter that `view` is; None if it is the whole parameter."""
    part: FlatView | None = None
    """The part of a flat tensor that `view` is; None if it is a parameter of its own."""
    counts: bool = True
    """Whether this binding counts the step; the parameters in a flat tensor share a step count."""
    turned: bool = False
    """Whether `view`, `dense` and the rows are transposed (`ParamInfo.is_turned`)."""
    rows: range = range(0)
    """The rows of the bucket that the parameter becomes."""

    def here(self, tensor: Tensor) -> Tensor:
        """Return the part of a flat tensor, or of its gradient; any other tensor unchanged."""
        return tensor if self.part is None else self.part.of(tensor)

    def turn(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the orientation of `view`."""
        return tensor.mT if self.turned else tensor

    def slices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor that has dims of the parameter as rows; slices on other ranks are empty here."""
        if not self.stacked:
            return (tensor,)
        if self.shard is None:
            return tensor.unbind()
        elsewhere = (tensor.new_empty((0,) * (tensor.dim() - 1)),)
        before = self.shard.offset[0]
        return elsewhere * before + tensor.unbind() + elsewhere * (self.shard.shape[0] - before - tensor.shape[0])

    @property
    def row_size(self) -> int:
        """The number of elements of a whole row."""
        shape = self.shard.shape if self.shard else self.dense.shape
        return math.prod(shape[1:] if self.stacked else shape)

    def row_shards(self) -> list[Shard]:
        """The box of each row that this rank holds; empty if all rows are whole."""
        if self.shard is None or not self.stacked:
            return [self.shard] if self.shard else []
        first = self.shard.offset[0]
        return [self.shard.of_slice(first <= i < first + self.shard.size[0]) for i in range(self.shard.shape[0])]

    def grad_rows(self, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the rows of a gradient."""
        return (None,) * len(self.rows) if grad is None else self.slices(self.grad_view(grad))

    def grad_view(self, grad: Tensor) -> Tensor:
        """Return a gradient as `view` is of the parameter."""
        return self.turn(self.here(real_view(grad.resolve_conj()).resolve_neg()))

    @cached_property
    def centred_grad(self) -> Tensor:
        """The memory of the gradient without the means of its rows, in the dtype of the arithmetic."""
        return torch.empty_like(self.dense, dtype=torch.promote_types(self.dense.dtype, torch.float32))

    def centred(self, grad: Tensor | None) -> Centred:
        """Return a gradient whose means are to be subtracted."""
        shard, view = self.shard or Shard.whole(tuple(self.dense.shape)), None if grad is None else self.grad_view(grad)
        return Centred(view, self.centred_grad, shard, 1 + self.stacked)


@dataclass
class BucketPlan:
    """A bucket, and the parameters whose rows it holds."""

    bucket: Bucket[Any]
    variant: Variant
    bindings: list[ParamBinding] = field(default_factory=list)
    direct: bool = True
    """Whether parameters and gradients are used as they are, without slices or copies."""
    indices: list[int] = field(default_factory=list)
    """The indices of the parameters in the plan."""
    all_unique_steps: list[Tensor] = field(default_factory=list)
    """The step counts of all parameters."""
    bound: list[ParamBinding] = field(default_factory=list)
    """The parameters that take part in this step."""
    centred: list[Centred] = field(default_factory=list)
    """This step's gradients, if the means of their rows are to be subtracted."""

    def add(self, binding: ParamBinding, moments: dict[str, Tensor], number: int) -> None:
        """Add the rows of a parameter; `number` is its parameter id."""
        bucket, first, params = self.bucket, len(self.bucket.params), binding.slices(binding.dense)
        count = len(params)
        self.bindings.append(binding)
        self.indices.append(binding.index)
        self.all_unique_steps += [binding.step] * binding.counts
        bucket.params += params
        bucket.shards += binding.row_shards()
        for name, value in moments.items():
            bucket.state.setdefault(name, []).extend(binding.slices(value))
        binding.rows = range(first, first + count)
        bucket.steps += [binding.step] * count
        bucket.param_ids += [number] * count
        bucket.row_offsets += [i * binding.row_size for i in range(count)] if binding.stacked else [0]

    @cached_property
    def select(self) -> Callable[[list[Any]], list[Any]]:
        """A function of values of all parameters of the plan that returns those of the bucket's parameters."""
        if len(self.indices) == 1:
            return lambda values: [values[self.indices[0]]]
        getter = itemgetter(*self.indices)
        return lambda values: list(getter(values))

    def bind(self, grads: list[Tensor | None], present: list[bool] | None, addresses: list[int] | None) -> None:
        """Bind this step's gradients, and update the dense copies of parameters; all are present if that is None."""
        bucket, mine = self.bucket, self.select(grads)
        bucket.grads, bucket.unique_steps, self.bound = mine, self.all_unique_steps, self.bindings
        bucket.known = (mine, self.select(addresses)) if addresses is not None else ([], [])
        if present is not None:
            self.bound = list(itertools.compress(self.bindings, self.select(present)))
            bucket.unique_steps = [binding.step for binding in self.bound if binding.counts]
        if self.direct:
            return
        pairs = list(zip(self.bindings, mine, strict=True))
        if self.variant.centres:
            self.centred = [binding.centred(grad) for binding, grad in pairs]
            bucket.grads = [
                row
                for binding, grad in pairs
                for row in (binding.grad_rows(None) if grad is None else binding.slices(binding.centred_grad))
            ]
        else:
            bucket.grads = [row for binding, grad in pairs for row in binding.grad_rows(grad)]
        for binding in self.bound:
            if binding.dense is not binding.view:
                binding.dense.copy_(binding.view)

    def refresh(self, shards: list[Tensor]) -> None:
        """Use the present memory of parameters, of which these are this rank's shards."""
        for binding in self.bindings:
            view = binding.turn(binding.here(real_view(shards[binding.index])))
            # After p.data = ..., the tensor is the same one, but slices of it are in the old memory.
            same = view is binding.view and not binding.stacked
            if binding.dense is binding.view and not same:
                binding.dense = view
                self.bucket.params[binding.rows.start : binding.rows.stop] = binding.slices(view)
            binding.view = view

    def release(self) -> None:
        """Write dense copies back to their parameters, and release the gradients."""
        self.bucket.grads, self.bucket.known, self.centred = [], ([], []), []
        for binding in self.bound if not self.direct else ():
            if binding.dense is not binding.view:
                binding.view.copy_(binding.dense)


class Launch(NamedTuple):
    """A kernel on its device."""

    kernel: Any
    """A `kernels.Kernel`; with `dims`, a `kernels.ShardKernel`."""
    device: torch.device
    wide: torch.dtype
    """The device's dtype for norms and scales, as `capabilities.wide`."""
    dims: ShardedDims | FlatGroup | None
    """The ranks that hold the other shards; None for tensors that this rank holds completely."""
    centring: list[BucketPlan]
    """The kernel's buckets, if the means of their gradients' rows are subtracted before a step."""

    def centred(self) -> list[Centred]:
        """This step's gradients whose means are to be subtracted."""
        return [each for bucket_plan in self.centring for each in bucket_plan.centred]

    def square_sum(self) -> Tensor:
        """The sum of the squares of this rank's gradients."""
        if not self.centring:
            return self.kernel.square_sum()  # type: ignore[no-any-return]
        return square_sums([each.grad for each in self.centred() if each.grad is not None], self.device).sum(dim=0)

    def centre(self) -> None:
        """Subtract the means from the gradients of whole tensors."""
        for _ in centre(self.centred()):
            raise AssertionError("no other rank has elements of their rows")


@dataclass
class StepPlan:
    """Everything about a step of some parameters that stays the same until one of them moves."""

    buckets: list[BucketPlan]
    kernels: list[Launch]
    """Kernels for tensors that this rank holds completely."""
    meshes: dict[RankSums, list[Launch]]
    """Kernels for shards, by reduce group."""
    labels: list[list[str]]
    """The labels of the rows of each parameter."""
    row_indices: list[list[int]]
    """The rows of each parameter, counted through all buckets."""
    options_version: int
    """The version of the buckets' options."""
    written: list[list[Tensor]] = field(default_factory=list)
    """Each parameter, and the tensors of its state."""
    present: list[bool] = field(default_factory=list)
    """Whether each parameter takes part in this step."""
    stepped: list[bool] = field(default_factory=list)
    """Whether each parameter took part in the last step."""

    def bind(self, grads: list[Tensor | None], present: list[bool], addresses: list[int] | None = None) -> None:
        """Bind this step's gradients to the buckets.

        Args:
            grads: The gradients; None for a parameter that takes no part in the step.
            present: Which of them are not None.
            addresses: Their addresses, 0 for None. Default: None, for kernels to read them.
        """
        self.present, missing = present, None if all(present) else present
        for bucket_plan in self.buckets:
            bucket_plan.bind(grads, missing, addresses)

    def refresh(self, shards: list[Tensor], grads: list[Tensor | None], present: list[bool]) -> None:
        """Bind this step's gradients, after parameters have moved, or gradients have become of other kinds."""
        for bucket_plan in self.buckets:
            bucket_plan.refresh(shards)
        self.bind(grads, present)
        for launch in itertools.chain(self.kernels, *self.meshes.values()):
            launch.kernel.refresh()

    def set_options(self, options: Mapping[Variant, Any], version: int) -> None:
        """Set options of which only numbers have changed."""
        for bucket_plan in self.buckets:
            bucket_plan.bucket.options = options[bucket_plan.variant]
        self.options_version = version

    def variants(self) -> set[Variant]:
        """The variants of the buckets."""
        return {bucket_plan.variant for bucket_plan in self.buckets}

    def square_sums(self) -> list[Tensor]:
        """The sums of the squares of all gradients, over all ranks that hold shards of them."""
        sums = [launch.square_sum() for launch in self.kernels]
        for reduce_group, launches in self.meshes.items():
            sums.append(reduce_group.total([(launch.dims, launch.square_sum()) for launch in launches]))
        return sums

    def step_shards(self, scale: Tensor | float, apply_mask: Tensor | None) -> None:
        """Step all shards; the kernels of a reduce group share each reduction round."""
        for reduce_group, launches in self.meshes.items():
            running = []
            for launch in launches:
                kernel, device, dtype, dims, centring = launch
                step = kernel.sharded_step(on_device(scale, device, dtype), on_device(apply_mask, device))
                running.append((dims, itertools.chain(centre(launch.centred()), step) if centring else step))
            while parts := [(dims, part) for dims, step in running if (part := next(step, None)) is not None]:
                reduce_group.all_reduce(parts)

    def release(self) -> None:
        """Release the gradients after the step, and tell autograd which tensors it has written."""
        for bucket_plan in self.buckets:
            bucket_plan.release()
        self.stepped = self.present
        # Autograd may have saved these tensors; compiled kernels do not increment their version counters.
        torch.autograd.graph.increment_version(
            self.all_written
            if all(self.present)
            else list(itertools.chain.from_iterable(itertools.compress(self.written, self.present)))
        )

    @cached_property
    def all_written(self) -> list[Tensor]:
        """The tensors that a step of all parameters writes."""
        return list(itertools.chain.from_iterable(self.written))

    def step_labels(self) -> list[str]:
        """The labels of the rows that took part in the last step."""
        return [label for labels, here in zip(self.labels, self.stepped, strict=True) if here for label in labels]

    def metrics(self) -> Tensor:
        """The metrics of the last step, and the learning rate that kernels used, `[labels, metrics + 1]`."""
        row_indices = [row for mine, here in zip(self.row_indices, self.stepped, strict=True) if here for row in mine]
        device, tables = self.buckets[0].bucket.metrics.device, []
        for bucket_plan in self.buckets:
            rows, lr = bucket_plan.bucket.metrics, bucket_plan.bucket.options.lr
            lrs = lr.to(rows).expand(len(rows), 1) if isinstance(lr, Tensor) else rows.new_full((len(rows), 1), lr)
            tables.append(torch.cat([rows, lrs], dim=1).to(device))
        return torch.cat(tables)[torch.tensor(row_indices, dtype=torch.int64, device=device)]


def on_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor on a device, in a dtype that the device has, and anything else unchanged."""
    return value.to(device, dtype) if isinstance(value, Tensor) else value


def scale_and_mask(
    settings: Settings, grad_scale: Tensor | None, found_inf: Tensor | None, square_sum: Callable[[], Tensor]
) -> tuple[Tensor | float, Tensor | None]:
    """Return the factor of all gradients, and the apply mask; without one, kernels write the step.

    Both stay on their devices, and the host does not wait for them.

    Args:
        settings: Whether gradients are clipped, and whether a step whose gradients are not finite is skipped.
        grad_scale: The factor by which a gradient scaler has multiplied them.
        found_inf: A tensor that is not 0 if the scaler found gradients that are not finite.
        square_sum: A function that returns the sum of their squares, as `square_sums.square_sum`; it is called only if
            an option needs it.
    """
    scale: Tensor | float = 1.0
    if grad_scale is not None:
        scale = grad_scale.to(wide(grad_scale.device)).reciprocal().reshape(())
    mask = None if found_inf is None else (found_inf == 0).reshape(())
    if settings.needs_all_grads:
        total = square_sum()
        # A model may be spread over devices: the scaler's is not always that of the first gradient.
        scale, mask = on_device(scale, total.device, total.dtype), on_device(mask, total.device)
        norm = root(total) if grad_scale is None else root(total) * scale
        largest = LARGEST_NORM
        if settings.max_grad_norm is not None:
            clip = (settings.max_grad_norm / norm).clamp(max=1).nan_to_num(nan=1.0)
            scale = clip if grad_scale is None else clip * scale
            if settings.max_grad_norm <= LARGEST_NORM:
                largest = torch.finfo(norm.dtype).max  # larger norms are clipped
        if settings.skip_nonfinite:
            fits = norm <= largest
            mask = fits if mask is None else mask & fits
    return scale, mask


def square_sum_of(
    plans: list[StepPlan], wait: PartCall, groups: list[Group], settings: Settings, known: Callable[[], Tensor] | None
) -> Tensor:
    """The sum of all gradients' squares; with a process group, over all of its ranks, even those without gradients."""
    sums = [] if known is None else [known()]
    for part, plan in enumerate(plans if known is None else ()):
        wait(part)
        sums += plan.square_sums()
    if sums:
        device, form = sums[0].device, sums[0].dtype
        parts = [each.to(device) if each.dtype == form else square_sum_on(device, each) for each in sums]
        total = torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0]
    else:
        device = next((param.device for group in groups for param in group["params"]), torch.device("cpu"))
        total = no_square_sums(device=device)
    if settings.grad_norm_group is not None:
        torch.distributed.all_reduce(total, group=settings.grad_norm_group)
    return total
