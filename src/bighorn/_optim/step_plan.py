"""The step plan: buckets and kernels, prepared once. Also computes the factor of the gradients and the apply mask."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bighorn._capabilities import wide
from bighorn._distributed.flat import FlatGroup
from bighorn._distributed.sharding import RankSums, ShardedDims, counts_on_this_rank
from bighorn._kernels import Bucket
from bighorn._optim.algorithm import Group, Variant
from bighorn._optim.centring import Centred, centre
from bighorn._optim.placed import Placed
from bighorn._optim.settings import Settings
from bighorn._square_sums import no_square_sums, root, square_sum_on, square_sums

LARGEST_NORM = 2.0**53
"""Up to this 2-norm of all gradients, no square overflows float32, the dtype of moments.

A sum of 2^18 squares of CAME's updates, which can be as large as the largest gradient, does not overflow either.
"""


State = dict[str, Any]

PartCall = Callable[[int], None]
"""A function that is called with the index of a part of a step."""


@dataclass
class BucketPlan:
    """A bucket, and the entries whose rows it holds."""

    bucket: Bucket[Any]
    variant: Variant
    entries: list[Placed] = field(default_factory=list)
    direct: bool = True
    """Whether parameters and gradients are used as they are, without slices or copies."""
    is_plan: bool = False
    """Whether the entries are all of the plan, in its order."""
    placed: bool = True
    """Whether the entries hold their parameters."""
    present: list[Placed] = field(default_factory=list)
    """The entries that take part in this step."""
    centred: list[Centred] = field(default_factory=list)
    """This step's gradients, if the means of their rows are to be subtracted."""

    def add(self, placed: Placed, moments: dict[str, Tensor]) -> None:
        """Add the rows of an entry."""
        bucket, first, params = self.bucket, len(self.bucket.params), placed.entry.slices(placed.dense)
        count = len(params)
        self.entries.append(placed)
        self.direct &= placed.direct
        bucket.params += params
        bucket.shards += placed.entry.slot_shards()
        for name, value in moments.items():
            bucket.state.setdefault(name, []).extend(placed.entry.slices(value))
        placed.slots = range(first, first + count)
        bucket.steps += [placed.step] * count
        bucket.param_ids += [zlib.crc32(placed.entry.label.encode(errors="surrogatepass"))] * count
        bucket.slot_offsets += [i * placed.slot_size for i in range(count)] if placed.entry.stacked else [0]

    @cached_property
    def select(self) -> Callable[[list[Any]], list[Any]]:
        """A function from the values of all parameters of the plan to the values of the entries."""
        indices = [placed.index for placed in self.entries]
        if len(indices) == 1:
            return lambda values: [values[indices[0]]]
        getter = itemgetter(*indices)
        return lambda values: list(getter(values))

    @cached_property
    def all_steps(self) -> list[Tensor]:
        """The step counts of all entries."""
        return [placed.step for placed in self.entries if placed.counts]

    def bind(self, grads: list[Tensor | None], present: list[bool] | None, addresses: list[int] | None) -> None:
        """Bind this step's gradients, and update the dense copies of parameters; all are present if that is None."""
        bucket, selected = self.bucket, self.select(grads)
        bucket.grads, bucket.unique_steps, self.present = selected, self.all_steps, self.entries
        bucket.grad_addresses = (selected, self.select(addresses)) if addresses is not None else ([], [])
        if present is not None:
            self.present = list(itertools.compress(self.entries, self.select(present)))
            bucket.unique_steps = [placed.step for placed in self.present if placed.counts]
        if self.direct:
            return
        pairs = list(zip(self.entries, selected, strict=True))
        bucket.grads = [slot for placed, grad in pairs for slot in placed.grad_slots(grad)]
        self.centred = [placed.centred(grad) for placed, grad in pairs] if self.variant.centres else []
        for placed in self.present:
            placed.copy_in()

    @cached_property
    def copies(self) -> bool:
        """Whether other ranks have copies of tensors that this rank holds completely."""
        return any(placed.entry.layout is not None and placed.entry.ranks is None for placed in self.entries)

    def local_square_sum(self, process_group: Any) -> Tensor:
        """The sum of the squares of gradients that this rank holds completely and counts in the process group."""
        counted: list[Tensor | None] = []
        for i, placed in enumerate(self.entries):
            if placed.entry.ranks is None and counts_on_this_rank(placed.entry.holders, process_group):
                slots = placed.slots
                counted += [self.centred[i].grad] if self.centred else self.bucket.grads[slots.start : slots.stop]
        grads = [grad for grad in counted if grad is not None]
        return square_sums(grads, self.bucket.metrics.device).sum(dim=0)

    def expect(self, grads: list[Tensor | None]) -> None:
        """Prepare for these kinds of gradients."""
        for placed in self.entries:
            if (grad := grads[placed.index]) is not None:
                placed.expect(grad)
        self.direct = all(placed.direct for placed in self.entries)

    def fill(self, shards: list[Tensor], states: list[State]) -> None:
        """Hold the parameters, of which these are this rank's shards, and their state, some of them in other forms."""
        self.place(shards)
        for placed in self.entries:
            self.bucket.params += placed.entry.slices(placed.dense)
            for name, value in placed.moments(states[placed.index]).items():
                self.bucket.state[name] += placed.entry.slices(value)

    def place(self, shards: list[Tensor]) -> None:
        """Let the entries hold the parameters."""
        for placed in self.entries:
            placed.take(shards[placed.index])
        self.placed = True

    def let_go(self) -> None:
        """Let the entries hold no parameter."""
        for placed in self.entries:
            del placed.view
            if not placed.copied:
                del placed.dense
        self.placed = False

    def release(self) -> None:
        """Write dense copies back to their parameters, and release the gradients."""
        self.bucket.grads, self.bucket.grad_addresses, self.centred = [], ([], []), []
        for placed in self.present if not self.direct else ():
            placed.copy_out()


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
    """The reusable part of a step, valid until a parameter's storage changes."""

    buckets: list[BucketPlan]
    kernels: list[Launch]
    """Kernels for tensors that this rank holds completely."""
    meshes: dict[RankSums, list[Launch]]
    """Kernels for shards, by reduce group."""
    labels: list[list[str]]
    """The labels of the rows of each parameter."""
    slot_indices: list[list[int]]
    """The rows of each parameter, counted through all buckets."""
    options_version: int
    """The version of the buckets' options."""
    reads_tensors: bool = True
    """Whether kernels read the buckets' tensors at each step; others read the addresses of `refresh`."""
    filled: bool = True
    """Whether the buckets hold tensors. Between steps they do not, so that a program can free them."""
    written: list[Any] = field(default_factory=list)
    """The parameters of this step, and the entries of their state."""
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

    def expect(self, shards: list[Tensor], grads: list[Tensor | None]) -> None:
        """Prepare for these kinds of gradients."""
        for bucket_plan in self.buckets:
            bucket_plan.place(shards)
            bucket_plan.expect(grads)
        self.note_reads()

    def refresh(self, grads: list[Tensor | None], present: list[bool]) -> None:
        """Bind this step's gradients to filled buckets, after parameters moved or gradients changed their kinds."""
        self.bind(grads, present)
        for launch in self.launches():
            launch.kernel.refresh()

    def note_reads(self) -> None:
        """Note whether a step reads tensors of the buckets."""
        entries = [placed for bucket_plan in self.buckets for placed in bucket_plan.entries if not bucket_plan.direct]
        self.reads_tensors = any(launch.kernel.reads_tensors for launch in self.launches()) or any(
            placed.copied or placed.copy_dtype is not None or placed.entry.variant.centres for placed in entries
        )

    def note_written(self, params: list[Tensor], present: list[bool], states: list[State]) -> None:
        """Note the parameters that the step writes, and the entries of their state."""
        entries = map(dict.values, itertools.compress(states, present))
        self.written = [*itertools.compress(params, present), *itertools.chain.from_iterable(entries)]

    def fill(self, shards: list[Tensor], states: list[State]) -> None:
        """Let the buckets hold the parameters, of which these are this rank's shards, and their state."""
        if self.filled:  # a step has raised
            self.let_go()
        for bucket_plan in self.buckets:
            bucket = bucket_plan.bucket
            if not bucket_plan.direct:
                bucket_plan.fill(shards, states)
                continue
            params, param_states = shards, states
            if not bucket_plan.is_plan:
                params, param_states = bucket_plan.select(shards), bucket_plan.select(states)
            bucket.params = [*params]
            bucket.state = {name: list(map(itemgetter(name), param_states)) for name in bucket.state}
        self.filled = True

    def let_go(self) -> None:
        """Let the buckets hold no parameter and no state, except step counts."""
        for bucket_plan in self.buckets:
            bucket = bucket_plan.bucket
            bucket.params, bucket.state = [], {name: [] for name in bucket.state}
            if bucket_plan.placed:
                bucket_plan.let_go()
        self.filled = False

    def launches(self) -> Iterator[Launch]:
        """All kernels."""
        return itertools.chain(self.kernels, *self.meshes.values())

    def set_options(self, options: Mapping[Variant, Any], version: int) -> None:
        """Set options of which only numbers have changed."""
        for bucket_plan in self.buckets:
            bucket_plan.bucket.options = options[bucket_plan.variant]
        self.options_version = version

    def variants(self) -> set[Variant]:
        """The variants of the buckets."""
        return {bucket_plan.variant for bucket_plan in self.buckets}

    def read_grads(self) -> None:
        """Copy the gradients that have another memory order than their parameters, before the first kernel reads."""
        for bucket_plan in self.buckets:
            for placed in bucket_plan.present if not bucket_plan.direct else ():
                placed.read_grad()

    def square_sums(self, process_group: Any) -> list[Tensor]:
        """The sums of the squares of all gradients, over all ranks that hold shards of them.

        One rank of a process group, over which they will be added up, has the sum of a distributed tensor, others 0.
        """
        if process_group is None or not any(plan.copies for plan in self.buckets):
            sums = [launch.square_sum() for launch in self.kernels]
        else:
            sums = [plan.local_square_sum(process_group) for plan in self.buckets]
        for reduce_group, launches in self.meshes.items():
            total = reduce_group.total([(launch.dims, launch.square_sum()) for launch in launches])
            sums.append(total if counts_on_this_rank(reduce_group.holders, process_group) else torch.zeros_like(total))
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
        """Release the tensors after the step, and report the written ones to autograd."""
        for bucket_plan in self.buckets:
            bucket_plan.release()
        if self.filled:
            self.let_go()
        self.stepped = self.present
        # Autograd may have saved these tensors; compiled kernels do not increment their version counters.
        try:
            torch.autograd.graph.increment_version(self.written)
        except (RuntimeError, TypeError):  # a user's own entry in the state
            torch.autograd.graph.increment_version([each for each in self.written if isinstance(each, Tensor)])
        self.written.clear()

    def step_labels(self) -> list[str]:
        """The labels of the slots that took part in the last step."""
        return [label for labels, stepped in zip(self.labels, self.stepped, strict=True) if stepped for label in labels]

    def metrics(self) -> Tensor:
        """The metrics of the last step, and the learning rate that kernels used, `[labels, metrics + 1]`."""
        indices = [i for each, stepped in zip(self.slot_indices, self.stepped, strict=True) if stepped for i in each]
        device, tables = self.buckets[0].bucket.metrics.device, []
        for bucket_plan in self.buckets:
            rows, lr = bucket_plan.bucket.metrics, bucket_plan.bucket.options.lr
            lrs = lr.to(rows).expand(len(rows), 1) if isinstance(lr, Tensor) else rows.new_full((len(rows), 1), lr)
            tables.append(torch.cat([rows, lrs], dim=1).to(device))
        return torch.cat(tables)[torch.tensor(indices, dtype=torch.int64, device=device)]


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
        # A model may be spread over devices: the scaler's may differ from the first gradient's.
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
    plans: list[StepPlan], wait: PartCall, groups: list[Group], settings: Settings, squares: Callable[[], Tensor] | None
) -> Tensor:
    """The sum of all gradients' squares; with a process group, over all of its ranks, even those without gradients."""
    sums = [] if squares is None else [squares()]
    for part, plan in enumerate(plans if squares is None else ()):
        wait(part)
        plan.read_grads()
        sums += plan.square_sums(settings.grad_norm_group)
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
