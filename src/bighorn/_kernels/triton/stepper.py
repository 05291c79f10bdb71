"""The base of the algorithms: a step of all launch groups, after an update of their tables."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import torch
from torch import Tensor

from bighorn._kernels import codec
from bighorn._kernels.arithmetic import count_step
from bighorn._kernels.bucket import Bucket, Shard
from bighorn._kernels.options import Options
from bighorn._kernels.triton.device import guard, unsupported_reason
from bighorn._kernels.triton.launch_group import GradDtypes, LaunchGroup, SlotIndex
from bighorn._kernels.triton.tables import CachedTable, Uploads, keep_alive

if TYPE_CHECKING:
    from bighorn._kernels.triton.columns import OptionColumns


class Stepper(Generic[Options]):
    """An algorithm for some buckets on one device."""

    layout_options: ClassVar[tuple[str, ...]] = ("rounding_seed",)
    """The options whose change requires new tables."""

    group: ClassVar[type[LaunchGroup[Any]]]
    """The class of the launch groups."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: Any, shard: Shard | None) -> str | None:
        """The reason why this backend cannot serve a tensor, or None."""
        shape = param.shape
        if reason := unsupported_reason(param):
            return reason
        if options.blocks and max(shape[1:].numel(), math.prod(codec.scales_shape(shape))) >= 2**31:
            return "moments in blocks are counted in 32 bits in Triton: it has too many, or too many elements in a slot"
        if shard is not None and options.weight_rounding == "stochastic" and len(shard.split - {0}) > 2:
            return "Triton's random bits are for tensors that are cut up along three dims at most"
        return None

    @property
    def reads_tensors(self) -> bool:
        """As `kernels.Kernel.reads_tensors`: whether new options need new tables, which `prepare` makes."""
        return self.layout_keys != self._layout_keys()

    def __init__(self, buckets: list[Bucket[Options]]) -> None:
        self.buckets: list[Bucket[Options]] = buckets
        self.device = buckets[0].metrics.device
        self.guard = guard(self.device)
        algorithm = buckets[0].options.algorithm
        self.columns: OptionColumns = importlib.import_module(f"bighorn._kernels.triton.{algorithm}_layout").option
        self.uploads = Uploads(self.device)
        self.options_table = CachedTable(torch.float64, self.uploads)
        self.uploaded_options: Sequence[object] = [None] * len(buckets)
        self.one = torch.ones((), dtype=torch.float64, device=self.device)
        self.true = torch.ones((), dtype=torch.bool, device=self.device)
        self.none = torch.empty(0, dtype=torch.float64, device=self.device)
        served = {step.data_ptr() for bucket in buckets for step in bucket.steps}
        # A stacked parameter without slices has no slot, but its steps are counted like any other's.
        self.counts_without_rows: list[tuple[Bucket[Options], Tensor]] = [
            (bucket, step) for bucket in self.buckets for step in bucket.unique_steps if step.data_ptr() not in served
        ]
        self.grad_dtypes: GradDtypes = {}  # of all slots, since some gradients are missing when tables are built again
        self._read_gradients()
        self.build_tables()

    def refresh(self) -> None:
        """Update the tables, after parameters moved or gradients changed their dtypes."""
        dtypes = dict(self.grad_dtypes)
        self._read_gradients()
        if dtypes != self.grad_dtypes:
            self.build_tables()
        else:
            self.uploads.begin_step()
            self.uploads.streams.clear()  # `prepare` records all tables anew
            with self.guard:
                for group in self.groups:
                    group.refresh()

    def _read_gradients(self) -> None:
        self.grad_dtypes |= {
            (index, i): grad.dtype
            for index, bucket in enumerate(self.buckets)
            for i, grad in enumerate(bucket.grads)
            if grad is not None
        }

    def launch_group(self, indices: list[SlotIndex]) -> LaunchGroup[Options]:
        """Return the launch group of slots of one kind."""
        return self.group(self.buckets, indices, self.grad_dtypes, self.uploads)

    @staticmethod
    def kind(bucket: Bucket[Options], i: int) -> tuple[object, ...]:
        """Return the properties, besides dtypes, that must be equal for slots that the same compiled kernels serve."""
        del i
        return bucket.options.weight_rounding, bucket.options.blocks

    def build_tables(self) -> None:
        """Sort the slots into groups, and compile their kernels, so that none fails after another one has written."""
        self.layout_keys: list[list[object]] = self._layout_keys()
        self.uploads.streams.clear()
        with self.guard:
            self.groups: list[LaunchGroup[Options]] = list(map(self.launch_group, self._alike()))
            self.update_options()
            for group in self.groups:
                group.step(self.options, self.one, self.true, compile_only=True)

    def prepare(self) -> None:
        """Do everything that can fail: build and upload tables."""
        self.uploads.begin_step()
        if self.layout_keys != self._layout_keys():
            self.build_tables()
        if self.uploads.stream is not None and self.uploads.stream not in self.uploads.streams:
            self.record_stream(self.uploads.stream)
        with self.guard:
            self.update_options()
            for group in self.groups:
                group.update_gradients()

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of tables, once freed, from being used again until this stream has finished with it, too."""
        self.uploads.streams.append(stream)
        for holder in (self, self.options_table, *(each for group in self.groups for each in group.holders())):
            for held in vars(holder).values():
                if isinstance(held, Tensor):
                    held.record_stream(stream)

    def update_options(self) -> None:
        """Upload the options of all buckets, if they have changed. A graph has a table of its own."""
        options = [bucket.options for bucket in self.buckets]
        # Options are compared by identity, since the host would wait for learning rates that are tensors.
        if self.uploads.recording or not all(map(operator.is_, options, self.uploaded_options)):
            self.options = self.options_table.of([value for each in options for value in self._option_row(each)])
            self.uploaded_options = [None] * len(options) if self.uploads.recording else options

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares, a 0-dim float64 tensor."""
        with self.guard:
            return torch.cat([self.none, *(group.square_sums() for group in self.groups)]).sum()

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of all buckets, as `reference.Stepper.step`."""
        with self.guard:
            options, scale, apply_mask = self.on_device(grad_scale, apply_mask)
            for group in self.groups:
                group.step(options, scale, apply_mask)
            self.finish(apply_mask)

    def sharded_step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Make one step of shards, as `reference.Stepper.sharded_step`; all groups reduce their sums together."""
        with self.guard:
            options, scale, apply_mask = self.on_device(grad_scale, apply_mask)
            running = [group.sharded_step(options, scale, apply_mask) for group in self.groups]
            parts = [sums for part in running if (sums := next(part, None)) is not None]
        while parts:
            sums = torch.cat(parts)
            yield sums
            with self.guard:
                for part, arrived in zip(parts, torch.split(sums, [part.numel() for part in parts]), strict=True):
                    part.copy_(arrived)
                parts = [sums for part in running if (sums := next(part, None)) is not None]
        with self.guard:
            self.finish(apply_mask)

    def on_device(self, grad_scale: Tensor | float, apply_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the options, the factor of gradients and the apply mask, all on the device."""
        if self.uploads.recording:
            keep_alive((self.one, self.true))
        if not isinstance(grad_scale, Tensor):
            grad_scale = self.one if grad_scale == 1 else self.one * grad_scale
        for index, bucket in enumerate(self.buckets):
            if isinstance(bucket.options.lr, Tensor):
                self.options.view(len(self.buckets), -1)[index, 0].copy_(bucket.options.lr)
        return self.options, grad_scale.to(torch.float64), self.true if apply_mask is None else apply_mask

    def finish(self, apply_mask: Tensor) -> None:
        """Count the steps that no kernel counts."""
        counts = self.counts_without_rows
        count_step([step for bucket, step in counts if any(step is each for each in bucket.unique_steps)], apply_mask)

    def _layout_keys(self) -> list[list[object]]:
        return [[getattr(bucket.options, name) for name in self.layout_options] for bucket in self.buckets]

    def _option_row(self, o: Options) -> list[float]:
        # A learning rate that is a tensor is copied to the device's table later, device to device.
        common = [0.0 if isinstance(o.lr, Tensor) else o.lr, -1.0 if o.maximize else 1.0, o.weight_decay]
        return common + self.columns.row(o)

    def _alike(self) -> list[list[SlotIndex]]:
        """Return the slots of all buckets, grouped by the properties that kernels are compiled for."""
        groups: dict[tuple[object, ...], list[SlotIndex]] = {}
        for index, bucket in enumerate(self.buckets):
            for i, x in enumerate(bucket.params):
                key = (
                    x.dtype,
                    self.grad_dtypes[index, i],
                    bucket.first_moment(i).dtype,
                    self.kind(bucket, i),
                )
                groups.setdefault(key, []).append((index, i))
        return list(groups.values())
