"""Plain torch on groups of tensors of bounded size, for any device."""

from bighorn.kernels.foreach.came import Came
from bighorn.kernels.foreach.lamb import Lamb
from bighorn.kernels.foreach.lars import Lars
from bighorn.kernels.reference import unsupported_reason, unsupported_shard_reason

__all__ = ["Came", "Lamb", "Lars", "unsupported_reason", "unsupported_shard_reason"]
