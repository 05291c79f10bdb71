"""CAME on the C library: its structures, and one call for the whole model."""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket, matrix_shape
from bighorn._kernels.cpu.came_shards import Shards
from bighorn._kernels.cpu.library import STRUCTURES, address, loaded
from bighorn._kernels.cpu.stepper import Bound, Stepper, words
from bighorn._kernels.cpu.tensors import STATE_TYPES, weights
from bighorn._kernels.options import CameOptions


class Came(Stepper[CameOptions]):
    """CAME in the library."""

    def __init__(self, buckets: list[Bucket[CameOptions]]) -> None:
        super().__init__(buckets)
        self.workspace = torch.empty(0, dtype=torch.float64, device="cpu")

    @cached_property
    def shard_sums(self) -> Shards:
        """The positions of the slots in whole tensors, and the sums that are added up over ranks."""
        return Shards(self.buckets)

    @staticmethod
    def make_slot(bucket: Bucket[CameOptions], i: int, index: int, positions: array[int] | None) -> Any:
        """See `Stepper.make_slot`."""
        addresses = bucket.addresses(i)
        matrices, height, width = matrix_shape(bucket.params[i].shape, bucket.options.factor)
        return STRUCTURES["FactoredSlot"](
            weights=weights(bucket, i, positions, addresses.pop("aux")),
            **addresses,
            matrices=matrices,
            height=height,
            width=width,
            state_type=STATE_TYPES[bucket.state["exp_avg"][i].dtype],
            options=index,
            factored=bucket.options.factor is not None,
        )

    def make_shards(self) -> Tensor | None:
        """See `Stepper.make_shards`."""
        return words(list(self.shard_sums.table)) if any(bucket.shards for bucket in self.buckets) else None

    def reserve(self, threads: int) -> None:
        """Allocate a workspace for this number of threads."""
        slots, gradients = self.slots.data_ptr(), self.gradients.data_ptr()
        shards = None if self.shards is None else self.shards.data_ptr()
        size = loaded().bighorn_factored_workspace(slots, shards, gradients, len(self.slots), threads)
        if size > self.workspace.numel():
            self.workspace = torch.empty(size, dtype=torch.float64, device="cpu")

    def launch(self, bound: Bound, grad_scale: float) -> None:
        """Make one CAME step of all buckets, without counting it."""
        self._run(bound, grad_scale, None, 0)

    def sharded_step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Make one step of shards, as `reference.Came.sharded_step`: the same rounds with the same number of sums."""
        bound = self.take()
        if apply_mask is not None and not apply_mask:
            return
        scale, shards = float(grad_scale), self.shard_sums
        table = self.shards if self.shards is not None else words(list(shards.table))  # None if all tensors are whole
        for sums in shards.sums:
            sums.zero_()
        for i, (sums, dtype) in enumerate(zip(shards.sums, shards.dtypes, strict=True)):
            self._run(bound, scale, table, i)
            sent = sums.to(dtype)
            yield sent
            if sent is not sums:
                sums.copy_(sent)
        self._run(bound, scale, table, len(shards.sums))
        loaded().bighorn_advance(bound.counts, bound.counted)

    def _run(self, bound: Bound, grad_scale: float, shards: Tensor | None, index: int) -> None:
        beta2s = array("d", itertools.chain.from_iterable(map(_beta2s, self.buckets)))
        with self.lock:
            came_step()(
                bound.how,
                bound.options,
                self.slots.data_ptr(),
                None if shards is None else shards.data_ptr(),
                self.gradients.data_ptr(),
                bound.addresses,
                address(beta2s),
                bound.order,
                bound.slots,
                grad_scale,
                index,
                self.workspace.data_ptr(),
            )


@functools.cache
def came_step() -> Any:
    """Return the library's function."""
    function, address = loaded().bighorn_came_step, ctypes.c_void_p
    run = ctypes.POINTER(STRUCTURES["RunConfig"])
    function.argtypes = [run, *[address] * 7, ctypes.c_int64, ctypes.c_double, ctypes.c_int, address]
    return function


def _beta2s(bucket: Bucket[CameOptions]) -> list[float]:
    o = bucket.options
    if o.decay_rate is None:
        return [o.betas[1]] * len(bucket.steps)
    return [1 - (step.item() + 1) ** -o.decay_rate for step in bucket.steps]
