"""The layout of the tables of LARS's kernels."""

from typing import Any

from bighorn._kernels.triton import columns
from bighorn._kernels.triton import layer_layout as layer

option: Any = columns.OptionColumns(
    MOMENTUM=lambda o: o.momentum,
    TRUST_COEFFICIENT=lambda o: o.trust_coefficient,
    EPS=lambda o: o.eps,
    NORM_DECAY=lambda o: o.weight_decay if o.denominator == "joint" else 0.0,  # in the gradient whose norm is taken
    ADAPTS=lambda o: o.adapt,
    CLIPS=lambda o: o.trust_clip,
    LR_IN_MOMENTUM=lambda o: o.lr_in_momentum,
    NESTEROV=lambda o: o.nesterov,
)

# Factors: u = BEFORE * (g + decay * x), and x moves by AFTER_U * u + AFTER_M * m.
BEFORE, AFTER_U, AFTER_M = columns.numbered(3, layer.STEP_NUMBER + 1)
