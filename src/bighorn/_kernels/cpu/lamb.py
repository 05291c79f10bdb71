"""LAMB on the C library."""

from __future__ import annotations

from torch import Tensor

from bighorn._kernels.bucket import Shard
from bighorn._kernels.cpu.layerwise import LayerwiseStepper
from bighorn._kernels.cpu.tensors import unsupported_reason
from bighorn._kernels.options import LambOptions


class Lamb(LayerwiseStepper[LambOptions]):
    """LAMB in the library."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: LambOptions, shard: Shard | None) -> str | None:
        """See `Stepper.unsupported_reason`."""
        del options, shard
        return unsupported_reason(param)
