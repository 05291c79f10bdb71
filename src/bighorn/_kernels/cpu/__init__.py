"""The C library: fused kernels on the CPU."""

from bighorn._kernels.cpu.came import Came
from bighorn._kernels.cpu.lamb import Lamb
from bighorn._kernels.cpu.lars import Lars

ALGORITHMS = {"lamb": Lamb, "came": Came, "lars": Lars}
