"""Bighorn: LAMB for PyTorch, fused end to end, exact, and fast on whatever device the parameters live on."""

from bighorn import schedules
from bighorn.optim.base import Telemetry
from bighorn.optim.lamb import Lamb

__all__ = ["Lamb", "Telemetry", "__version__", "schedules"]

__version__ = "0.1.0"
