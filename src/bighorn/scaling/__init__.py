"""Loss scaling: how the scale moves, and one verdict on an overflow wherever gradients lie.

float16 loses gradients below 6e-8. Multiplying the loss by a scale moves them into its range; they are divided by it
again before they are used. Too large a scale overflows: such a step is skipped, and the scale shrinks.
"""

from bighorn.scaling.policies import ExponentialScale, FixedScale, ScalePolicy, WindowScale
from bighorn.scaling.scaler import LossScaler

__all__ = ["ExponentialScale", "FixedScale", "LossScaler", "ScalePolicy", "WindowScale"]
