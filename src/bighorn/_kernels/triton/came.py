"""CAME in Triton: the host side."""

from __future__ import annotations

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket, Shard, matrix_shape
from bighorn._kernels.options import CameOptions
from bighorn._kernels.triton.came_launches import CameLaunchGroup
from bighorn._kernels.triton.came_shards import CameShardLaunchGroup, split_of
from bighorn._kernels.triton.launch_group import SlotIndex
from bighorn._kernels.triton.stepper import Stepper
from bighorn._kernels.triton.tiles import tile_grid

SMALL = 1024
"""A matrix with fewer elements is small."""

MOST_SMALL = 4096
"""The largest number of small matrices in a tensor that this backend serves, since each takes programs of its own."""


class Came(Stepper[CameOptions]):
    """CAME for some buckets on one device."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: CameOptions, shard: Shard | None) -> str | None:
        """The reason why this backend cannot serve a tensor, or None."""
        reason = Stepper.unsupported_reason(param, options, shard)
        if reason or options.factor is None:
            return reason
        shape = tile_grid(param.shape, options.factor)
        if shape.count > MOST_SMALL and shape.height * shape.width < SMALL:
            return f"{shape.count} matrices of {shape.height} x {shape.width} are too many and too small for Triton"
        if shard is not None and (count := matrix_shape(torch.Size(shard.shape), options.factor)[0]) > MOST_SMALL:
            return f"parts of {count} matrices may be too many and too small for Triton"
        return None

    def launch_group(self, indices: list[SlotIndex]) -> CameLaunchGroup:
        """See `Stepper.launch_group`."""
        group = CameShardLaunchGroup if self.buckets[indices[0][0]].shards else CameLaunchGroup
        return group(self.buckets, indices, self.grad_dtypes, self.uploads)

    @staticmethod
    def kind(bucket: Bucket[CameOptions], i: int) -> tuple[object, ...]:
        """See `Stepper.kind`."""
        o = bucket.options
        wide = None if o.factor is None else tile_grid(bucket.params[i].shape, o.factor).wide
        split = split_of(bucket.shards[i], o.factor) if bucket.shards else None
        return wide, o.weight_rounding, o.scale_parameter, split
