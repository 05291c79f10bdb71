"""The C library: fused kernels on the CPU."""

from torch import Tensor

from bighorn.kernels.cpu import came, lamb
from bighorn.kernels.cpu.came import Came
from bighorn.kernels.cpu.lamb import Lamb
from bighorn.kernels.cpu.tensors import unsupported_shard as unsupported_shard_reason
from bighorn.kernels.options import CameOptions, LambOptions

__all__ = ["Came", "Lamb", "unsupported_reason", "unsupported_shard_reason"]


def unsupported_reason(param: Tensor, options: LambOptions | CameOptions) -> str | None:
    """The reason why the library cannot serve a tensor, or None."""
    if isinstance(options, CameOptions):
        return came.unsupported_reason(param, options)
    return lamb.unsupported_reason(param, options)
