"""The specification: one tensor at a time, any floating dtype, any device, written to be read."""

from torch import Tensor

from bighorn.kernels.reference.came import Came
from bighorn.kernels.reference.lamb import Lamb

__all__ = ["Came", "Lamb", "unsupported_reason", "unsupported_shard_reason"]


def unsupported_reason(param: Tensor, options: object) -> str | None:
    """The reason why this backend cannot serve such a tensor: there is none."""
    del param, options
    return None


def unsupported_shard_reason(shard: object, options: object) -> str | None:
    """The reason why this backend cannot serve a shard of a tensor: there is none."""
    del shard, options
    return None
