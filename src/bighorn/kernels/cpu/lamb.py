"""LAMB on the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from bighorn.kernels.cpu.layerwise import LayerwiseStepper
from bighorn.kernels.cpu.tensors import unsupported
from bighorn.kernels.options import LambOptions


class Lamb(LayerwiseStepper[LambOptions]):
    """LAMB in the library."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: LambOptions) -> str | None:
        """See `Stepper.unsupported_reason`."""
        reason = unsupported(param)
        if reason is None and options.blocks and param.dtype == torch.float64:
            return "moments in blocks are in float32 in the C library, and its dtype is torch.float64"
        return reason
