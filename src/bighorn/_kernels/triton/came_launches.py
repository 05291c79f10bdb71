"""CAME's launches: eight for the factored tensors of a model, four for the others."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket
from bighorn._kernels.options import CameOptions
from bighorn._kernels.triton.launch_group import GradDtypes, LaunchGroup, SlotIndex, constants_of
from bighorn._kernels.triton.tables import Uploads
from bighorn._kernels.triton.tiles import TileGrid, area_of, tile_grid

FORMS = {torch.int8: "linear", torch.uint8: "int4"}
"""The forms of averages in codes, as `codec_kernels.py` names them."""


class CameLaunchGroup(LaunchGroup[CameOptions]):
    """Slots that are all factored, or all unfactored."""

    def __init__(
        self, buckets: list[Bucket[CameOptions]], indices: list[SlotIndex], dtypes: GradDtypes, uploads: Uploads
    ) -> None:
        from bighorn._kernels.triton import came_kernels, came_layout, came_unfactored_kernels, layer_layout

        self.layout, self.kernels = came_layout, came_kernels
        self.unfactored_kernels = came_unfactored_kernels
        super().__init__(buckets, indices, dtypes, uploads)
        grids, device = self.grids, self.device
        self.factored = factored = self.constants["FACTORED"]
        self.constants |= {"TALL": grids[0].tall, "WIDE": grids[0].wide}
        self.tile_to_slot = self.program_table(self.tile_counts())
        self.strip_to_slot = self.program_table([each.strips for each in grids if factored])
        partials = sum(each.row_parts + each.col_parts for each in grids if factored)
        self.lines = torch.empty(0, dtype=torch.float64, device=device)  # used by shards
        self.partials = torch.empty(partials, dtype=torch.float32, device=device)
        self.roots = torch.empty(sum(each.count for each in grids if factored), dtype=torch.float32, device=device)
        self.line_sums = torch.empty(self.strip_to_slot.numel(), dtype=torch.float64, device=device)
        sums = came_layout.SUM.value * self.tile_to_slot.numel()
        self.whole_sums = self.sums = torch.empty(sums, dtype=torch.float64, device=device)
        self.factors = torch.empty(layer_layout.FACTOR.value * len(indices), dtype=torch.float64, device=device)

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: CameOptions) -> dict[str, Any]:
        """See `LaunchGroup.compiled_for`; the averages of squares are in the dtype of the arithmetic."""
        from bighorn._kernels.triton.common_kernels import LANES

        sizes = [dtype.itemsize for dtype in (x, g, m)]
        # Elements of a tile that a thread has in registers: with 8 of 16 bits, too few bytes would be in flight; with
        # 16, int8's codes spill beside random bits (ptxas of CUDA 13.1 and later).
        crowded = min(sizes) == 1 and options.weight_rounding == "stochastic"
        elements = 16 if max(sizes) == 2 and not crowded else 8
        # Triton spreads codes that are two to a byte over threads by themselves. A thread with more codes than elements
        # of x would hold codes of other elements, and fetch its own from shared memory.
        least = max(sizes[:2]) if m == torch.uint8 else min(sizes)
        return {
            **constants_of(x, g, m, options),
            "M_FORM": FORMS.get(m, ""),
            "FACTORED": options.factor is not None,
            "SPLIT": None,
            "VECTOR": 16 // least,
            "TILE_BLOCK": LANES.value * elements,
            "SCALES_LR": options.scale_parameter,
            # A thread moves 16 bytes of float32, the dtype of the second moment; of codes, a block is in one warp.
            "BLOCK": LANES.value * (8 if m in FORMS else 4),
        }

    @cached_property
    def grids(self) -> list[TileGrid]:
        """Return the tiles of each slot."""
        area = area_of(sum(x.numel() for x in self.params))
        return [
            tile_grid(x.shape, self.buckets[index].options.factor, area)
            for (index, _), x in zip(self.indices, self.params, strict=True)
        ]

    def tile_counts(self) -> list[int]:
        """Return the number of programs of each slot: its tiles, or if it is not factored, its chunks."""
        if self.buckets[self.indices[0][0]].options.factor is None:
            return self.chunks
        return [each.tiles for each in self.grids]

    def algorithm_columns(self) -> list[dict[str, int]]:
        """See `LaunchGroup.algorithm_columns`."""
        columns: list[dict[str, int]] = []
        tile = strip = matrix = part = line = 0
        for (index, i), tiles, each in zip(self.indices, self.tile_counts(), self.grids, strict=True):
            columns.append(
                {
                    **self.whole_columns(index, i, each),
                    "HEIGHT": each.height,
                    "WIDTH": each.width,
                    "MATRICES": each.count,
                    "FIRST_TILE": tile,
                    "STOP_TILE": tile + tiles,
                    "FIRST_STRIP": strip,
                    "FIRST_MATRIX": matrix,
                    "ROW_PARTS": part,
                    "COL_PARTS": part + each.row_parts,
                    "FIRST_LINE": line,
                }
            )
            tile, strip, matrix = tile + tiles, strip + each.strips, matrix + each.count
            part, line = part + each.row_parts + each.col_parts, line + each.lines
        return columns

    def whole_columns(self, index: int, i: int, each: TileGrid) -> dict[str, int]:
        """Return what a slot has of the whole tensor: its elements, height and width, and whose averages lead."""
        sizes = {"NUMEL": self.buckets[index].params[i].numel(), "WHOLE_HEIGHT": each.height, "WHOLE_WIDTH": each.width}
        return {**sizes, "LEADS_ROWS": 1, "LEADS_COLS": 1}

    def step(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False) -> None:
        """Make one CAME step: the second moment and the size of u, then the average with its residual, then x."""
        self.options, self.scale, self.apply_mask, self.compile_only = options, scale, apply_mask, compile_only
        if self.factored:
            self.launch(self.kernels.came_squares, AVERAGED="")
            self.launch(self.kernels.came_lines, RESIDUAL=False)
            self.launch(self.kernels.came_update_squares)
            self.launch(self.kernels.came_totals)
            self.launch(self.kernels.came_average)
            self.launch(self.kernels.came_lines, RESIDUAL=True)
            self.launch(self.kernels.came_apply)
        else:
            self.launch(self.unfactored_kernels.came_second_moment)
            self.launch(self.kernels.came_totals)
            self.launch(self.unfactored_kernels.came_move)
        self.launch(self.kernels.came_metrics)
