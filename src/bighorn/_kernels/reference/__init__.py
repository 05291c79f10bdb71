"""The specification: one tensor at a time, any floating dtype, any device, written for readers."""

from bighorn._kernels.reference.came import Came
from bighorn._kernels.reference.lamb import Lamb
from bighorn._kernels.reference.lars import Lars

ALGORITHMS = {"lamb": Lamb, "came": Came, "lars": Lars}
