"""Additional kernels for CAME's shards: sums over lines that extend over several ranks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

from bighorn._kernels.triton import came_layout as layout
from bighorn._kernels.triton import came_tiling_kernels as tiling
from bighorn._kernels.triton import common_kernels as common


@triton.jit
def came_line_sums(
    slots_ptr, grads_ptr, strip_to_slot_ptr, options_ptr, apply_mask_ptr, partials_ptr, inner_ptr,
    SPLIT: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Add up partial sums of the lines whose averages are split."""
    strip = tl.program_id(0)
    index = tl.load(strip_to_slot_ptr + strip).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr, _ = common.entries(slots_ptr, options_ptr, index)
    is_row, line, mask, _, parts = tiling.lines_of(slot_ptr, strip, TALL, WIDE)
    mask = mask & tiling.is_split(is_row, SPLIT)
    tl.store(tiling.line_at(inner_ptr, slot_ptr, is_row, line), tiling.line_totals(parts, partials_ptr), mask=mask)


@triton.jit
def came_settle(
    slots_ptr, grads_ptr, strip_to_slot_ptr, options_ptr, apply_mask_ptr, lines_ptr,
    RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Store averages that were added up over all ranks."""
    strip = tl.program_id(0)
    index = tl.load(strip_to_slot_ptr + strip).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr, _ = common.entries(slots_ptr, options_ptr, index)
    is_row, line, mask, _, _ = tiling.lines_of(slot_ptr, strip, TALL, WIDE)
    if RESIDUAL:
        average = tiling.averages(slot_ptr, tl.where(is_row, layout.slot.RES_ROW, layout.slot.RES_COL), line)
    else:
        average = tiling.averages(slot_ptr, tl.where(is_row, layout.slot.SQ_ROW, layout.slot.SQ_COL), line)
    mask = mask & tiling.is_split(is_row, SPLIT)
    tl.store(average, tl.load(tiling.line_at(lines_ptr, slot_ptr, is_row, line), mask=mask), mask=mask)
