"""The layout of the tables of layer-wise optimizers' kernels."""

from typing import Any

import triton.language as tl

from bighorn._kernels.triton import columns

slot: Any = columns.SlotColumns("EXP_AVG_SQ_SCALE", "RADIUS", after=columns.slot.names)

ADDRESSES = columns.ADDRESSES | {"EXP_AVG_SQ_SCALE": "exp_avg_sq_scale", "RADIUS": "radius"}
"""The columns of addresses of state tensors, or 0; scales exist if moments are in blocks."""

# The table of factors: float64, by tensor; the columns after this belong to the algorithm.
STEP_NUMBER = tl.constexpr(0)  # from 1, for the second pass
FACTOR = tl.constexpr(5)
