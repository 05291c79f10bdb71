"""Optimizer offload: state and arithmetic in host memory, during the backward pass of a model on a device.

`offload.py` checks the arguments, `optimizer.py` has the methods for the training loop, `step.py` holds one step, and
`copies.py` is all that depends on the device.
"""

from bighorn.offloading._copies import AcceleratorCopies, Arrival, Copies
from bighorn.offloading._offload import offload
from bighorn.offloading._optimizer import OffloadedOptimizer

__all__ = ["AcceleratorCopies", "Arrival", "Copies", "OffloadedOptimizer", "offload"]
