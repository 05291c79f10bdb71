"""LARS in Triton: the host side. Three launches step the whole model."""

from bighorn.kernels.options import LarsOptions
from bighorn.kernels.triton.layerwise import LayerwiseStepper


class Lars(LayerwiseStepper[LarsOptions]):
    """LARS for some buckets on one device."""
