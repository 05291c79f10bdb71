"""Layer-wise optimizers on the C library: the table of slots, and one call for the whole model."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket, Shard
from bighorn._kernels.cpu.library import NO_BLOCKS, SCRATCH, STRUCTURES, layer_step, loaded
from bighorn._kernels.cpu.stepper import Bound, Stepper
from bighorn._kernels.cpu.tensors import STATE_TYPES, unsupported_reason, weights
from bighorn._kernels.options import Options

BOTH, FIRST, SECOND = 0, 1, 2
"""The phases of a step, as in csrc/abi.h."""

SUMS = 3
"""The numbers in LayerSums of csrc/layerwise.h, the sums over each slot; the last is for Hyperball alone."""


class LayerwiseStepper(Stepper[Options]):
    """The base of the optimizers whose steps depend on norms of whole tensors."""

    partial: Tensor
    """The sums of the chunks of a slot that all threads share: two sets."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: Any, shard: Shard | None) -> str | None:
        """See `Stepper.unsupported_reason`; moments in blocks are served if an optimizer allows it."""
        del shard
        return unsupported_reason(param) or (NO_BLOCKS if options.blocks else None)

    @staticmethod
    def make_slot(bucket: Bucket[Options], i: int, index: int, positions: array[int] | None) -> Any:
        """See `Stepper.make_slot`."""
        addresses = bucket.addresses(i)
        return STRUCTURES["LayerSlot"](
            weights=weights(bucket, i, positions, addresses.pop("aux")),
            **addresses,
            inner=math.prod(bucket.params[i].shape[1:]) if "exp_avg_scale" in addresses else 0,
            state_type=STATE_TYPES[bucket.state["exp_avg"][i].dtype],
            options=index,
        )

    def reserve(self, threads: int) -> None:
        """Allocate the partial sums, which do not depend on the number of threads."""
        del threads
        most = loaded().bighorn_layer_chunks(self.slots.data_ptr(), self.gradients.data_ptr(), None, len(self.slots))
        self.partial = torch.empty(2 * SUMS * most, dtype=torch.float64, device="cpu")

    def launch(self, bound: Bound, grad_scale: float) -> None:
        """Make one step of all buckets, without counting it."""
        self._run(bound, grad_scale, BOTH, None)

    def sharded_step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Make one step of shards, as `reference.Stepper.sharded_step` in one round."""
        bound = self.take()
        if apply_mask is not None and not apply_mask:
            return
        scale = float(grad_scale)
        count = max(bucket.options.sums for bucket in self.buckets)
        sums = torch.zeros(len(self.slots), count, dtype=torch.float64, device="cpu")  # 0 for a slot without a gradient
        self._run(bound, scale, FIRST, sums, count)
        yield sums.view(-1)
        self._run(bound, scale, SECOND, sums, count)
        loaded().bighorn_advance(bound.counts, bound.counted)

    def _run(self, bound: Bound, grad_scale: float, phase: int, sums: Tensor | None, count: int = 0) -> None:
        buffer = SCRATCH.tensor
        with self.lock:
            layer_step(self.buckets[0].options.algorithm)(
                bound.how,
                bound.options,
                self.slots.data_ptr(),
                self.gradients.data_ptr(),
                bound.addresses,
                bound.order,
                bound.slots,
                grad_scale,
                self.partial.data_ptr(),
                buffer.data_ptr(),
                buffer.nbytes,
                phase,
                None if sums is None else sums.data_ptr(),
                count,
            )
