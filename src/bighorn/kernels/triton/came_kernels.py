"""CAME on the device, in Triton: passes over tiles of matrices, with the averages of rows and columns between them.

A matrix is cut into tiles. What a tile knows of a row or a column is a partial sum, and `came_lines` adds these up,
always in the same order. An unfactored tensor has no such sums, and is cut into chunks, as LAMB's are. An average that
is kept in 8 bits advances in a pass of its own, over the codec's blocks, which need not lie in tiles.

Where the lines tagged `CAME-...` leave a question open, `reference/came.py` answers it. Arithmetic is in float32; sums
over more than a tile, and what there is one of for a row, a column or a tensor, in float64.
"""

import triton
import triton.language as tl

from bighorn.kernels.triton.came_columns import (
    BETA1,
    BETA1_REST,
    BETA3_REST,
    CONFIDENCES,
    EPS1,
    EPS2,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    FEW,
    FIRST_MATRIX,
    FIRST_PACK,
    HEIGHT,
    HIGH,
    LEADS_COLS,
    LEADS_ROWS,
    NUMEL,
    PACK,
    RES_COL,
    RES_ROW,
    SCALE_EPS,
    SQ_COL,
    SQ_ROW,
    SUM,
    U_SQUARES,
    WHOLE_HEIGHT,
    WHOLE_WIDTH,
    WIDE,
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
    tile_total,
    unfactored,
    update,
    wrapped,
)
from bighorn.kernels.triton.codec_kernels import CODES, code_blocks, decoded, moment_at, read_moment, write_moment
from bighorn.kernels.triton.common_kernels import (
    COUNTS,
    DECAY,
    EXP_AVG,
    HYPER,
    INNER,
    LANES,
    NORMS,
    OPTION,
    ROW,
    SIZE,
    STEP,
    at,
    block,
    count,
    entries,
    extent,
    folded,
    gradient_scale,
    number,
    read,
    vectorised,
    write,
)
from bighorn.kernels.triton.weight_kernels import (
    random_bits,
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
    X: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The partial sums of g^2, and of x^2 where the size of x counts."""
    if not tl.load(commit):
        return
    tile = tl.program_id(0)
    index, row, option = entries(rows, tiles, hyper, tile)
    start, shape, row_parts, col_parts = place(row, tile, partials)
    g = tl.load(grads + index)
    scale = gradient_scale(grad_scale, option)
    if aligned(g, shape, VECTOR):
        square_tile(at(g, start, G), shape, scale, row_parts, col_parts, VECTOR)
    else:
        square_tile(at(g, start, G), shape, scale, row_parts, col_parts, 1)
    if tl.load(option + SCALE_EPS) >= 0:
        tl.store(sums + tile * SUM + X_SQUARES, param_squares(weight_at(row, start, X, ROUNDING), shape, ROUNDING))


@triton.jit
def square_tile(g, shape, scale, row_parts, col_parts, VECTOR: tl.constexpr):
    """The sums of g^2 over the rows and the columns of a tile."""
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for i in range(0, shape[0], HIGH):
        offsets, mask = patch(i, shape, VECTOR)
        value = read(g, offsets, mask, VECTOR).to(tl.float32) * scale
        store_lines(row_parts, i, shape[0], tl.sum(value * value, 1))
        total += value * value
    store_columns(col_parts, shape[1], tl.sum(total, 0))


@triton.jit
def param_squares(weight, shape, ROUNDING: tl.constexpr):
    """The sum of x^2 over a tile."""
    total = tl.zeros((HIGH, WIDE), tl.float64)
    for i in range(0, shape[0], HIGH):
        offsets, mask = patch(i, shape, 1)
        value = read_weight(weight, offsets, mask, ROUNDING).to(tl.float64)
        total += value * value
    return tl.sum(total)


@triton.jit
def came_lines(
    rows, pieces, hyper, commit, partials, line_sums, lines, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Advances averages of rows or columns, and leaves the sum of what they have become.

    Of shards it leaves the averages themselves, and of those that are split ("rows" says that a matrix's rows are, and
    so the averages of its columns) this rank's part alone.
    """
    if not tl.load(commit):
        return
    piece = tl.program_id(0)
    _, row, option = entries(rows, pieces, hyper, piece)
    is_row, line, mask, length, parts = lines_of(row, piece)
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
    G: tl.constexpr, SPLIT: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The sum of u^2 over each tile, and for each matrix the root of the mean of its rows' averages."""
    if not tl.load(commit):
        return
    tile = tl.program_id(0)
    index, row, option = entries(rows, tiles, hyper, tile)
    start, shape, matrix, line, column = corner(row, tile)
    root_here = roots + tl.load(row + FIRST_MATRIX) + matrix
    root = row_root(row, matrix, line_sums, root_here, SPLIT)
    if (SPLIT is None) & (line == 0) & (column == 0):
        tl.store(root_here, root)

    g = tl.load(grads + index)
    row_averages = averages(row, SQ_ROW, matrix * tl.load(row + HEIGHT) + line)
    c = column_factors(averages(row, SQ_COL, matrix * tl.load(row + WIDTH) + column), shape)
    scale = gradient_scale(grad_scale, option)
    if aligned(g, shape, VECTOR):
        total = update_squares(at(g, start, G), shape, scale, row_averages, root, c, VECTOR)
    else:
        total = update_squares(at(g, start, G), shape, scale, row_averages, root, c, 1)
    tl.store(sums + tile * SUM + U_SQUARES, total)


@triton.jit
def update_squares(g, shape, scale, row_averages, root, c, VECTOR: tl.constexpr):
    """The sum of u^2 over a tile."""
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for i in range(0, shape[0], HIGH):
        offsets, mask = patch(i, shape, VECTOR)
        value = read(g, offsets, mask, VECTOR).to(tl.float32) * scale
        u = update(value, row_factors(row_averages, i, shape, root), c)
        total += u * u
    return tl.sum(total.to(tl.float64))


@triton.jit
def came_average(
    rows, grads, tiles, hyper, grad_scale, commit, roots, sums, partials,
    G: tl.constexpr, S: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The average, unless it is there already in 8 bits, and the partial sums of its residual's squares."""
    if not tl.load(commit):
        return
    tile = tl.program_id(0)
    index, row, option = entries(rows, tiles, hyper, tile)
    start, shape, matrix, line, column = corner(row, tile)
    _, _, row_parts, col_parts = place(row, tile, partials)

    g, m = tl.load(grads + index), tl.load(row + EXP_AVG)
    root = tl.load(roots + tl.load(row + FIRST_MATRIX) + matrix) * clipping(row, option, sums)  # CAME-clip
    row_averages = averages(row, SQ_ROW, matrix * tl.load(row + HEIGHT) + line)
    c = column_factors(averages(row, SQ_COL, matrix * tl.load(row + WIDTH) + column), shape)
    numbers = gradient_scale(grad_scale, option), number(option + BETA1), number(option + BETA1_REST), root
    pointers = at(g, start, G), at(m, start, S)
    scales = scales_of(row, start)
    if aligned(g | m, shape, VECTOR):
        average(pointers, scales, shape, numbers, row_averages, c, row_parts, col_parts, S, VECTOR)
    else:
        average(pointers, scales, shape, numbers, row_averages, c, row_parts, col_parts, S, 1)


@triton.jit
def average(
    pointers, scales, shape, numbers, row_averages, c, row_parts, col_parts, S: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """The average of a tile, and the sums of (u - m)^2 over its rows and columns."""
    ROWS: tl.constexpr = HIGH if VECTOR > 1 else FEW
    scale, beta1, beta1_rest, root = numbers
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for i in range(0, shape[0], ROWS):
        offsets, mask = patch(i, shape, VECTOR, ROWS)
        m = momentum(pointers[1], offsets, mask, scales, i, shape, S, VECTOR, ROWS)
        g = read(pointers[0], offsets, mask, VECTOR).to(tl.float32) * scale
        u = update(g, row_factors(row_averages, i, shape, root, ROWS), c)
        if tl.int8 != S:
            m = write(pointers[1], offsets, mask, beta1 * m + beta1_rest * u, VECTOR)  # CAME-m
        residual = (u - m) * (u - m)
        store_lines(row_parts, i, shape[0], tl.sum(residual, 1), ROWS)
        total += residual
    store_columns(col_parts, shape[1], tl.sum(total, 0))


@triton.jit
def came_apply(
    rows, tiles, hyper, commit, line_sums, roots, sums,
    X: tl.constexpr, S: tl.constexpr,
    ROUNDING: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The parameter. It goes backwards, since the last tiles of the pass before may lie in the cache still."""
    if not tl.load(commit):
        return
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    _, row, option = entries(rows, tiles, hyper, tile)
    start, shape, matrix, line, column = corner(row, tile)

    m = tl.load(row + EXP_AVG)
    root = row_root(row, matrix, line_sums, roots + tl.load(row + FIRST_MATRIX) + matrix, SPLIT)
    row_averages = averages(row, RES_ROW, matrix * tl.load(row + HEIGHT) + line)
    c = column_factors(averages(row, RES_COL, matrix * tl.load(row + WIDTH) + column), shape)
    c *= tl.sqrt(residual_correction(row, option)).to(tl.float32)
    lr = rate(row, option, sums)
    numbers = lr.to(tl.float32), (lr * tl.load(option + DECAY)).to(tl.float32), root
    draw = start, stream(row, count(row), ROUNDING == "stochastic", CUT)
    pointers = weight_at(row, start, X, ROUNDING), at(m, start, S)
    scales = scales_of(row, start)
    if aligned(weight_addresses(row) | m, shape, VECTOR):
        r = apply(pointers, scales, shape, numbers, row_averages, c, draw, S, ROUNDING, VECTOR)
    else:
        r = apply(pointers, scales, shape, numbers, row_averages, c, draw, S, ROUNDING, 1)
    if SPLIT is None:
        there = tl.arange(0, WIDE) < shape[1]
        confidence = r * tl.sum(tl.where(there, c, 0.0).to(tl.float64), 0)
        tl.store(sums + tile * SUM + CONFIDENCES, confidence)


@triton.jit
def apply(
    pointers, scales, shape, numbers, row_averages, c, draw,
    S: tl.constexpr, ROUNDING: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The parameter's tile; returns the sum of the rows' factors."""
    ROWS: tl.constexpr = HIGH if VECTOR > 1 else FEW
    lr, decay, root = numbers
    total = tl.zeros((ROWS,), tl.float64)
    for i in range(0, shape[0], ROWS):
        offsets, mask = patch(i, shape, VECTOR, ROWS)
        m = momentum(pointers[1], offsets, mask, scales, i, shape, S, VECTOR, ROWS)
        r = row_factors(row_averages, i, shape, root, ROWS)
        x = read_weight(pointers[0], offsets, mask, ROUNDING, VECTOR)
        bits = random_bits(draw[1], firsts(draw[0], i, shape, ROWS)[:, None], tl.arange(0, WIDE)[None, :])
        x -= decay * x
        write_weight(pointers[0], offsets, mask, x - lr * update(m, r, c), bits, ROUNDING, VECTOR)  # CAME-x
        total += tl.where(i + tl.arange(0, ROWS) < shape[0], r, 0.0).to(tl.float64)
    return tl.sum(total, 0)


# ---- factored, of shards ---------------------------------------------------------------------------------------------


@triton.jit
def came_known_squares(
    rows, grads, tiles, hyper, grad_scale, commit, partials, G: tl.constexpr, SPLIT: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """The partial sums, along what is split, of g^2 divided by the averages that are known though others are split."""
    if not tl.load(commit):
        return
    tile = tl.program_id(0)
    index, row, option = entries(rows, tiles, hyper, tile)
    _, _, matrix, line, column = corner(row, tile)
    start, shape, row_parts, col_parts = place(row, tile, partials)
    if SPLIT == "rows":
        known, parts = averages(row, SQ_ROW, matrix * tl.load(row + HEIGHT) + line), col_parts
    else:
        known, parts = averages(row, SQ_COL, matrix * tl.load(row + WIDTH) + column), row_parts
    g, scale = tl.load(grads + index), gradient_scale(grad_scale, option)
    if aligned(g, shape, VECTOR):
        known_squares(at(g, start, G), shape, scale, known, parts, SPLIT, VECTOR)
    else:
        known_squares(at(g, start, G), shape, scale, known, parts, SPLIT, 1)


@triton.jit
def known_squares(g, shape, scale, known, parts, SPLIT: tl.constexpr, VECTOR: tl.constexpr):
    """Those of a tile."""
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for i in range(0, shape[0], HIGH):
        offsets, mask = patch(i, shape, VECTOR)
        value = read(g, offsets, mask, VECTOR).to(tl.float32) * scale
        if SPLIT == "rows":
            value *= row_factors(known, i, shape, 1.0)[:, None]
        else:
            value *= column_factors(known, shape)[None, :]
        total += value * value
        if SPLIT == "columns":
            store_lines(parts, i, shape[0], tl.sum(value * value, 1))
    if SPLIT == "rows":
        store_columns(parts, shape[1], tl.sum(total, 0))


@triton.jit
def came_line_sums(rows, pieces, hyper, commit, partials, lines, SPLIT: tl.constexpr):
    """Adds up partial sums of the lines whose averages are split."""
    if not tl.load(commit):
        return
    piece = tl.program_id(0)
    _, row, _ = entries(rows, pieces, hyper, piece)
    is_row, line, mask, _, parts = lines_of(row, piece)
    mask = mask & is_split(is_row, SPLIT)
    tl.store(line_at(lines, row, is_row, line), line_totals(parts, partials), mask=mask)


@triton.jit
def came_settle(rows, pieces, hyper, commit, lines, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr):
    """Stores averages that have been added up over all ranks."""
    if not tl.load(commit):
        return
    piece = tl.program_id(0)
    _, row, _ = entries(rows, pieces, hyper, piece)
    is_row, line, mask, _, _ = lines_of(row, piece)
    if RESIDUAL:
        average = averages(row, tl.where(is_row, RES_ROW, RES_COL), line)
    else:
        average = averages(row, tl.where(is_row, SQ_ROW, SQ_COL), line)
    mask = mask & is_split(is_row, SPLIT)
    tl.store(average, tl.load(line_at(lines, row, is_row, line), mask=mask).to(tl.float32), mask=mask)


# ---- unfactored ------------------------------------------------------------------------------------------------------


@triton.jit
def came_second_moment(
    rows, grads, tiles, hyper, grad_scale, commit, sums,
    X: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The unfactored second moment, the sum of u^2 over each chunk, and that of x^2 where the size of x counts."""
    if not tl.load(commit):
        return
    chunk = tl.program_id(0)
    index, row, option = entries(rows, tiles, hyper, chunk)
    start, size = extent(row, chunk, CHUNK)
    g, v = tl.load(grads + index), tl.load(row + EXP_AVG_SQ)
    rest = second_rest(row, option)
    numbers = gradient_scale(grad_scale, option), (1 - rest).to(tl.float32), rest.to(tl.float32), number(option + EPS1)
    whole = vectorised(g | v, size, BLOCK)
    pointers = at(g, start, G), at(v, start, tl.float32)
    total = second_moment(pointers, numbers, 0, whole, False, BLOCK)
    total += second_moment(pointers, numbers, whole, size, True, BLOCK)
    tl.store(sums + chunk * SUM + U_SQUARES, tl.sum(total, 0))
    if tl.load(option + SCALE_EPS) >= 0:
        weight, squares = weight_at(row, start, X, ROUNDING), tl.zeros((LANES,), tl.float64)
        for i in range(0, size, BLOCK):
            offsets, mask = block(i, size, True, BLOCK)
            value = read_weight(weight, offsets, mask, ROUNDING).to(tl.float64)
            squares += folded(value * value)
        tl.store(sums + chunk * SUM + X_SQUARES, tl.sum(squares, 0))


@triton.jit
def second_moment(pointers, numbers, first, stop, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Elements `first` to `stop` of a chunk; returns the sums of u^2, one for each lane."""
    scale, beta2, rest, eps = numbers
    total = tl.zeros((LANES,), tl.float64)
    for i in range(first, stop, BLOCK):
        offsets, mask = block(i, stop, MASKED, BLOCK)
        g = read(pointers[0], offsets, mask).to(tl.float32) * scale
        v = beta2 * read(pointers[1], offsets, mask) + rest * (g * g + eps)
        u = unfactored(g, write(pointers[1], offsets, mask, v))
        total += folded(u.to(tl.float64) * u.to(tl.float64))
    return total


@triton.jit
def came_move(
    rows, grads, tiles, hyper, grad_scale, commit, sums,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The average, unless it is there already in 8 bits, and the parameter, of an unfactored tensor."""
    if not tl.load(commit):
        return
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    index, row, option = entries(rows, tiles, hyper, chunk)
    start, size = extent(row, chunk, CHUNK)
    g, m, v = tl.load(grads + index), tl.load(row + EXP_AVG), tl.load(row + EXP_AVG_SQ)
    lr = rate(row, option, sums)
    numbers = (
        gradient_scale(grad_scale, option),
        clipping(row, option, sums),
        number(option + BETA1),
        number(option + BETA1_REST),
        lr.to(tl.float32),
        (lr * tl.load(option + DECAY)).to(tl.float32),
    )
    whole = vectorised(weight_addresses(row) | g | m | v, size, BLOCK)
    pointers = weight_at(row, start, X, ROUNDING), at(g, start, G), at(m, start, S), at(v, start, tl.float32)
    scales, draw = scales_of(row, start), stream(row, count(row), ROUNDING == "stochastic", CUT)
    move(pointers, scales, numbers, draw, 0, whole, False, S, ROUNDING, BLOCK)
    move(pointers, scales, numbers, draw, whole, size, True, S, ROUNDING, BLOCK)


@triton.jit
def move(
    pointers, scales, numbers, draw, first, stop,
    MASKED: tl.constexpr, S: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements `first` to `stop` of a chunk."""
    scale, clip, beta1, beta1_rest, lr, decay = numbers
    for i in range(first, stop, BLOCK):
        offsets, mask = block(i, stop, MASKED, BLOCK)
        x = read_weight(pointers[0], offsets, mask, ROUNDING)
        if tl.int8 == S:
            element = scales[2] + offsets
            place = element // scales[1] * tl.cdiv(scales[1], CODES) + element % scales[1] // CODES
            m = decoded(read(pointers[2], offsets, mask), tl.load(scales[0] + place, mask=mask), "linear")
        else:
            g = read(pointers[1], offsets, mask).to(tl.float32) * scale
            u = unfactored(g, read(pointers[3], offsets, mask)) * clip  # CAME-clip
            m = beta1 * read(pointers[2], offsets, mask).to(tl.float32) + beta1_rest * u  # CAME-m
            m = write(pointers[2], offsets, mask, m)
        bits = random_bits(draw, scales[2], offsets)
        x -= decay * x
        write_weight(pointers[0], offsets, mask, x - lr * m, bits, ROUNDING)  # CAME-x


# ---- both ------------------------------------------------------------------------------------------------------------


@triton.jit
def came_codes(
    rows, grads, packs, hyper, grad_scale, commit, roots, sums,
    G: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """The average in 8 bits: some blocks, which run in the order of memory, whatever the tiles."""
    if not tl.load(commit):
        return
    pack = tl.program_id(0)
    index, row, option = entries(rows, packs, hyper, pack)
    inner = tl.load(row + INNER)
    stop = tl.load(row + SIZE) // inner * tl.cdiv(inner, CODES)
    where = code_blocks((pack - tl.load(row + FIRST_PACK)) * PACK, stop, inner, 1, PACK)
    offsets, mask = where[0], where[1]

    g = read(at(tl.load(grads + index), 0, G), offsets, mask).to(tl.float32) * gradient_scale(grad_scale, option)
    clip = clipping(row, option, sums)
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
    write_moment(moment, where, m, None, "linear", 1)


@triton.jit
def came_figures(rows, hyper, commit, sums, FACTORED: tl.constexpr, SPLIT: tl.constexpr):
    """One program per tensor, when all else is done: what telemetry shows, and its step count."""
    if not tl.load(commit):
        return
    row = rows + tl.program_id(0).to(tl.int64) * ROW
    option = hyper + tl.load(row + HYPER) * OPTION
    size = tl.maximum(tl.load(row + NUMEL), 1)
    norms = at(tl.load(row + NORMS), 0, tl.float32)
    tl.store(norms, root_mean(row, sums, U_SQUARES).to(tl.float32))
    tl.store(norms + 1, clipping(row, option, sums))
    confidence = tile_total(row, sums, CONFIDENCES) / size
    if SPLIT is not None:  # averages that ranks have added up are not corrected yet
        confidence *= tl.sqrt(residual_correction(row, option))
    tl.store(norms + 2, confidence.to(tl.float32) if FACTORED else 1.0)
    step = at(tl.load(row + STEP), 0, tl.float32)
    tl.store(step, tl.load(step) + 1, mask=tl.load(row + COUNTS) != 0)
