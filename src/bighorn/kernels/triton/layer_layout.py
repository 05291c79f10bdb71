"""The layout of the tables of layer-wise optimizers' kernels."""

from typing import Any

import triton.language as tl

from bighorn.kernels.triton import columns

ADDRESSES = {name.upper(): name for name in ("exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "radius")}
"""The columns of addresses of state tensors, or 0; scales exist if moments are in blocks."""

row: Any = columns.RowColumns(*ADDRESSES, after=columns.row.names)

# The table of factors: float64, one row per tensor; the columns after this belong to the algorithm.
STEP_NUMBER = tl.constexpr(0)  # from 1, for the second pass
FACTOR = tl.constexpr(5)
