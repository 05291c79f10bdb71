"""The layout of the tables of LAMB's kernels."""

import triton.language as tl

from bighorn.kernels.triton import common_kernels as common

# Columns of the table of rows, after the common columns.
ADDRESSES = ("exp_avg_sq", "max_exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
EXP_AVG_SQ = tl.constexpr(common.OWN + 0)
MAX_EXP_AVG_SQ = tl.constexpr(common.OWN + 1)
EXP_AVG_SCALE = tl.constexpr(common.OWN + 2)  # used if moments are kept in blocks
EXP_AVG_SQ_SCALE = tl.constexpr(common.OWN + 3)
NUMEL = tl.constexpr(common.OWN + 4)  # of the whole tensor if the row is a shard

# Columns of the table of hyper-parameters, after the common columns.
BETA1 = tl.constexpr(3)
BETA2 = tl.constexpr(4)
BETA3 = tl.constexpr(5)  # the factor of g in m
BETA4 = tl.constexpr(6)  # the factor of g^2 in v
CORRECTED1 = tl.constexpr(7)  # the beta whose power corrects m; 0 without bias correction
CORRECTED2 = tl.constexpr(8)
CORRECTS_LR = tl.constexpr(9)  # 1 if the bias correction is a factor of lr
EPS = tl.constexpr(10)
ADAPTS = tl.constexpr(11)  # 0 if the trust ratio is always 1, and the first pass writes x
WEIGHT_LOW = tl.constexpr(12)
WEIGHT_HIGH = tl.constexpr(13)
RATIO_LOW = tl.constexpr(14)
RATIO_HIGH = tl.constexpr(15)

# The table of factors: float64, one row per tensor.
M_FACTOR = tl.constexpr(0)  # r = M_FACTOR * m / (sqrt(v) + ROOT_EPS)
ROOT_EPS = tl.constexpr(1)
STRIDE = tl.constexpr(2)  # the factor of u: lr, its correction, and finally the trust ratio
STEP_NUMBER = tl.constexpr(3)  # from 1
FACTOR = tl.constexpr(4)

# The table of sums: float64, one row per chunk, or per shard.
X_SQUARES = tl.constexpr(0)
U_SQUARES = tl.constexpr(1)  # of a cautious update: of r, masked but not scaled up
SUM = tl.constexpr(2)
KEPT = tl.constexpr(2)  # the elements of a cautious update that are not masked
PRODUCTS = tl.constexpr(3)  # of this r and x
CAUTIOUS_SUM = tl.constexpr(4)
LEAST_SHARE = tl.constexpr(1e-3)  # of elements that are not masked, by whose inverse r is scaled up
