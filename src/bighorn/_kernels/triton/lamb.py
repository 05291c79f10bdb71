"""LAMB in Triton: the host side. Four launches step the whole model."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from bighorn._kernels.bucket import Bucket
from bighorn._kernels.options import LambOptions
from bighorn._kernels.triton.launch_group import GradDtypes, SlotIndex
from bighorn._kernels.triton.layerwise import LayerLaunchGroup, LayerwiseStepper
from bighorn._kernels.triton.tables import Uploads


class LambLaunchGroup(LayerLaunchGroup[LambOptions]):
    """Slots that share compiled kernels; slots without a trust ratio come last, since the second pass omits them."""

    def __init__(
        self, buckets: list[Bucket[LambOptions]], indices: list[SlotIndex], dtypes: GradDtypes, uploads: Uploads
    ) -> None:
        waits = [bucket.options.adapt for bucket in buckets]
        super().__init__(buckets, sorted(indices, key=lambda index: not waits[index[0]]), dtypes, uploads)
        waiting = sum(itertools.compress(self.chunks, [waits[index] for index, _ in self.indices]))
        self.waiting_to_slot = self.program_to_slot[:waiting]

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: LambOptions) -> dict[str, Any]:
        """See `LayerLaunchGroup.compiled_for`."""
        from bighorn._kernels.triton.common_kernels import LANES, TYPES

        constants = LayerLaunchGroup.compiled_for(x, g, m, options)
        if options.decay_mode == "l2" and not options.blocks:
            constants["BLOCK"] = LANES.value * 4  # with 8 elements a thread, ptxas of CUDA 13.1 spills 8 bytes
        return {
            **constants,
            "V": TYPES[torch.uint8 if m == torch.int8 else m],
            "DECAY_MODE": "ball" if options.hyperball else options.decay_mode,
        }


class Lamb(LayerwiseStepper[LambOptions]):
    """LAMB for some buckets on one device."""

    layout_options = ("rounding_seed", "adapt", "hyperball")  # weight decay can switch the trust ratio on and off

    group = LambLaunchGroup

    @staticmethod
    def kind(bucket: Bucket[LambOptions], i: int) -> tuple[object, ...]:
        """See `Stepper.kind`."""
        del i
        o = bucket.options
        return o.decay_mode, o.hyperball, o.weight_rounding, o.blocks
