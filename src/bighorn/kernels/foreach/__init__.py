"""Plain torch on batches of tensors of bounded size, for any device."""

from bighorn.kernels.foreach.came import Came
from bighorn.kernels.foreach.lamb import Lamb
from bighorn.kernels.reference import why_not, why_not_shard

__all__ = ["Came", "Lamb", "why_not", "why_not_shard"]
