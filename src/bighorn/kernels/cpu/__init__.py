"""The C library: fused kernels on the CPU."""

from torch import Tensor

from bighorn.kernels.cpu import came, lamb
from bighorn.kernels.cpu.came import Came
from bighorn.kernels.cpu.lamb import Lamb
from bighorn.kernels.cpu.tensors import unsupported_shard as why_not_shard
from bighorn.kernels.options import CameOptions, LambOptions

__all__ = ["Came", "Lamb", "why_not", "why_not_shard"]


def why_not(param: Tensor, options: LambOptions | CameOptions) -> str | None:
    """Why the library cannot serve such a tensor, or None."""
    return came.why_not(param, options) if isinstance(options, CameOptions) else lamb.why_not(param, options)
