"""Layer-wise optimizers in Triton: a step in two passes, with norms of whole tensors between them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels import codec
from bighorn.kernels.bucket import Bucket
from bighorn.kernels.options import Options
from bighorn.kernels.triton.device import unsupported
from bighorn.kernels.triton.launch_group import CHUNK, GradientLayouts, LaunchGroup, RowIndex, constants_of, shard_of
from bighorn.kernels.triton.stepper import Stepper
from bighorn.kernels.triton.tables import Uploads

FORMS = {torch.int8: ("signed", "unsigned"), torch.float16: ("half", "half_root")}
"""The forms of both moments in blocks, as `codec_kernels.py` names them."""


class LayerLaunchGroup(LaunchGroup[Options]):
    """Rows that share compiled kernels, and the sums of their chunks."""

    def __init__(
        self, buckets: list[Bucket[Options]], indices: list[RowIndex], layouts: GradientLayouts, uploads: Uploads
    ) -> None:
        self.kernels = importlib.import_module(f"bighorn.kernels.triton.{buckets[0].options.algorithm}_kernels")
        self.layout: Any = getattr(self.kernels, "layout", None)
        self.sharded = any(bucket.shards for bucket in buckets)
        super().__init__(buckets, indices, layouts, uploads)
        self.width, factors = self.sizes()
        self.sums = torch.empty(self.width * self.program_to_row.numel(), dtype=torch.float64, device=self.device)
        self.factors = torch.empty(factors * len(self.indices), dtype=torch.float64, device=self.device)

    def sizes(self) -> tuple[int, int]:
        """Return the number of sums of a chunk, and of factors of a row."""
        raise NotImplementedError

    def first(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool) -> None:
        """Run the first pass, which leaves the sums of each chunk."""
        raise NotImplementedError

    def second(
        self, options: Tensor, scale: Tensor, apply_mask: Tensor, totals: Tensor | None, *, compile_only: bool
    ) -> None:
        """Run the second pass, from the totals of all ranks for shards, else from the sums of each chunk."""
        raise NotImplementedError

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: Any) -> dict[str, Any]:
        """See `LaunchGroup.compiled_for`; the form of the momentum in blocks is that of a first moment."""
        from bighorn.kernels.triton.common_kernels import LANES

        narrow = all(dtype.itemsize == 2 for dtype in (x, g, m)) and options.weight_rounding == "nearest"
        return {
            **constants_of(x, g, m, options),
            "M_FORM": FORMS[m][0] if m in FORMS else "",
            "BLOCK": LANES.value * (8 if narrow or m in FORMS else 4),
        }

    @staticmethod
    def chunks_of(x: Tensor, options: Any) -> int:
        """See `LaunchGroup.chunks_of`; all blocks of codes count as full ones."""
        codes = math.prod(codec.scales_shape(x.shape)) * codec.BLOCK
        return max(1, -(-(codes if getattr(options, "blocks", False) else x.numel()) // CHUNK))

    def own_columns(self) -> list[list[int]]:
        """See `LaunchGroup.own_columns`; the layout numbers the columns."""
        rows: list[list[int]] = []
        names = self.layout.ADDRESSES if self.layout else ()
        for index, i in self.indices:
            state = self.buckets[index].state
            addresses: list[int] = [state[name][i].data_ptr() if name in state else 0 for name in names]
            rows.append([*addresses, shard_of(self.buckets[index], i).numel])
        return rows

    def step(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False) -> None:
        """See `LaunchGroup.step`."""
        if self.sharded:  # without other ranks, all sums are complete
            for _ in self.sharded_step(options, scale, apply_mask, compile_only=compile_only):
                pass
            return
        self.first(options, scale, apply_mask, compile_only=compile_only)
        self.second(options, scale, apply_mask, None, compile_only=compile_only)

    def sharded_step(
        self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False
    ) -> Iterator[Tensor]:
        """See `LaunchGroup.sharded_step`; the sums of a tensor's chunks are added up together."""
        self.first(options, scale, apply_mask, compile_only=compile_only)
        first, stop = self.common.FIRST.value, self.common.STOP.value
        totals = self.shard_totals(apply_mask, first, stop, self.width, self.width, compile_only)
        yield totals
        self.second(options, scale, apply_mask, totals, compile_only=compile_only)


class LayerwiseStepper(Stepper[Options]):
    """A layer-wise optimizer for some buckets on one device."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: Any) -> str | None:
        """The reason why this backend cannot serve a tensor, or None."""
        reason, in_blocks = unsupported(param), getattr(options, "blocks", False)
        if in_blocks and param.dtype == torch.float64:
            return "its dtype is torch.float64, and moments in blocks are decoded to float32 in Triton"
        if (
            in_blocks
            and not reason
            and max(math.prod(param.shape[1:]), math.prod(codec.scales_shape(param.shape))) >= 2**31
        ):
            return "moments in blocks are counted in 32 bits in Triton: it has too many, or too many elements in a row"
        return reason
