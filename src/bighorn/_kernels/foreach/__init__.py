"""Plain torch on groups of tensors of bounded size, for any device."""

from bighorn._kernels.foreach.came import Came
from bighorn._kernels.foreach.lamb import Lamb
from bighorn._kernels.foreach.lars import Lars

ALGORITHMS = {"lamb": Lamb, "came": Came, "lars": Lars}
