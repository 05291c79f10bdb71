"""LARS on the C library."""

from __future__ import annotations

from torch import Tensor

from bighorn.kernels.cpu.layerwise import LayerwiseStepper
from bighorn.kernels.cpu.tensors import unsupported
from bighorn.kernels.options import LarsOptions


class Lars(LayerwiseStepper[LarsOptions]):
    """LARS in the library."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: LarsOptions) -> str | None:
        """See `Stepper.unsupported_reason`."""
        reason = unsupported(param)
        return "the C library keeps no momentum of LARS in blocks" if reason is None and options.blocks else reason
