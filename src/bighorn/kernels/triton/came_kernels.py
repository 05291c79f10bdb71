"""CAME on the device, in Triton: passes over tiles of matrices, with the averages of rows and columns between them.

A matrix is cut into tiles. What a tile knows of a row or a column is a partial sum, and `came_lines` adds these up,
always in the same order. An unfactored tensor has no such sums, and is cut into chunks, as LAMB's are. An average that
is kept in 8 bits advances with the others where the rows of tiles are the codec's blocks, and elsewhere in a pass of
its own over these. Passes alternate in direction: the last tiles of the one before may be in the cache still.

Where the lines tagged `CAME-...` leave a question open, `reference/came.py` answers it. Arithmetic is in float32; sums
over more than a tile, and what there is one of for a row, a column or a tensor, in float64.
"""

import triton
import triton.language as tl

from bighorn.kernels.triton.came_columns import (
    BETA1,
    BETA1_REST,
    BETA3_REST,
    CLIP,
    CONFIDENCES,
    EPS1,
    EPS2,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    FEW,
    FIRST_MATRIX,
    FIRST_PACK,
    HEIGHT,
    LEADS_COLS,
    LEADS_ROWS,
    NUMBER,
    NUMEL,
    PACK,
    RATE,
    RES_COL,
    RES_FACTOR,
    RES_ROW,
    SCALE_EPS,
    SQ_COL,
    SQ_ROW,
    SUM,
    U_SQUARES,
    WHOLE_HEIGHT,
    WHOLE_WIDTH,
    WIDTH,
    X_SQUARES,
)
from bighorn.kernels.triton.came_place_kernels import (
    aligned,
    averages,
    corner,
    firsts,
    is_split,
    line_at,
    line_totals,
    lines_of,
    patch,
    place,
    store_columns,
    store_lines,
)
from bighorn.kernels.triton.came_value_kernels import (
    clipping,
    column_factors,
    inverse_root,
    momentum,
    rate,
    residual_correction,
    root_mean,
    row_factors,
    row_root,
    scales_of,
    second_rest,
    tile_scales,
    tile_total,
    unfactored,
    update,
    wrapped,
)
from bighorn.kernels.triton.codec_kernels import (
    CODES,
    code_blocks,
    decoded,
    encoded,
    moment_at,
    read_moment,
    write_moment,
)
from bighorn.kernels.triton.common_kernels import (
    DECAY,
    EXP_AVG,
    INNER,
    NORMS,
    ROW,
    SIZE,
    at,
    count,
    count_step,
    entries,
    gradient_scale,
    number,
    read,
    takes_part,
    write,
)
from bighorn.kernels.triton.weight_kernels import (
    read_weight,
    stream,
    weight_addresses,
    weight_at,
    write_weight,
)

# ---- factored --------------------------------------------------------------------------------------------------------


@triton.jit
def came_squares(
    rows, grads, tiles, hyper, grad_scale, commit, partials, sums,
    X: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr,
    VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr,
):  # fmt: skip
    """The partial sums of g^2, and of x^2 where the size of x counts."""
    tile = tl.program_id(0)
    index = tl.load(tiles + tile).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    start, shape, row_parts, col_parts = place(row, tile, partials, WIDE)
    g = tl.load(grads + index)
    scale = gradient_scale(grad_scale, option)
    if aligned(g, shape, VECTOR):
        square_tile(at(g, start, G), shape, scale, row_parts, col_parts, VECTOR, WIDE, PATCH)
    else:
        square_tile(at(g, start, G), shape, scale, row_parts, col_parts, 1, WIDE, 2 * FEW)
    if tl.load(option + SCALE_EPS) >= 0:
        squares = param_squares(weight_at(row, start, X, ROUNDING), shape, ROUNDING, WIDE)
        tl.store(sums + tile * SUM + X_SQUARES, squares)


@triton.jit
def square_tile(
    g, shape, scale, row_parts, col_parts, VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr
):  # fmt: skip
    """The sums of g^2 over the rows and the columns of a tile."""
    ROWS: tl.constexpr = PATCH // WIDE
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for i in range(0, shape[0], ROWS):
        offsets, mask = patch(i, shape, VECTOR, WIDE, ROWS)
        value = read(g, offsets, mask, VECTOR).to(tl.float32) * scale
        store_lines(row_parts, i, shape[0], tl.sum(value * value, 1), ROWS)
        total += value * value
    store_columns(col_parts, shape[1], tl.sum(total, 0), WIDE)


@triton.jit
def param_squares(weight, shape, ROUNDING: tl.constexpr, WIDE: tl.constexpr):
    """The sum of x^2 over a tile."""
    ROWS: tl.constexpr = 2 * FEW // WIDE
    total = tl.zeros((ROWS, WIDE), tl.float64)
    for i in range(0, shape[0], ROWS):
        offsets, mask = patch(i, shape, 1, WIDE, ROWS)
        value = read_weight(weight, offsets, mask, ROUNDING).to(tl.float64)
        total += value * value
    return tl.sum(total)


@triton.jit
def came_lines(
    rows, grads, pieces, hyper, commit, partials, line_sums, lines,
    RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Advances averages of rows or columns, and leaves the sum of what they have become.

    Of shards it leaves the averages themselves, and of those that are split ("rows" says that a matrix's rows are, and
    so the averages of its columns) this rank's part alone.
    """
    piece = tl.program_id(0)
    index = tl.load(pieces + piece).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    is_row, line, mask, length, parts = lines_of(row, piece, WIDE)
    total = line_totals(parts, partials)
    if RESIDUAL:
        rest, eps = tl.load(option + BETA3_REST), tl.load(option + EPS2)
        average = averages(row, tl.where(is_row, RES_ROW, RES_COL), line)
    else:
        rest, eps = second_rest(row, option), tl.load(option + EPS1)
        average = averages(row, tl.where(is_row, SQ_ROW, SQ_COL), line)
    old = tl.load(average, mask=mask, other=1.0).to(tl.float64)
    whole = tl.load(row + tl.where(is_row, WHOLE_WIDTH, WHOLE_HEIGHT))
    kept = tl.where(tl.load(row + tl.where(is_row, LEADS_ROWS, LEADS_COLS)) != 0, 1 - rest, 0.0)
    new = kept * old + rest * (total / whole + eps * length / whole)  # CAME-row, CAME-col, CAME-res
    stored = new.to(tl.float32)
    if SPLIT is None:
        tl.store(average, stored, mask=mask)
        tl.store(line_sums + piece, tl.sum(tl.where(mask, stored.to(tl.float64), 0.0), 0))
    else:
        split = is_split(is_row, SPLIT)
        tl.store(average, stored, mask=mask & (split == 0))
        tl.store(line_at(lines, row, is_row, line), tl.where(split, new, stored.to(tl.float64)), mask=mask)


@triton.jit
def came_update_squares(
    rows, grads, tiles, hyper, grad_scale, commit, line_sums, roots, sums,
    G: tl.constexpr, SPLIT: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr,
):  # fmt: skip
    """The sum of u^2 over each tile, and for each matrix the root of the mean of its rows' averages; backwards."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(tiles + tile).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    start, shape, matrix, line, column = corner(row, tile, WIDE)
    root_here = roots + tl.load(row + FIRST_MATRIX) + matrix
    root = row_root(row, matrix, line_sums, root_here, SPLIT, WIDE)
    if (SPLIT is None) & (line == 0) & (column == 0):
        tl.store(root_here, root)

    g = tl.load(grads + index)
    row_averages = averages(row, SQ_ROW, matrix * tl.load(row + HEIGHT) + line)
    c = column_factors(averages(row, SQ_COL, matrix * tl.load(row + WIDTH) + column), shape, WIDE)
    scale = gradient_scale(grad_scale, option)
    if aligned(g, shape, VECTOR):
        total = update_squares(at(g, start, G), shape, scale, row_averages, root, c, VECTOR, WIDE, PATCH)
    else:
        total = update_squares(at(g, start, G), shape, scale, row_averages, root, c, 1, WIDE, 2 * FEW)
    tl.store(sums + tile * SUM + U_SQUARES, total)


@triton.jit
def update_squares(
    g, shape, scale, row_averages, root, c, VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr
):  # fmt: skip
    """The sum of u^2 over a tile."""
    ROWS: tl.constexpr = PATCH // WIDE
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for i in range(0, shape[0], ROWS):
        offsets, mask = patch(i, shape, VECTOR, WIDE, ROWS)
        value = read(g, offsets, mask, VECTOR).to(tl.float32) * scale
        u = update(value, row_factors(row_averages, i, shape, root, ROWS), c)
        total += u * u
    return tl.sum(total.to(tl.float64))


@triton.jit
def came_totals(rows, grads, hyper, commit, sums, numbers):
    """One program per tensor, once its u is known: by what u is clipped, the rate, and half of what telemetry shows."""
    index = tl.program_id(0).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    number = numbers + index * NUMBER
    size = root_mean(row, sums, U_SQUARES)
    clip = clipping(size, option)
    tl.store(number + CLIP, clip)
    tl.store(number + RATE, rate(row, option, sums))
    tl.store(number + RES_FACTOR, tl.sqrt(residual_correction(row, option)))
    norms = at(tl.load(row + NORMS), 0, tl.float32)
    tl.store(norms, size.to(tl.float32))
    tl.store(norms + 1, clip.to(tl.float32))


@triton.jit
def came_average(
    rows, grads, tiles, hyper, grad_scale, commit, roots, numbers, partials,
    G: tl.constexpr, S: tl.constexpr, CODES_IN_TILES: tl.constexpr,
    VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr,
):  # fmt: skip
    """The average, unless it is there already in 8 bits, and the partial sums of its residual's squares."""
    tile = tl.program_id(0)
    index = tl.load(tiles + tile).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    start, shape, matrix, line, column = corner(row, tile, WIDE)
    _, _, row_parts, col_parts = place(row, tile, partials, WIDE)

    g, m = tl.load(grads + index), tl.load(row + EXP_AVG)
    root = tl.load(roots + tl.load(row + FIRST_MATRIX) + matrix) * number(numbers + index * NUMBER + CLIP)  # CAME-clip
    row_averages = averages(row, SQ_ROW, matrix * tl.load(row + HEIGHT) + line)
    c = column_factors(averages(row, SQ_COL, matrix * tl.load(row + WIDTH) + column), shape, WIDE)
    factors = gradient_scale(grad_scale, option), number(option + BETA1), number(option + BETA1_REST), root
    pointers = at(g, start, G), at(m, start, S)
    scales, parts = scales_of(row, start), (row_parts, col_parts)
    if aligned(m, shape, VECTOR):
        if g % 16 == 0:
            average(
                pointers, scales, shape, factors, row_averages, c, parts,
                S, CODES_IN_TILES, VECTOR, VECTOR, WIDE, PATCH,
            )  # fmt: skip
        else:  # as gradients of FSDP2 and DDP often are: they alone are moved one by one
            average(
                pointers, scales, shape, factors, row_averages, c, parts,
                S, CODES_IN_TILES, VECTOR, 1, WIDE, 2 * FEW,
            )  # fmt: skip
    else:
        average(
            pointers, scales, shape, factors, row_averages, c, parts,
            S, CODES_IN_TILES, 1, 1, WIDE, FEW,
        )  # fmt: skip


@triton.jit
def average(
    pointers, scales, shape, factors, row_averages, c, parts,
    S: tl.constexpr, CODES_IN_TILES: tl.constexpr,
    VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr,
):  # fmt: skip
    """The average of a tile, and the sums of (u - m)^2 over its rows and columns."""
    ROWS: tl.constexpr = PATCH // WIDE
    scale, beta1, beta1_rest, root = factors
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for i in range(0, shape[0], ROWS):
        offsets, mask = patch(i, shape, VECTOR, WIDE, ROWS)
        m = momentum(pointers[1], offsets, mask, scales, i, shape, S, CODES_IN_TILES, VECTOR, WIDE, ROWS)
        g = read(pointers[0], offsets, mask, G_VECTOR).to(tl.float32) * scale
        u = update(g, row_factors(row_averages, i, shape, root, ROWS), c)
        if tl.int8 != S:
            m = write(pointers[1], offsets, mask, beta1 * m + beta1_rest * u, VECTOR)  # CAME-m
        elif CODES_IN_TILES:
            codes, row_scales = encoded(beta1 * m + beta1_rest * u, mask, 0, "linear")  # CAME-m
            store_lines(tile_scales(scales), i, shape[0], row_scales, ROWS, tl.cdiv(scales[1], CODES))
            m = decoded(write(pointers[1], offsets, mask, codes, VECTOR), row_scales[:, None], "linear")
        residual = (u - m) * (u - m)
        store_lines(parts[0], i, shape[0], tl.sum(residual, 1), ROWS)
        total += residual
    store_columns(parts[1], shape[1], tl.sum(total, 0), WIDE)


@triton.jit
def came_apply(
    rows, grads, tiles, hyper, commit, line_sums, roots, numbers, sums,
    X: tl.constexpr, S: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr,
    CODES_IN_TILES: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr,
):  # fmt: skip
    """The parameter; backwards."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(tiles + tile).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    start, shape, matrix, line, column = corner(row, tile, WIDE)

    m = tl.load(row + EXP_AVG)
    root = row_root(row, matrix, line_sums, roots + tl.load(row + FIRST_MATRIX) + matrix, SPLIT, WIDE)
    row_averages = averages(row, RES_ROW, matrix * tl.load(row + HEIGHT) + line)
    c = column_factors(averages(row, RES_COL, matrix * tl.load(row + WIDTH) + column), shape, WIDE)
    c *= number(numbers + index * NUMBER + RES_FACTOR)
    lr = tl.load(numbers + index * NUMBER + RATE)
    factors = lr.to(tl.float32), (lr * tl.load(option + DECAY)).to(tl.float32), root
    draws = stream(row, count(row), ROUNDING == "stochastic", CUT)
    pointers = weight_at(row, start, X, ROUNDING), at(m, start, S)
    scales = scales_of(row, start)
    if aligned(weight_addresses(row) | m, shape, VECTOR):
        r = apply(
            pointers, scales, shape, factors, row_averages, c, draws,
            S, ROUNDING, CODES_IN_TILES, VECTOR, WIDE, PATCH,
        )  # fmt: skip
    else:
        r = apply(
            pointers, scales, shape, factors, row_averages, c, draws,
            S, ROUNDING, CODES_IN_TILES, 1, WIDE, FEW,
        )  # fmt: skip
    if SPLIT is None:
        there = tl.arange(0, WIDE) < shape[1]
        confidence = r * tl.sum(tl.where(there, c, 0.0).to(tl.float64), 0)
        tl.store(sums + tile * SUM + CONFIDENCES, confidence)


@triton.jit
def apply(
    pointers, scales, shape, factors, row_averages, c, draws,
    S: tl.constexpr, ROUNDING: tl.constexpr, CODES_IN_TILES: tl.constexpr,
    VECTOR: tl.constexpr, WIDE: tl.constexpr, PATCH: tl.constexpr,
):  # fmt: skip
    """The parameter's tile; returns the sum of the rows' factors."""
    ROWS: tl.constexpr = PATCH // WIDE
    lr, decay, root = factors
    total = tl.zeros((ROWS,), tl.float64)
    for i in range(0, shape[0], ROWS):
        offsets, mask = patch(i, shape, VECTOR, WIDE, ROWS)
        m = momentum(pointers[1], offsets, mask, scales, i, shape, S, CODES_IN_TILES, VECTOR, WIDE, ROWS)
        r = row_factors(row_averages, i, shape, root, ROWS)
        x = read_weight(pointers[0], offsets, mask, ROUNDING, VECTOR)
        draw = draws, firsts(scales[2], i, shape, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
        x -= decay * x
        write_weight(pointers[0], offsets, mask, x - lr * update(m, r, c), draw, ROUNDING, VECTOR)  # CAME-x
        total += tl.where(i + tl.arange(0, ROWS) < shape[0], r, 0.0).to(tl.float64)
    return tl.sum(total, 0)


# ---- both ------------------------------------------------------------------------------------------------------------


@triton.jit
def came_codes(
    rows, grads, packs, hyper, grad_scale, commit, roots, numbers,
    G: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """The average in 8 bits: some blocks, which run in the order of memory, whatever the tiles."""
    pack = tl.program_id(0)
    index = tl.load(packs + pack).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    inner = tl.load(row + INNER)
    stop = tl.load(row + SIZE) // inner * tl.cdiv(inner, CODES)
    where = code_blocks((pack - tl.load(row + FIRST_PACK)) * PACK, stop, inner, 1, PACK)
    offsets, mask = where[0], where[1]

    g = read(at(tl.load(grads + index), 0, G), offsets, mask).to(tl.float32) * gradient_scale(grad_scale, option)
    clip = number(numbers + index * NUMBER + CLIP)
    if FACTORED:
        height, width = tl.load(row + HEIGHT), tl.load(row + WIDTH)
        first, lanes = tl.min(offsets, 1), tl.arange(0, CODES)
        line, column = wrapped((first % width)[:, None] + lanes[None, :], width)
        matrix, _ = wrapped((first // width % height)[:, None] + line, height)
        matrix += (first // width // height)[:, None]
        line += (first // width)[:, None]
        root = tl.load(roots + tl.load(row + FIRST_MATRIX) + matrix, mask=mask, other=0.0) * clip  # CAME-clip
        r = inverse_root(tl.load(averages(row, SQ_ROW, 0) + line, mask=mask, other=1.0)) * root
        c = inverse_root(tl.load(averages(row, SQ_COL, 0) + matrix * width + column, mask=mask, other=1.0))
        u = g * c * r  # CAME-u
    else:
        u = unfactored(g, read(at(tl.load(row + EXP_AVG_SQ), 0, tl.float32), offsets, mask)) * clip  # CAME-clip

    moment = moment_at(tl.load(row + EXP_AVG), tl.load(row + EXP_AVG_SCALE), 0, tl.int8, "linear")
    m = read_moment(moment, where, "linear", 1)
    m = number(option + BETA1) * m + number(option + BETA1_REST) * u  # CAME-m
    write_moment(moment, where, m, 0, "linear", 1)


@triton.jit
def came_figures(rows, grads, commit, sums, numbers, FACTORED: tl.constexpr, SPLIT: tl.constexpr):
    """One program per tensor, when all else is done: its mean confidence, and its step count."""
    index = tl.program_id(0).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row = rows + index * ROW
    confidence = tile_total(row, sums, CONFIDENCES) / tl.maximum(tl.load(row + NUMEL), 1)
    if SPLIT is not None:  # averages that ranks have added up are not corrected yet
        confidence *= tl.load(numbers + index * NUMBER + RES_FACTOR)
    norms = at(tl.load(row + NORMS), 0, tl.float32)
    tl.store(norms + 2, confidence.to(tl.float32) if FACTORED else 1.0)
    count_step(row)
