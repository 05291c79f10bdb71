"""The layout of the tables of LAMB's kernels."""

from typing import Any

from bighorn._kernels.options import c_bounds
from bighorn._kernels.triton import columns
from bighorn._kernels.triton import layer_layout as layer

option: Any = columns.OptionColumns(
    BETA1=lambda o: o.betas[0],
    BETA2=lambda o: 1.0 if o.second_moment == "adagrad" else o.betas[1],
    BETA3=lambda o: 1 - o.betas[0] if o.grad_averaging else 1.0,  # the factor of g in m
    BETA4=lambda o: 1.0 if o.second_moment == "adagrad" else 1 - o.betas[1],  # the factor of g^2 in v
    CORRECTED1=lambda o: o.betas[0] if o.bias_correction else 0.0,  # the beta whose power corrects m
    CORRECTED2=lambda o: o.betas[1] if o.bias_correction and o.second_moment != "adagrad" else 0.0,
    CORRECTS_LR=lambda o: o.bias_correction == "lr",
    EPS=lambda o: o.eps,
    ADAPTS=lambda o: o.adapt,  # 0 if the trust ratio is always 1, and the first pass writes x
    WEIGHT_LOW=lambda o: c_bounds(o.weight_norm_bounds)[0],
    WEIGHT_HIGH=lambda o: c_bounds(o.weight_norm_bounds)[1],
    RATIO_LOW=lambda o: c_bounds(o.trust_ratio_bounds)[0],
    RATIO_HIGH=lambda o: c_bounds(o.trust_ratio_bounds)[1],
)

# Factors: r = M_FACTOR * m / (sqrt(v) + ROOT_EPS), and STRIDE multiplies u: lr, its correction, then the trust ratio.
# BACK multiplies x in decoupled decay, and on the ball of Hyperball.
M_FACTOR, ROOT_EPS, STRIDE, BACK = columns.numbered(4, layer.STEP_NUMBER + 1)
