"""LARS on the C library."""

from bighorn._kernels.cpu.layerwise import LayerwiseStepper
from bighorn._kernels.options import LarsOptions


class Lars(LayerwiseStepper[LarsOptions]):
    """LARS in the library."""
