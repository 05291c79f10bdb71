"""LAMB on the device, in Triton: two passes over the model, with one program per tensor between them.

Programs find everything in tables of addresses and numbers (`lamb.py` lays them out), so that a launch serves any
number of tensors, and nothing is compiled again when a number changes. Where the lines tagged `LAMB-...` leave a
question open, `reference/lamb.py` answers it. Arithmetic is in float32; sums of squares, and what there is one of for
each tensor, in float64.
"""

import triton
import triton.language as tl

from bighorn.kernels.triton.common_kernels import (
    COUNTS,
    DECAY,
    EXP_AVG,
    FIRST,
    HYPER,
    LANES,
    LR,
    NORMS,
    OPTION,
    PARAM,
    ROW,
    SIGN,
    STEP,
    STOP,
    at,
    block,
    extent,
    folded,
    number,
    read,
    vectorised,
    write,
)

# Columns of the table of rows, after the common ones.
EXP_AVG_SQ = tl.constexpr(9)
MAX_EXP_AVG_SQ = tl.constexpr(10)

# Columns of the table of hyper-parameters, likewise.
BETA1 = tl.constexpr(3)
BETA2 = tl.constexpr(4)
BETA3 = tl.constexpr(5)  # what g is multiplied with in m
BETA4 = tl.constexpr(6)  # what g^2 is multiplied with in v
LOG_BETA1 = tl.constexpr(7)  # -inf where there is no bias correction
LOG_BETA2 = tl.constexpr(8)
CORRECTS_LR = tl.constexpr(9)  # 1 where the bias correction is a factor of lr
EPS = tl.constexpr(10)
ADAPTS = tl.constexpr(11)  # 0 where the trust ratio is 1, and the first pass writes x
WEIGHT_LOW = tl.constexpr(12)
WEIGHT_HIGH = tl.constexpr(13)
RATIO_LOW = tl.constexpr(14)
RATIO_HIGH = tl.constexpr(15)

# The table of factors, which the first pass leaves to the others: float64, one row per tensor.
M_FACTOR = tl.constexpr(0)  # r = M_FACTOR * m / (sqrt(v) + ROOT_EPS)
ROOT_EPS = tl.constexpr(1)
STRIDE = tl.constexpr(2)  # what u is multiplied with: lr, its correction, and in the end the trust ratio
FACTOR = tl.constexpr(3)


@triton.jit
def lamb_moments(
    rows, grads, owners, hyper, grad_scale, commit, sums, factors,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, DECAY_MODE: tl.constexpr, AMSGRAD: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first pass: moments, the sums of the squares of x and u for each chunk, and x itself where nothing adapts."""
    if not tl.load(commit):
        return
    chunk = tl.program_id(0)
    index = tl.load(owners + chunk).to(tl.int64)
    row = rows + index * ROW
    option = hyper + tl.load(row + HYPER) * OPTION
    factor = factors + index * FACTOR
    start, size = extent(row, chunk, CHUNK)

    t = tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))) + 1
    m_factor, root_eps, stride = corrections(t, option)
    if start == 0:
        tl.store(factor + M_FACTOR, m_factor)
        tl.store(factor + ROOT_EPS, root_eps)
        tl.store(factor + STRIDE, stride)

    x, g, m, v = tl.load(row + PARAM), tl.load(grads + index), tl.load(row + EXP_AVG), tl.load(row + EXP_AVG_SQ)
    v_max = tl.load(row + MAX_EXP_AVG_SQ)
    whole = vectorised(x | g | m | v | v_max, size, BLOCK)
    pointers = at(x, start, X), at(g, start, G), at(m, start, S), at(v, start, S), at(v_max, start, S)
    scale = (tl.load(grad_scale) * tl.load(option + SIGN)).to(tl.float32)
    numbers = scale, m_factor.to(tl.float32), root_eps.to(tl.float32), stride.to(tl.float32)
    x1, u1 = moments(pointers, numbers, option, 0, whole, False, DECAY_MODE, AMSGRAD, BLOCK)
    x2, u2 = moments(pointers, numbers, option, whole, size, True, DECAY_MODE, AMSGRAD, BLOCK)
    tl.store(sums + 2 * chunk, tl.sum(x1 + x2, 0))
    tl.store(sums + 2 * chunk + 1, tl.sum(u1 + u2, 0))


@triton.jit
def moments(
    pointers, numbers, option, first, stop,
    MASKED: tl.constexpr, DECAY_MODE: tl.constexpr, AMSGRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements `first` to `stop` of a chunk; returns the sums of x^2 and u^2, one for each lane."""
    scale, m_factor, root_eps, stride = numbers
    beta1, beta2 = number(option + BETA1), number(option + BETA2)
    beta3, beta4 = number(option + BETA3), number(option + BETA4)
    decay, shrink = number(option + DECAY), shrinkage(option)
    writes_x = tl.load(option + ADAPTS) == 0
    x_squares = tl.zeros((LANES,), tl.float64)
    u_squares = tl.zeros((LANES,), tl.float64)
    for i in range(first, stop, BLOCK):
        offsets, mask = block(i, stop, MASKED, BLOCK)
        x = read(pointers[0], offsets, mask).to(tl.float32)
        g = read(pointers[1], offsets, mask).to(tl.float32) * scale
        if DECAY_MODE == "l2":
            g += decay * x
        m = beta1 * read(pointers[2], offsets, mask).to(tl.float32) + beta3 * g  # LAMB-m
        v = beta2 * read(pointers[3], offsets, mask).to(tl.float32) + beta4 * (g * g)  # LAMB-v
        m, v = write(pointers[2], offsets, mask, m), write(pointers[3], offsets, mask, v)
        if AMSGRAD:
            v_max = read(pointers[4], offsets, mask).to(tl.float32)
            v = write(pointers[4], offsets, mask, tl.maximum(v_max, v, propagate_nan=tl.PropagateNan.ALL))
        if DECAY_MODE == "decoupled":
            x *= shrink
        u = update(x, m, v, m_factor, root_eps, decay, DECAY_MODE)
        if MASKED:
            u = tl.where(mask, u, 0.0)  # without eps, 0 / 0 where there is no element
        x_squares += folded(x.to(tl.float64) * x.to(tl.float64))
        u_squares += folded(u.to(tl.float64) * u.to(tl.float64))
        if writes_x:
            write(pointers[0], offsets, mask, x - stride * u)  # LAMB-x
    return x_squares, u_squares


@triton.jit
def lamb_norms(rows, hyper, commit, sums, factors):
    """One program per tensor: its norms, its trust ratio, and its step count."""
    if not tl.load(commit):
        return
    index = tl.program_id(0).to(tl.int64)
    row = rows + index * ROW
    option = hyper + tl.load(row + HYPER) * OPTION
    x_squares = tl.zeros((LANES,), tl.float64)
    u_squares = tl.zeros((LANES,), tl.float64)
    stop = tl.load(row + STOP)
    for i in range(tl.load(row + FIRST), stop, LANES):
        chunks = i + tl.arange(0, LANES)
        x_squares += tl.load(sums + 2 * chunks, mask=chunks < stop, other=0.0)
        u_squares += tl.load(sums + 2 * chunks + 1, mask=chunks < stop, other=0.0)
    weight_norm, update_norm = tl.sqrt(tl.sum(x_squares, 0)), tl.sqrt(tl.sum(u_squares, 0))
    q = trust_ratio(weight_norm, update_norm, option)

    stride = factors + index * FACTOR + STRIDE
    tl.store(stride, tl.load(stride) * q)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    tl.store(norms, weight_norm.to(tl.float32))
    tl.store(norms + 1, update_norm.to(tl.float32))
    tl.store(norms + 2, q.to(tl.float32))
    step = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    tl.store(step, tl.load(step) + 1, mask=tl.load(row + COUNTS) != 0)


@triton.jit
def trust_ratio(weight_norm, update_norm, option):
    """As `trust_ratio` of the reference; the bounds are 0 and infinity where there are none, and a NaN stays one."""
    q = bounded(weight_norm, option + WEIGHT_LOW, option + WEIGHT_HIGH) / update_norm  # LAMB-q
    q = bounded(q, option + RATIO_LOW, option + RATIO_HIGH)
    return tl.where((weight_norm == 0) | (update_norm == 0) | (tl.load(option + ADAPTS) == 0), 1.0, q)


@triton.jit
def lamb_apply(
    rows, owners, hyper, commit, factors,
    X: tl.constexpr, S: tl.constexpr, DECAY_MODE: tl.constexpr, AMSGRAD: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The second pass: x. It goes backwards, since the last chunks of the first pass may lie in the cache still."""
    if not tl.load(commit):
        return
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(owners + chunk).to(tl.int64)
    row = rows + index * ROW
    option = hyper + tl.load(row + HYPER) * OPTION
    factor = factors + index * FACTOR
    start, size = extent(row, chunk, CHUNK)

    x, m = tl.load(row + PARAM), tl.load(row + EXP_AVG)
    v = tl.load(row + (MAX_EXP_AVG_SQ if AMSGRAD else EXP_AVG_SQ))
    whole = vectorised(x | m | v, size, BLOCK)
    pointers = at(x, start, X), at(m, start, S), at(v, start, S)
    apply(pointers, factor, option, 0, whole, False, DECAY_MODE, BLOCK)
    apply(pointers, factor, option, whole, size, True, DECAY_MODE, BLOCK)


@triton.jit
def apply(
    pointers, factor, option, first, stop, MASKED: tl.constexpr, DECAY_MODE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Elements `first` to `stop` of a chunk."""
    m_factor, root_eps, stride = number(factor + M_FACTOR), number(factor + ROOT_EPS), number(factor + STRIDE)
    decay, shrink = number(option + DECAY), shrinkage(option)
    for i in range(first, stop, BLOCK):
        offsets, mask = block(i, stop, MASKED, BLOCK)
        x = read(pointers[0], offsets, mask).to(tl.float32)
        m = read(pointers[1], offsets, mask).to(tl.float32)
        v = read(pointers[2], offsets, mask).to(tl.float32)
        if DECAY_MODE == "decoupled":
            x *= shrink
        u = update(x, m, v, m_factor, root_eps, decay, DECAY_MODE)
        write(pointers[0], offsets, mask, x - stride * u)  # LAMB-x


# ---- what both passes compute --------------------------------------------------------------------------------------


@triton.jit
def update(x, m, v, m_factor, root_eps, decay, DECAY_MODE: tl.constexpr):
    """The u of a block. Both bias corrections have moved to where a tensor has one number."""
    r = tl.div_rn(m * m_factor, tl.sqrt_rn(v) + root_eps)
    return r + decay * x if DECAY_MODE == "ratio" else r  # LAMB-u


@triton.jit
def corrections(t, option):
    """M_FACTOR, ROOT_EPS and STRIDE at step `t`, the last without a trust ratio."""
    correction1 = 1 - tl.exp(t.to(tl.float64) * tl.load(option + LOG_BETA1))
    root2 = tl.sqrt(1 - tl.exp(t.to(tl.float64) * tl.load(option + LOG_BETA2)))
    corrects_lr = tl.load(option + CORRECTS_LR) != 0
    both, lr, eps = root2 / correction1, tl.load(option + LR), tl.load(option + EPS)
    return (
        tl.where(corrects_lr, 1.0, both),
        tl.where(corrects_lr, eps, eps * root2),
        tl.where(corrects_lr, lr * both, lr),
    )


@triton.jit
def shrinkage(option):
    """What decoupled decay multiplies x with."""
    return (1 - tl.load(option + LR) * tl.load(option + DECAY)).to(tl.float32)


@triton.jit
def bounded(value, low, high):
    """A scalar clamped to two numbers in memory; a NaN stays one."""
    value = tl.where(value < tl.load(low), tl.load(low), value)
    return tl.where(value > tl.load(high), tl.load(high), value)
