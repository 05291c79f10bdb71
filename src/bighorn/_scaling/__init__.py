"""Loss scaling: policies for the scale, and one found_inf for the gradients of all ranks and devices.

float16 loses gradients below 6e-8. Multiplying the loss by a scale moves them into its range; they are divided by it
again before they are used. If the scale is too large, gradients overflow: such a step is skipped, and the scale
shrinks.
"""

from bighorn._scaling.policies import ExponentialScale, FixedScale, ScalePolicy, WindowScale
from bighorn._scaling.scaler import LossScaler

__all__ = ["ExponentialScale", "FixedScale", "LossScaler", "ScalePolicy", "WindowScale"]
