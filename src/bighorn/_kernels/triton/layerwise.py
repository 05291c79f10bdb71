"""Layer-wise optimizers in Triton: a step in two passes, with norms of whole tensors between them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket
from bighorn._kernels.options import Options
from bighorn._kernels.triton.launch_group import GradDtypes, LaunchGroup, SlotIndex, constants_of
from bighorn._kernels.triton.stepper import Stepper
from bighorn._kernels.triton.tables import Uploads

FORMS = {torch.int8: ("signed", "unsigned"), torch.uint8: ("int4", "unsigned")}
"""The forms of both moments in blocks, as `codec_kernels.py` names them."""


class LayerLaunchGroup(LaunchGroup[Options]):
    """Slots that share compiled kernels, and the sums of their chunks.

    The module of an algorithm's kernels has `PASSES`: the kernels of the first pass, which leaves the sums of each
    chunk, and of the second, which takes their totals, for shards over all ranks.
    """

    def __init__(
        self, buckets: list[Bucket[Options]], indices: list[SlotIndex], dtypes: GradDtypes, uploads: Uploads
    ) -> None:
        from bighorn._kernels.triton import layer_layout

        self.layout = layer_layout
        self.sharded = any(bucket.shards for bucket in buckets)
        super().__init__(buckets, indices, dtypes, uploads)
        self.constants["PER_CHUNK"] = not self.sharded
        self.width = buckets[indices[0][0]].options.sums
        slots, chunks = len(self.indices), self.program_to_slot.numel()
        self.totals = self.sums = torch.empty(self.width * chunks, dtype=torch.float64, device=self.device)
        self.factors = torch.empty(layer_layout.FACTOR.value * slots, dtype=torch.float64, device=self.device)
        self.passes = importlib.import_module(f"bighorn._kernels.triton.{buckets[0].options.algorithm}_kernels").PASSES

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: Any) -> dict[str, Any]:
        """See `LaunchGroup.compiled_for`; the dtype of the first moment determines the second's."""
        from bighorn._kernels.triton.common_kernels import LANES

        m_form, v_form = FORMS[m] if options.blocks else ("", "")
        # A thread moves 16 bytes of the widest dtype: with more, the narrow ones would pass through shared memory.
        narrow = all(dtype.itemsize == 2 for dtype in (x, g, m)) and options.weight_rounding == "nearest"
        return {
            **constants_of(x, g, m, options),
            "M_FORM": m_form,
            "V_FORM": v_form,
            "BLOCK": LANES.value * (8 if narrow or m_form else 4),
        }

    def sharded_step(
        self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False
    ) -> Iterator[Tensor]:
        """See `LaunchGroup.sharded_step`; the sums of a tensor's chunks are added up together."""
        self.options, self.scale, self.apply_mask, self.compile_only = options, scale, apply_mask, compile_only
        for kernel in self.passes[0]:
            self.launch(kernel)
        if self.sharded:
            yield self.shard_totals(self.columns.slot.FIRST.value, self.columns.slot.STOP.value, self.width, self.width)
        for kernel in self.passes[1]:
            self.launch(kernel)


class LayerwiseStepper(Stepper[Options]):
    """A layer-wise optimizer for some buckets on one device."""

    group = LayerLaunchGroup
