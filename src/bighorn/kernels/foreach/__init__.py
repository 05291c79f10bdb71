"""Plain torch on groups of tensors of bounded size, for any device."""

from bighorn.kernels.foreach.came import Came
from bighorn.kernels.foreach.lamb import Lamb
from bighorn.kernels.foreach.lars import Lars

ALGORITHMS = {"lamb": Lamb, "came": Came, "lars": Lars}
