"""CAME on the device for tensors whose second moment is not factored: chunks of elements, as LAMB's are."""

import triton
import triton.language as tl

from bighorn.kernels.triton.came_columns import (
    BETA1,
    BETA1_REST,
    CLIP,
    EPS1,
    EXP_AVG_SQ,
    NUMBER,
    RATE,
    SCALE_EPS,
    SUM,
    U_SQUARES,
    X_SQUARES,
)
from bighorn.kernels.triton.came_value_kernels import (
    scales_of,
    second_rest,
    unfactored,
)
from bighorn.kernels.triton.codec_kernels import (
    CODES,
    decoded,
)
from bighorn.kernels.triton.common_kernels import (
    DECAY,
    EXP_AVG,
    LANES,
    UNMASKED,
    at,
    block,
    count,
    entries,
    extent,
    folded,
    gradient_scale,
    number,
    read,
    takes_part,
    vectorised,
    write,
)
from bighorn.kernels.triton.weight_kernels import (
    read_weight,
    stream,
    weight_addresses,
    weight_at,
    write_weight,
)


@triton.jit
def came_second_moment(
    rows, grads, tiles, hyper, grad_scale, commit, sums,
    X: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The unfactored second moment, the sum of u^2 over each chunk, and that of x^2 where the size of x counts."""
    chunk = tl.program_id(0)
    index = tl.load(tiles + chunk).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    start, size = extent(row, chunk, CHUNK)
    g, v = tl.load(grads + index), tl.load(row + EXP_AVG_SQ)
    rest = second_rest(row, option)
    numbers = gradient_scale(grad_scale, option), (1 - rest).to(tl.float32), rest.to(tl.float32), number(option + EPS1)
    whole = vectorised(v, size, BLOCK)
    pointers = at(g, start, G), at(v, start, tl.float32)
    if g % 16 == 0:
        total = second_moment(pointers, numbers, 0, whole, UNMASKED, UNMASKED, BLOCK)
    else:
        total = second_moment(pointers, numbers, 0, whole, UNMASKED, 1, BLOCK)
    total += second_moment(pointers, numbers, whole, size, 1, 1, BLOCK)
    tl.store(sums + chunk * SUM + U_SQUARES, tl.sum(total, 0))
    if tl.load(option + SCALE_EPS) >= 0:
        weight, squares = weight_at(row, start, X, ROUNDING), tl.zeros((LANES,), tl.float64)
        for i in range(0, size, BLOCK):
            offsets, mask = block(i, size, BLOCK)
            value = read_weight(weight, offsets, mask, ROUNDING).to(tl.float64)
            squares += folded(value * value)
        tl.store(sums + chunk * SUM + X_SQUARES, tl.sum(squares, 0))


@triton.jit
def second_moment(
    pointers, numbers, first, stop, VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Elements `first` to `stop` of a chunk; returns the sums of u^2, one for each lane."""
    scale, beta2, rest, eps = numbers
    total = tl.zeros((LANES,), tl.float64)
    for i in range(first, stop, BLOCK):
        offsets, mask = block(i, stop, BLOCK)
        g = read(pointers[0], offsets, mask, G_VECTOR).to(tl.float32) * scale
        v = beta2 * read(pointers[1], offsets, mask, VECTOR) + rest * (g * g + eps)
        u = unfactored(g, write(pointers[1], offsets, mask, v, VECTOR))
        total += folded(u.to(tl.float64) * u.to(tl.float64))
    return total


@triton.jit
def came_move(
    rows, grads, tiles, hyper, grad_scale, commit, numbers,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The average, unless it is there already in 8 bits, and the parameter, of an unfactored tensor."""
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(tiles + chunk).to(tl.int64)
    if not takes_part(grads, commit, index):
        return
    row, option = entries(rows, hyper, index)
    start, size = extent(row, chunk, CHUNK)
    g, m, v = tl.load(grads + index), tl.load(row + EXP_AVG), tl.load(row + EXP_AVG_SQ)
    lr = tl.load(numbers + index * NUMBER + RATE)
    factors = (
        gradient_scale(grad_scale, option),
        number(numbers + index * NUMBER + CLIP),
        number(option + BETA1),
        number(option + BETA1_REST),
        lr.to(tl.float32),
        (lr * tl.load(option + DECAY)).to(tl.float32),
    )
    whole = vectorised(weight_addresses(row) | m | v, size, BLOCK)
    pointers = weight_at(row, start, X, ROUNDING), at(g, start, G), at(m, start, S), at(v, start, tl.float32)
    scales, draws = scales_of(row, start), stream(row, count(row), ROUNDING == "stochastic", CUT)
    if g % 16 == 0:
        move(pointers, scales, factors, draws, 0, whole, UNMASKED, UNMASKED, S, ROUNDING, BLOCK)
    else:
        move(pointers, scales, factors, draws, 0, whole, UNMASKED, 1, S, ROUNDING, BLOCK)
    move(pointers, scales, factors, draws, whole, size, 1, 1, S, ROUNDING, BLOCK)


@triton.jit
def move(
    pointers, scales, factors, draws, first, stop,
    VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, S: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements `first` to `stop` of a chunk."""
    scale, clip, beta1, beta1_rest, lr, decay = factors
    for i in range(first, stop, BLOCK):
        offsets, mask = block(i, stop, BLOCK)
        x = read_weight(pointers[0], offsets, mask, ROUNDING, VECTOR)
        if tl.int8 == S:
            element = scales[2] + offsets
            place = element // scales[1] * tl.cdiv(scales[1], CODES) + element % scales[1] // CODES
            m = decoded(read(pointers[2], offsets, mask, VECTOR), tl.load(scales[0] + place, mask=mask), "linear")
        else:
            g = read(pointers[1], offsets, mask, G_VECTOR).to(tl.float32) * scale
            u = unfactored(g, read(pointers[3], offsets, mask, VECTOR)) * clip  # CAME-clip
            m = beta1 * read(pointers[2], offsets, mask, VECTOR).to(tl.float32) + beta1_rest * u  # CAME-m
            m = write(pointers[2], offsets, mask, m, VECTOR)
        x -= decay * x
        write_weight(pointers[0], offsets, mask, x - lr * m, (draws, scales[2], offsets), ROUNDING, VECTOR)  # CAME-x
