"""The layout of the tables of CAME's kernels, and the sizes of their tiles and pieces."""

import triton.language as tl

from bighorn.kernels.triton import common_kernels as common
from bighorn.kernels.triton import tiles

# Columns of the table of rows, after the common columns.
ADDRESSES = ("exp_avg_scale", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")
EXP_AVG_SCALE = tl.constexpr(common.OWN + 0)
EXP_AVG_SQ = tl.constexpr(common.OWN + 1)  # used if the second moment is not factored
SQ_ROW = tl.constexpr(common.OWN + 2)
SQ_COL = tl.constexpr(common.OWN + 3)
RES_ROW = tl.constexpr(common.OWN + 4)
RES_COL = tl.constexpr(common.OWN + 5)
HEIGHT = tl.constexpr(common.OWN + 6)
WIDTH = tl.constexpr(common.OWN + 7)
MATRICES = tl.constexpr(common.OWN + 8)
FIRST_TILE = tl.constexpr(common.OWN + 9)  # an unfactored tensor has chunks instead of tiles
FIRST_SUM = tl.constexpr(common.OWN + 10)  # the sums of its tiles; a shard has one sum, over all tiles of all ranks
STOP_SUM = tl.constexpr(common.OWN + 11)
FIRST_PIECE = tl.constexpr(common.OWN + 12)  # pieces of rows come first, matrix by matrix
FIRST_MATRIX = tl.constexpr(common.OWN + 13)
ROW_PARTS = tl.constexpr(common.OWN + 14)  # the first partial sum of its rows, which have one per tile across them
COL_PARTS = tl.constexpr(common.OWN + 15)  # the first partial sum of its columns, which have one per TALL rows
FIRST_PACK = tl.constexpr(common.OWN + 16)
NUMEL = tl.constexpr(common.OWN + 17)  # this and the columns below are those of a shard's whole tensor
WHOLE_HEIGHT = tl.constexpr(common.OWN + 18)
WHOLE_WIDTH = tl.constexpr(common.OWN + 19)
LEADS_ROWS = tl.constexpr(common.OWN + 20)  # 1 if this rank adds the old averages of rows for all that share them
LEADS_COLS = tl.constexpr(common.OWN + 21)
FIRST_LINE = tl.constexpr(common.OWN + 22)  # its lines: rows, then columns, matrix by matrix
STOP_TILE = tl.constexpr(common.OWN + 23)

# Columns of the table of hyper-parameters, after the common columns.
BETA1 = tl.constexpr(3)
BETA1_REST = tl.constexpr(4)  # 1 - beta1
BETA2_REST = tl.constexpr(5)
BETA3 = tl.constexpr(6)
BETA3_REST = tl.constexpr(7)
EPS1 = tl.constexpr(8)
EPS2 = tl.constexpr(9)
DECAY_RATE = tl.constexpr(10)  # negative if beta2 is constant
CLIP_THRESHOLD = tl.constexpr(11)
SCALE_EPS = tl.constexpr(12)  # negative if the size of x does not scale lr
CORRECTS = tl.constexpr(13)

# The table of sums: float64, one row per tile.
U_SQUARES = tl.constexpr(0)
X_SQUARES = tl.constexpr(1)
CONFIDENCES = tl.constexpr(2)
SUM = tl.constexpr(3)

# The table of numbers that each tensor has once, after its u is known: float64, one row per tensor.
CLIP = tl.constexpr(0)  # the clip factor of u
RATE = tl.constexpr(1)  # the learning rate, which can depend on the size of x
RES_FACTOR = tl.constexpr(2)  # corrects the root of the residuals' averages, which are 0 at first
NUMBER = tl.constexpr(3)

# The sizes of tiles and pieces.
FEW = tl.constexpr(1024)  # elements in registers if each is loaded by itself, with an address of its own
LINES = tl.constexpr(tiles.LINES)
FEW_LINES = tl.constexpr(tiles.FEW_LINES)
MANY = tl.constexpr(tiles.MANY)
PACK = tl.constexpr(tiles.PACK)
PARTS = tl.constexpr(4)  # partial sums of each line in registers
