"""LARS in Triton: the host side. Three launches step the whole model."""

from bighorn._kernels.options import LarsOptions
from bighorn._kernels.triton.layerwise import LayerwiseStepper


class Lars(LayerwiseStepper[LarsOptions]):
    """LARS for some buckets on one device."""
