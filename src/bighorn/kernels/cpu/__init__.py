"""The C library: fused kernels on the CPU."""

from torch import Tensor

from bighorn.kernels.cpu import layerwise, tensors
from bighorn.kernels.cpu.came import Came
from bighorn.kernels.cpu.layerwise import Lamb, Lars
from bighorn.kernels.options import AnyOptions, CameOptions
from bighorn.kernels.reference import unsupported_shard_reason

__all__ = ["Came", "Lamb", "Lars", "unsupported_reason", "unsupported_shard_reason"]


def unsupported_reason(param: Tensor, options: AnyOptions) -> str | None:
    """The reason why the library cannot serve a tensor, or None."""
    if isinstance(options, CameOptions):
        return tensors.unsupported(param)
    return layerwise.unsupported_reason(param, options)
