"""LARS on the C library."""

from bighorn.kernels.cpu.layerwise import LayerwiseStepper
from bighorn.kernels.options import LarsOptions


class Lars(LayerwiseStepper[LarsOptions]):
    """LARS in the library."""
