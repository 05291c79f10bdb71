"""The layout of the tables of LARS's kernels."""

import triton.language as tl

from bighorn.kernels.triton import common_kernels as common

# Columns of the table of rows, after the common columns.
ADDRESSES = ("exp_avg_scale",)
EXP_AVG_SCALE = tl.constexpr(common.OWN + 0)  # used if the momentum is kept in blocks

# Columns of the table of hyper-parameters, after the common columns.
MOMENTUM = tl.constexpr(3)
TRUST_COEFFICIENT = tl.constexpr(4)
EPS = tl.constexpr(5)
NORM_DECAY = tl.constexpr(6)  # the weight decay in the gradient whose norm is taken
ADAPTS = tl.constexpr(7)  # 0 if the trust ratio is always 1
CLIPS = tl.constexpr(8)
LR_IN_MOMENTUM = tl.constexpr(9)
NESTEROV = tl.constexpr(10)

# The table of factors: float64, one row per tensor.
BEFORE = tl.constexpr(0)  # u = BEFORE * (g + decay * x)
AFTER_U = tl.constexpr(1)  # x moves by AFTER_U * u + AFTER_M * m
AFTER_M = tl.constexpr(2)
STEP_NUMBER = tl.constexpr(3)  # from 1
FACTOR = tl.constexpr(4)

# The table of sums: float64, one row per chunk, or per shard.
X_SQUARES = tl.constexpr(0)
U_SQUARES = tl.constexpr(1)
SUM = tl.constexpr(2)
