"""The frame of CAME's passes over tiles, and the positions of tiles and lines in memory and among partial sums.

A pass adds a rule: `run_tile` calls RULE with the program's tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bighorn._kernels.triton import came_layout as layout
from bighorn._kernels.triton import codec_kernels as codec
from bighorn._kernels.triton import columns
from bighorn._kernels.triton import common_kernels as common


class Tile(NamedTuple):
    """A tile: its number, its tensor's slot and options, and its place in a matrix."""

    number: Any
    index: Any
    slot_ptr: Any
    option_ptr: Any
    grad_ptr: Any
    start: Any
    """Its first element."""
    high: Any
    wide: Any
    width: Any
    """The matrix's."""
    matrix: Any
    line: Any
    """Its first row."""
    column: Any


class Mode(NamedTuple):
    """The constants of a pass: the sizes of tiles, and how many elements are moved at once."""

    VECTOR: Any
    TALL: Any
    WIDE: Any
    BLOCK: Any


@triton.jit
def run_tile(tables, rule_tables, RULE: tl.constexpr, REVERSE: tl.constexpr, mode, const):
    """Apply a rule to a program's tile; `rule_tables` and `const` are what the rule has besides."""
    slots_ptr, grads_ptr, tile_to_slot_ptr, options_ptr, apply_mask_ptr = tables
    number = tl.num_programs(0) - 1 - tl.program_id(0) if REVERSE else tl.program_id(0)
    index = tl.load(tile_to_slot_ptr + number).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr, option_ptr = common.entries(slots_ptr, options_ptr, index)
    height, width = tl.load(slot_ptr + layout.slot.HEIGHT), tl.load(slot_ptr + layout.slot.WIDTH)
    local = number - tl.load(slot_ptr + layout.slot.FIRST_TILE)
    across, down = tl.cdiv(width, mode.WIDE), tl.cdiv(height, mode.TALL)
    matrix = local // (across * down)
    line, column = local // across % down * mode.TALL, local % across * mode.WIDE
    start = (matrix * height + line) * width + column
    high, wide = tl.minimum(height - line, mode.TALL).to(tl.int32), tl.minimum(width - column, mode.WIDE).to(tl.int32)
    grad_ptr = grads_ptr + index
    tile = Tile(number, index, slot_ptr, option_ptr, grad_ptr, start, high, wide, width, matrix, line, column)
    RULE(tile, rule_tables, mode, const)


@triton.jit
def parts_at(tile, partials_ptr, mode):
    """Return the positions of a tile's partial sums of rows and of columns."""
    height, matrices = tl.load(tile.slot_ptr + layout.slot.HEIGHT), tl.load(tile.slot_ptr + layout.slot.MATRICES)
    row_part = (tile.column // mode.WIDE * matrices + tile.matrix) * height + tile.line
    col_part = (tile.line // mode.TALL * matrices + tile.matrix) * tile.width + tile.column
    return (
        partials_ptr + tl.load(tile.slot_ptr + layout.slot.ROW_PARTS) + row_part,
        partials_ptr + tl.load(tile.slot_ptr + layout.slot.COL_PARTS) + col_part,
    )


@triton.jit
def row_averages(tile, COLUMN: tl.constexpr):
    """Return a pointer to the averages of a tile's rows."""
    # The height and the width are loaded again: as fields of the tile, they would take registers in the loops before.
    return averages(tile.slot_ptr, COLUMN, tile.matrix * tl.load(tile.slot_ptr + layout.slot.HEIGHT) + tile.line)


@triton.jit
def column_averages(tile, COLUMN: tl.constexpr):
    """Return a pointer to the averages of a tile's columns."""
    return averages(tile.slot_ptr, COLUMN, tile.matrix * tl.load(tile.slot_ptr + layout.slot.WIDTH) + tile.column)


@triton.jit
def aligned(addresses, tile, mode):
    """Whether every row of a tile starts at a multiple of 16 bytes, in all its arrays."""
    return (addresses % 16 == 0) & (tile.width % mode.VECTOR == 0)


@triton.jit
def tile_block(i, high, wide, width, VECTOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return offsets and mask of the elements of rows from the tile's `i`-th on, which are loaded VECTOR at a time."""
    lines, columns = i + tl.arange(0, ROWS), tl.arange(0, WIDE)
    # The quotients are exact, and show the compiler that the products are multiples.
    starts = lines.to(tl.int64) * (width // VECTOR * VECTOR)
    mask = (lines < high)[:, None] & (columns < wide // VECTOR * VECTOR)[None, :]
    return starts[:, None] + columns[None, :], mask


@triton.jit
def rows_at(i, tile, FORM: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return where a tile's rows from the `i`-th on are, each of which is within one block of codes."""
    offsets, mask = tile_block(i, tile.high, tile.wide, tile.width, VECTOR, WIDE, ROWS)
    if FORM == "":
        return codec.Where(offsets, mask, offsets, mask, offsets, mask)
    else:
        lines = i + tl.arange(0, ROWS)
        scales, has_scale = lines * tl.cdiv(tile.width, codec.CODES), lines < tile.high
        if FORM == "int4":
            HALF: tl.constexpr = (VECTOR + 1) // 2
            halves, has_byte = tile_block(i, tile.high, tile.wide // 2, tile.width // 2, HALF, WIDE // 2, ROWS)
            return codec.Where(offsets, mask, scales, has_scale, halves, has_byte)
        else:
            return codec.Where(offsets, mask, scales, has_scale, offsets, mask)


@triton.jit
def average_at(tile, S: tl.constexpr, FORM: tl.constexpr):
    """Return pointers to the stored average of a tile, of 4 bits to its first byte, and to its first row's scale."""
    first = tile.start // tile.width * tl.cdiv(tile.width, codec.CODES) + tile.start % tile.width // codec.CODES
    address, scales = (
        tl.load(tile.slot_ptr + columns.slot.EXP_AVG),
        tl.load(tile.slot_ptr + columns.slot.EXP_AVG_SCALE),
    )
    stored = common.at(address, tile.start // 2 if FORM == "int4" else tile.start, S)
    return stored, common.at(scales, first, tl.float32)


@triton.jit
def lines_of(slot_ptr, strip, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Return the lines of a strip: whether they are rows, indices, mask, length, and the positions of partial sums."""
    height, width, matrices = (
        tl.load(slot_ptr + layout.slot.HEIGHT),
        tl.load(slot_ptr + layout.slot.WIDTH),
        tl.load(slot_ptr + layout.slot.MATRICES),
    )
    local = strip - tl.load(slot_ptr + layout.slot.FIRST_STRIP)
    of_rows = matrices * row_strips(height, width, WIDE)
    is_row = local < of_rows
    local = tl.where(is_row, local, local - of_rows)
    lines, length = tl.where(is_row, height, width), tl.where(is_row, width, height)
    parts = tl.cdiv(length, tl.where(is_row, WIDE, TALL))
    each, lanes = lines_at_once(parts), tl.arange(0, layout.LINES)
    matrix, first = local // tl.cdiv(lines, each), local % tl.cdiv(lines, each) * each
    line = first + lanes % each
    exists = line < lines
    mask = exists & (lanes < each)
    line += matrix * lines
    return (
        is_row,
        line,
        mask,
        length,
        (
            tl.load(slot_ptr + tl.where(is_row, layout.slot.ROW_PARTS, layout.slot.COL_PARTS)),
            parts,
            matrices * lines,
            line,
            exists,
        ),
    )


@triton.jit
def lines_at_once(parts):
    """Return how many lines a program adds up; if lines have many partial sums, several lanes share each line."""
    return tl.where(parts > layout.MANY, layout.FEW_LINES, layout.LINES)


@triton.jit
def row_strips(height, width, WIDE: tl.constexpr):
    """Return the number of strips of a matrix's rows."""
    return tl.cdiv(height, lines_at_once(tl.cdiv(width, WIDE)))


@triton.jit
def line_totals(where, partials_ptr):
    """Return the sums of lines, from their partial sums."""
    start, parts, lines, line, exists = where
    each, lanes = lines_at_once(parts), tl.arange(0, layout.LINES)
    shared = tl.where(parts > layout.MANY, layout.LINES // layout.FEW_LINES, 1)  # lanes per line
    total = tl.zeros((layout.PARTS, layout.LINES), tl.float64)
    for i in range(0, parts, shared * layout.PARTS):
        part = i + (tl.arange(0, layout.PARTS) * shared)[:, None].to(tl.int64) + (lanes // each)[None, :]
        offsets = start + part * lines + line[None, :]
        total += tl.load(partials_ptr + offsets, mask=(part < parts) & exists[None, :], other=0.0).to(tl.float64)
    totals = tl.sum(total, 0)
    if each == layout.FEW_LINES:
        by_line = tl.sum(tl.reshape(totals, (layout.LINES // layout.FEW_LINES, layout.FEW_LINES)), 0)
        totals = tl.reshape(
            tl.broadcast_to(by_line[None, :], (layout.LINES // layout.FEW_LINES, layout.FEW_LINES)), (layout.LINES,)
        )
    return totals


@triton.jit
def averages(slot_ptr, column, first):
    """Return a pointer to the averages of a tensor's rows or columns, from index `first` on."""
    return common.at(tl.load(slot_ptr + column), first, tl.float32)


@triton.jit
def store_lines(pointer, i, height, values, ROWS: tl.constexpr):
    """Store a number for each of a tile's rows from the `i`-th on."""
    lines = i + tl.arange(0, ROWS)
    tl.store(pointer + lines, values, mask=lines < height)


@triton.jit
def store_columns(col_parts, width, values, WIDE: tl.constexpr):
    """Store partial sums of columns."""
    columns = tl.arange(0, WIDE)
    tl.store(col_parts + columns, values, mask=columns < width)


@triton.jit
def is_split(is_row, SPLIT: tl.constexpr):
    """Whether the average of a line is split: a row's if columns are split, and the reverse."""
    return is_row & (SPLIT == "columns" or SPLIT == "both") | (is_row == 0) & (SPLIT == "rows" or SPLIT == "both")


@triton.jit
def line_at(lines_ptr, slot_ptr, is_row, line):
    """Return the address of lines of a tensor among all lines."""
    first = tl.load(slot_ptr + layout.slot.FIRST_LINE) + tl.where(
        is_row, 0, tl.load(slot_ptr + layout.slot.MATRICES) * tl.load(slot_ptr + layout.slot.HEIGHT)
    )
    return lines_ptr + first + line
