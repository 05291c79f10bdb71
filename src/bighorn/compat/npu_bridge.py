"""The compatibility layer of Ascend's npu_bridge for TensorFlow."""

from bighorn.compat._npu_distributed import NPUDistributedOptimizer, NPULossScaleOptimizer
from bighorn.compat._npu_lamb import LAMBOptimizer
from bighorn.compat._npu_loss_scale import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from bighorn.compat._npu_optimizer import NPUOptimizer

__all__ = [
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "LAMBOptimizer",
    "NPUDistributedOptimizer",
    "NPULossScaleOptimizer",
    "NPUOptimizer",
]
