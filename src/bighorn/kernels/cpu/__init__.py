"""The C library: fused kernels on the CPU."""

from torch import Tensor

from bighorn.kernels.cpu import lamb, tensors
from bighorn.kernels.cpu.came import Came
from bighorn.kernels.cpu.lamb import Lamb
from bighorn.kernels.options import CameOptions, LambOptions
from bighorn.kernels.reference import unsupported_shard_reason

__all__ = ["Came", "Lamb", "unsupported_reason", "unsupported_shard_reason"]


def unsupported_reason(param: Tensor, options: LambOptions | CameOptions) -> str | None:
    """The reason why the library cannot serve a tensor, or None."""
    if isinstance(options, CameOptions):
        return tensors.unsupported(param)
    return lamb.unsupported_reason(param, options)
