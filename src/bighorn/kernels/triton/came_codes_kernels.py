"""CAME on the device: the pass over averages in codes whose blocks are not the rows of tiles."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

from bighorn.kernels.triton import came_layout as layout
from bighorn.kernels.triton import came_scaling_kernels as scaling
from bighorn.kernels.triton import came_tiling_kernels as tiling
from bighorn.kernels.triton import codec_kernels as codec
from bighorn.kernels.triton import common_kernels as common
from bighorn.kernels.triton import weight_kernels as weights


@triton.jit
def came_codes(
    rows_ptr, grads_ptr, pack_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, roots_ptr, scalars_ptr,
    G: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr, COMPUTE: tl.constexpr, CUT: tl.constexpr,
    FACTORED: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the average in codes: some of its blocks, in memory order, independently of tiles."""
    pack = tl.program_id(0)
    index = tl.load(pack_to_row_ptr + pack).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    inner = tl.load(row_ptr + common.INNER)
    stop = tl.load(row_ptr + common.SIZE) // inner * tl.cdiv(inner, codec.CODES)
    block = (pack - tl.load(row_ptr + layout.FIRST_PACK)) * layout.PACK
    where = codec.code_blocks(block, stop, inner, 1, layout.PACK, M_FORM == "nibbles")
    offsets, mask = where[0], where[1]

    pointer = common.at(tl.load(grads_ptr + index), 0, G)
    scale = common.gradient_scale(scale_ptr, option_ptr, COMPUTE)
    g = common.gradient(pointer, offsets, mask, scale, 1)
    clip = common.number(scalars_ptr + index * layout.NUMBER + layout.CLIP, COMPUTE)
    if FACTORED:
        height, width = tl.load(row_ptr + layout.HEIGHT), tl.load(row_ptr + layout.WIDTH)
        first, lanes = tl.min(offsets, 1), tl.arange(0, codec.CODES)
        line, column = scaling.wrapped((first % width)[:, None] + lanes[None, :], width)
        matrix, _ = scaling.wrapped((first // width % height)[:, None] + line, height)
        matrix += (first // width // height)[:, None]
        line += (first // width)[:, None]
        root = (
            tl.load(roots_ptr + tl.load(row_ptr + layout.FIRST_MATRIX) + matrix, mask=mask, other=0.0) * clip
        )  # CAME-clip
        row_averages = tiling.averages(row_ptr, layout.SQ_ROW, 0, COMPUTE) + line
        col_averages = tiling.averages(row_ptr, layout.SQ_COL, 0, COMPUTE) + matrix * width + column
        r = scaling.inverse_root(tl.load(row_averages, mask=mask, other=1.0)) * root
        c = scaling.inverse_root(tl.load(col_averages, mask=mask, other=1.0))
        u = g * c * r  # CAME-u
    else:
        v = common.read(common.at(tl.load(row_ptr + layout.EXP_AVG_SQ), 0, COMPUTE), offsets, mask)
        u = scaling.unfactored(g, v) * clip  # CAME-clip

    moment = codec.moment_at(row_ptr + common.EXP_AVG, row_ptr + layout.EXP_AVG_SCALE, 0, S, M_FORM)
    beta1 = common.number(option_ptr + layout.option.BETA1, COMPUTE)
    beta1_rest = common.number(option_ptr + layout.option.BETA1_REST, COMPUTE)
    m = beta1 * codec.read_moment(moment, where, M_FORM, 1) + beta1_rest * u  # CAME-m
    rng_key = weights.rng_key(row_ptr, common.count(row_ptr), M_FORM == "nibbles", CUT)
    codec.write_moment(moment, where, m, (rng_key, 0, offsets), M_FORM, 1)
