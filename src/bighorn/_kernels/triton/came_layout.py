"""The layout of the tables of CAME's kernels, and the sizes of their tiles and strips."""

from typing import Any

import triton.language as tl

from bighorn._kernels.triton import columns, tiles
from bighorn._kernels.triton import layer_layout as layer

FACTORED = {
    "SQ_ROW": "exp_avg_sq_row",
    "SQ_COL": "exp_avg_sq_col",
    "RES_ROW": "exp_avg_res_row",
    "RES_COL": "exp_avg_res_col",
}

ADDRESSES = columns.ADDRESSES | FACTORED
"""The columns of addresses of state tensors, or 0."""

slot: Any = columns.SlotColumns(
    *FACTORED,
    "HEIGHT",
    "WIDTH",
    "MATRICES",
    "FIRST_TILE",  # an unfactored tensor has chunks instead of tiles
    "STOP_TILE",
    "FIRST_STRIP",  # strips of rows come first, matrix by matrix
    "FIRST_MATRIX",
    "ROW_PARTS",  # the first partial sum of its rows, which have one per tile across them
    "COL_PARTS",  # the first partial sum of its columns, which have one per TALL rows
    "FIRST_LINE",  # its lines: rows, then columns, matrix by matrix
    "NUMEL",  # this column and the ones below describe a shard's whole tensor
    "WHOLE_HEIGHT",
    "WHOLE_WIDTH",
    "LEADS_ROWS",  # 1 if this rank adds the old averages of rows for all that share them
    "LEADS_COLS",
    after=columns.slot.names,
)

option: Any = columns.OptionColumns(
    BETA1=lambda o: o.betas[0],
    BETA1_REST=lambda o: 1 - o.betas[0],
    BETA2_REST=lambda o: 1 - o.betas[1],
    BETA3=lambda o: o.betas[2],
    BETA3_REST=lambda o: 1 - o.betas[2],
    EPS1=lambda o: o.eps[0],
    EPS2=lambda o: o.eps[1],
    DECAY_RATE=lambda o: -1.0 if o.decay_rate is None else o.decay_rate,  # negative if beta2 is constant
    CLIP_THRESHOLD=lambda o: o.clip_threshold,
    SCALE_EPS=lambda o: o.scale_eps,
    CORRECTS=lambda o: o.bias_correction,
)

# The table of sums: float64, one row per tile; a shard's own table has one row, over all tiles of all ranks.
U_SQUARES, X_SQUARES, CONFIDENCES, SUM = columns.numbered(4)

# Factors, after u is known:
(
    CLIP,  # the clip factor of u
    RATE,  # the learning rate, which can depend on the size of x
    RES_FACTOR,  # corrects the root of the residuals' averages, which are 0 at first
) = columns.numbered(3, layer.STEP_NUMBER + 1)

# The sizes of tiles and strips.
FEW = tl.constexpr(1024)  # elements in registers if each is loaded by itself, with an address of its own
LINES = tl.constexpr(tiles.LINES)
FEW_LINES = tl.constexpr(tiles.FEW_LINES)
MANY = tl.constexpr(tiles.MANY)
PARTS = tl.constexpr(4)  # partial sums of each line in registers
