"""LAMB on the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from bighorn.kernels.bucket import Shard
from bighorn.kernels.cpu.layerwise import LayerwiseStepper
from bighorn.kernels.cpu.tensors import unsupported_reason
from bighorn.kernels.options import LambOptions


class Lamb(LayerwiseStepper[LambOptions]):
    """LAMB in the library."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: LambOptions, shard: Shard | None) -> str | None:
        """See `Stepper.unsupported_reason`."""
        del shard
        reason = unsupported_reason(param)
        if reason is None and options.blocks and param.dtype == torch.float64:
            return "moments in blocks are in float32 in the C library, and its dtype is torch.float64"
        return reason
