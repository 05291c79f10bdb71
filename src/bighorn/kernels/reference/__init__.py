"""The specification: one tensor at a time, any floating dtype, any device, written for readers."""

from torch import Tensor

from bighorn.kernels.reference.came import Came
from bighorn.kernels.reference.lamb import Lamb
from bighorn.kernels.reference.lars import Lars

__all__ = ["Came", "Lamb", "Lars", "unsupported_reason", "unsupported_shard_reason"]


def unsupported_reason(param: Tensor, options: object) -> str | None:
    """The reason why this backend cannot serve a tensor: there is none."""
    del param, options
    return None


def unsupported_shard_reason(shard: object, options: object) -> str | None:
    """The reason why this backend cannot serve a shard of a tensor: there is none."""
    del shard, options
    return None
