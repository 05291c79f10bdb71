"""The C library: fused kernels on the CPU."""

from bighorn.kernels.cpu.came import Came
from bighorn.kernels.cpu.lamb import Lamb
from bighorn.kernels.cpu.lars import Lars

ALGORITHMS = {"lamb": Lamb, "came": Came, "lars": Lars}
