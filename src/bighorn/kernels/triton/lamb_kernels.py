"""LAMB on the device, in Triton: two passes over the model, with one program per tensor before and between them.

Programs read all inputs from tables of addresses and numbers (`lamb.py` builds them), so that a launch serves any
number of tensors, and nothing is compiled again when a number changes. The lines tagged `LAMB-...` follow
`reference/lamb.py`, which has the details. Arithmetic is in COMPUTE: float64 for parameters in float64, else
float32. Sums of squares, and numbers that exist once per tensor, are in float64.
"""

import triton
import triton.language as tl

from bighorn.kernels.triton import codec_kernels as codec
from bighorn.kernels.triton import common_kernels as common
from bighorn.kernels.triton import lamb_layout as layout
from bighorn.kernels.triton import layer_kernels as layer
from bighorn.kernels.triton import weight_kernels as weights


@triton.jit
def lamb_factors(rows_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, _SOURCES: tl.constexpr):
    """Compute the bias corrections, with one program per tensor: their float64 would cost each program too much."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    factor, t = factors_ptr + index * layout.FACTOR, common.count(row_ptr)
    m_factor, root_eps, stride = corrections(t, option_ptr)
    tl.store(factor + layout.M_FACTOR, m_factor)
    tl.store(factor + layout.ROOT_EPS, root_eps)
    tl.store(factor + layout.STRIDE, stride)
    tl.store(factor + layout.STEP_NUMBER, t)


@triton.jit
def lamb_moments(
    rows_ptr, grads_ptr, program_to_row_ptr, options_ptr, grad_scale_ptr, apply_mask_ptr, sums_ptr, factors_ptr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, V: tl.constexpr, COMPUTE: tl.constexpr,
    M_FORM: tl.constexpr, V_FORM: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr,
    DECAY_MODE: tl.constexpr, AMSGRAD: tl.constexpr, CAUTIOUS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Run the first pass: moments, the sums of each chunk, and x itself without a trust ratio."""
    chunk = tl.program_id(0)
    index = tl.load(program_to_row_ptr + chunk).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    factor = factors_ptr + index * layout.FACTOR
    first, start, size = layer.chunk_of(row_ptr, chunk, M_FORM, CHUNK)

    g, m, v = tl.load(grads_ptr + index), tl.load(row_ptr + common.EXP_AVG), tl.load(row_ptr + layout.EXP_AVG_SQ)
    v_max = tl.load(row_ptr + layout.MAX_EXP_AVG_SQ)
    whole = layer.aligned(weights.weight_addresses(row_ptr) | m | v | v_max, row_ptr, size, M_FORM, BLOCK)
    pointers = (
        weights.weight_at(row_ptr, start, X, ROUNDING),
        common.at(g, start, G),
        codec.moment_at(m, tl.load(row_ptr + layout.EXP_AVG_SCALE), start, S, M_FORM),
        codec.moment_at(v, tl.load(row_ptr + layout.EXP_AVG_SQ_SCALE), start, V, V_FORM),
        common.at(v_max, start, V),
    )
    numbers = (
        common.gradient_scale(grad_scale_ptr, option_ptr, COMPUTE),
        common.number(factor + layout.M_FACTOR, COMPUTE),
        common.number(factor + layout.ROOT_EPS, COMPUTE),
        common.number(factor + layout.STRIDE, COMPUTE),
    )
    t = tl.load(factor + layout.STEP_NUMBER)
    rng_key = weights.rng_key(row_ptr, t, ROUNDING == "stochastic" or V_FORM == "unsigned", CUT)
    positions = first, start, tl.load(row_ptr + common.INNER), rng_key
    # With 8 codes a thread, a block is in one warp, whose threads find its scale without a barrier.
    VECTOR: tl.constexpr = common.UNMASKED if M_FORM == "" else 8
    if g % 16 == 0:
        x1, u1, kept1, products1 = moments(
            pointers, numbers, option_ptr, positions, 0, whole,
            VECTOR, VECTOR, M_FORM, V_FORM, ROUNDING, DECAY_MODE, AMSGRAD, CAUTIOUS, BLOCK,
        )  # fmt: skip
    else:  # gradients of FSDP2 and DDP are often not aligned: only they are loaded one element at a time
        x1, u1, kept1, products1 = moments(
            pointers, numbers, option_ptr, positions, 0, whole,
            VECTOR, 1, M_FORM, V_FORM, ROUNDING, DECAY_MODE, AMSGRAD, CAUTIOUS, BLOCK,
        )  # fmt: skip
    x2, u2, kept2, products2 = moments(
        pointers, numbers, option_ptr, positions, whole, size,
        1, 1, M_FORM, V_FORM, ROUNDING, DECAY_MODE, AMSGRAD, CAUTIOUS, BLOCK,
    )  # fmt: skip
    sums = sums_ptr + chunk * (layout.CAUTIOUS_SUM if CAUTIOUS else layout.SUM)
    tl.store(sums + layout.X_SQUARES, tl.sum(x1 + x2, 0))
    tl.store(sums + layout.U_SQUARES, tl.sum(u1 + u2, 0))
    if CAUTIOUS:
        tl.store(sums + layout.KEPT, tl.sum((kept1 + kept2).to(tl.float64), 0))
        tl.store(sums + layout.PRODUCTS, tl.sum(products1 + products2, 0))


@triton.jit
def moments(
    pointers, numbers, option_ptr, positions, first, stop,
    VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, M_FORM: tl.constexpr, V_FORM: tl.constexpr, ROUNDING: tl.constexpr,
    DECAY_MODE: tl.constexpr, AMSGRAD: tl.constexpr, CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step elements `first` to `stop` of a chunk; return the columns of its sums, one of each per lane."""
    AT_ONCE: tl.constexpr = BLOCK // layer.FEWER if VECTOR == 1 else BLOCK
    scale, m_factor, root_eps, stride = numbers
    COMPUTE: tl.constexpr = scale.dtype
    beta1 = common.number(option_ptr + layout.BETA1, COMPUTE)
    beta2 = common.number(option_ptr + layout.BETA2, COMPUTE)
    beta3 = common.number(option_ptr + layout.BETA3, COMPUTE)
    beta4 = common.number(option_ptr + layout.BETA4, COMPUTE)
    decay, shrink = common.number(option_ptr + common.DECAY, COMPUTE), shrinkage(option_ptr, COMPUTE)
    writes_x = tl.load(option_ptr + layout.ADAPTS) == 0
    x_squares = tl.zeros((common.LANES,), tl.float64)
    u_squares = tl.zeros((common.LANES,), tl.float64)
    kept = tl.zeros((common.LANES,), tl.float32)
    products = tl.zeros((common.LANES,), tl.float64)
    for i in range(first, stop, AT_ONCE):
        where = codec.blocks_at(positions[0], i, stop, positions[2], VECTOR, M_FORM, AT_ONCE)
        offsets, mask = where[0], where[1]
        x = weights.read_weight(pointers[0], offsets, mask, ROUNDING, VECTOR)
        g = gradient(pointers[1], where, x, scale, decay, DECAY_MODE, G_VECTOR)
        m = beta1 * codec.read_moment(pointers[2], where, M_FORM, VECTOR) + beta3 * g  # LAMB-m
        v = beta2 * codec.read_moment(pointers[3], where, V_FORM, VECTOR) + beta4 * (g * g)  # LAMB-v
        m = codec.write_moment(pointers[2], where, m, 0, M_FORM, VECTOR)
        shifts = weights.dither(positions[3], positions[1] + offsets) if V_FORM == "unsigned" else 0
        v = codec.write_moment(pointers[3], where, v, shifts, V_FORM, VECTOR)
        if AMSGRAD:
            v_max = common.widened(common.read(pointers[4], offsets, mask, VECTOR))
            v = common.write(
                pointers[4], offsets, mask, tl.maximum(v_max, v, propagate_nan=tl.PropagateNan.ALL), VECTOR
            )
        if DECAY_MODE == "decoupled":
            x *= shrink
        u = ratio(m, v, m_factor, root_eps)
        if CAUTIOUS:
            agree = agreeing(m, g)
            kept += common.folded(agree)
            u *= agree
        elif DECAY_MODE == "ratio":
            u += decay * x  # LAMB-u
        if VECTOR != common.UNMASKED:
            u = tl.where(mask, u, 0.0)  # without eps, u is 0 / 0 for elements outside the mask
        x_squares += common.folded(x.to(tl.float64) * x.to(tl.float64))
        u_squares += common.folded(u.to(tl.float64) * u.to(tl.float64))
        if CAUTIOUS:
            if DECAY_MODE == "ratio":
                products += common.folded(x.to(tl.float64) * u.to(tl.float64))
        elif writes_x:
            rng = positions[3], positions[1], offsets
            _stored = weights.write_weight(pointers[0], offsets, mask, x - stride * u, rng, ROUNDING, VECTOR)  # LAMB-x
    return x_squares, u_squares, kept, products


@triton.jit
def lamb_norms(
    rows_ptr, grads_ptr, options_ptr, apply_mask_ptr, sums_ptr, factors_ptr,
    DECAY_MODE: tl.constexpr, CAUTIOUS: tl.constexpr, PER_CHUNK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute each tensor's norms and trust ratio, and count its step; `sums` have a row per chunk or tensor."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    WIDTH: tl.constexpr = layout.CAUTIOUS_SUM if CAUTIOUS else layout.SUM
    x_squares = layer.tensor_total(sums_ptr + layout.X_SQUARES, row_ptr, index, WIDTH, PER_CHUNK)
    u_squares = layer.tensor_total(sums_ptr + layout.U_SQUARES, row_ptr, index, WIDTH, PER_CHUNK)
    if CAUTIOUS:
        kept = layer.tensor_total(sums_ptr + layout.KEPT, row_ptr, index, WIDTH, PER_CHUNK)
        growth = 1 / tl.maximum(kept / tl.maximum(tl.load(row_ptr + layout.NUMEL), 1), layout.LEAST_SHARE)
        m_factor = factors_ptr + index * layout.FACTOR + layout.M_FACTOR
        tl.store(m_factor, tl.load(m_factor) * growth)
        u_squares *= growth * growth
        if DECAY_MODE == "ratio":
            products, decay = (
                layer.tensor_total(sums_ptr + layout.PRODUCTS, row_ptr, index, WIDTH, PER_CHUNK),
                tl.load(option_ptr + common.DECAY),
            )
            u_squares += 2 * growth * decay * products + decay * decay * x_squares
            u_squares = tl.where(u_squares < 0, 0.0, u_squares)  # if u cancels to 0
    weight_norm, update_norm = tl.sqrt(x_squares), tl.sqrt(u_squares)
    q = trust_ratio(weight_norm, update_norm, option_ptr)

    stride = factors_ptr + index * layout.FACTOR + layout.STRIDE
    tl.store(stride, tl.load(stride) * q)
    norms = tl.load(row_ptr + common.NORMS).to(tl.pointer_type(tl.float32))
    tl.store(norms, weight_norm.to(tl.float32))
    tl.store(norms + 1, update_norm.to(tl.float32))
    tl.store(norms + 2, q.to(tl.float32))
    common.count_step(row_ptr)


@triton.jit
def trust_ratio(weight_norm, update_norm, option_ptr):
    """Return the `trust_ratio` of the reference; bounds that are not set are 0 and infinity, and a NaN remains NaN."""
    q = bounded(weight_norm, option_ptr + layout.WEIGHT_LOW, option_ptr + layout.WEIGHT_HIGH) / update_norm  # LAMB-q
    q = bounded(q, option_ptr + layout.RATIO_LOW, option_ptr + layout.RATIO_HIGH)
    return tl.where((weight_norm == 0) | (update_norm == 0) | (tl.load(option_ptr + layout.ADAPTS) == 0), 1.0, q)


@triton.jit
def lamb_apply(
    rows_ptr, grads_ptr, program_to_row_ptr, options_ptr, apply_mask_ptr, factors_ptr, grad_scale_ptr,
    X: tl.constexpr, G_AGAIN: tl.constexpr, S: tl.constexpr, V: tl.constexpr, COMPUTE: tl.constexpr,
    M_FORM: tl.constexpr, V_FORM: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr,
    DECAY_MODE: tl.constexpr, AMSGRAD: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Run the second pass: x, in reverse order, since the last chunks of the first pass may still be in cache.

    G_AGAIN is the dtype of gradients if updates are cautious, whose masks are computed from them again, else None.
    """
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(program_to_row_ptr + chunk).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    first, start, size = layer.chunk_of(row_ptr, chunk, M_FORM, CHUNK)

    m, v = (
        tl.load(row_ptr + common.EXP_AVG),
        tl.load(row_ptr + (layout.MAX_EXP_AVG_SQ if AMSGRAD else layout.EXP_AVG_SQ)),
    )
    whole = layer.aligned(weights.weight_addresses(row_ptr) | m | v, row_ptr, size, M_FORM, BLOCK)
    pointers = (
        weights.weight_at(row_ptr, start, X, ROUNDING),
        codec.moment_at(m, tl.load(row_ptr + layout.EXP_AVG_SCALE), start, S, M_FORM),
        codec.moment_at(v, tl.load(row_ptr + layout.EXP_AVG_SQ_SCALE), start, V, V_FORM),
    )
    factor = factors_ptr + index * layout.FACTOR
    t = tl.load(factor + layout.STEP_NUMBER)
    positions = (
        first,
        start,
        tl.load(row_ptr + common.INNER),
        weights.rng_key(row_ptr, t, ROUNDING == "stochastic", CUT),
    )
    VECTOR: tl.constexpr = common.UNMASKED if M_FORM == "" else 128 // X.primitive_bitwidth
    numbers = (
        common.number(factor + layout.M_FACTOR, COMPUTE),
        common.number(factor + layout.ROOT_EPS, COMPUTE),
        common.number(factor + layout.STRIDE, COMPUTE),
        common.number(option_ptr + common.DECAY, COMPUTE),
        shrinkage(option_ptr, COMPUTE),
    )
    if G_AGAIN is None:
        apply(pointers, numbers, positions, 0, whole, VECTOR, 1, M_FORM, V_FORM, ROUNDING, DECAY_MODE, BLOCK)
        apply(pointers, numbers, positions, whole, size, 1, 1, M_FORM, V_FORM, ROUNDING, DECAY_MODE, BLOCK)
    else:
        g, scale = tl.load(grads_ptr + index), common.gradient_scale(grad_scale_ptr, option_ptr, COMPUTE)
        again = common.at(g, start, G_AGAIN), scale
        masked = pointers[0], pointers[1], pointers[2], again
        if g % 16 == 0:
            apply(
                masked, numbers, positions, 0, whole,
                VECTOR, VECTOR, M_FORM, V_FORM, ROUNDING, DECAY_MODE, BLOCK,
            )  # fmt: skip
        else:
            apply(
                masked, numbers, positions, 0, whole,
                VECTOR, 1, M_FORM, V_FORM, ROUNDING, DECAY_MODE, BLOCK,
            )  # fmt: skip
        apply(masked, numbers, positions, whole, size, 1, 1, M_FORM, V_FORM, ROUNDING, DECAY_MODE, BLOCK)


@triton.jit
def apply(
    pointers, numbers, positions, first, stop,
    VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, M_FORM: tl.constexpr, V_FORM: tl.constexpr, ROUNDING: tl.constexpr,
    DECAY_MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step elements `first` to `stop` of a chunk."""
    AT_ONCE: tl.constexpr = BLOCK // layer.FEWER if VECTOR == 1 else BLOCK
    m_factor, root_eps, stride, decay, shrink = numbers
    for i in range(first, stop, AT_ONCE):
        where = codec.blocks_at(positions[0], i, stop, positions[2], VECTOR, M_FORM, AT_ONCE)
        x = weights.read_weight(pointers[0], where[0], where[1], ROUNDING, VECTOR)
        m = codec.read_moment(pointers[1], where, M_FORM, VECTOR)
        v = codec.read_moment(pointers[2], where, V_FORM, VECTOR)
        if len(pointers) == 4:
            again, scale = pointers[3]
            g = gradient(again, where, x, scale, decay, DECAY_MODE, G_VECTOR)
        if DECAY_MODE == "decoupled":
            x *= shrink
        u = ratio(m, v, m_factor, root_eps)
        if len(pointers) == 4:
            u *= agreeing(m, g)
        if DECAY_MODE == "ratio":
            u += decay * x  # LAMB-u
        rng = positions[3], positions[1], where[0]
        weights.write_weight(pointers[0], where[0], where[1], x - stride * u, rng, ROUNDING, VECTOR)  # LAMB-x


# ---- arithmetic of both passes -------------------------------------------------------------------------------------


@triton.jit
def gradient(pointer, where, x, scale, decay, DECAY_MODE: tl.constexpr, VECTOR: tl.constexpr):
    """Return a block of g as the moments take it."""
    value = common.gradient(pointer, where[0], where[1], scale, VECTOR)
    if DECAY_MODE == "l2":
        value += tl.where(decay == 0, 0.0, decay * x)  # a weight that is not finite leaves the moments as they are
    return value


@triton.jit
def ratio(m, v, m_factor, root_eps):
    """Return r of a block. Both bias corrections, and the share of a cautious update, are in the tensor's scalars."""
    return common.quotient(m * m_factor, common.root(v.to(root_eps.dtype)) + root_eps)


@triton.jit
def agreeing(m, g):
    """Return 1 for the elements whose r, with the sign of m, agrees with g, and 0 for the others."""
    return (((m > 0) & (g > 0)) | ((m < 0) & (g < 0))).to(tl.float32)


@triton.jit
def corrections(t, option_ptr):
    """Return layout.M_FACTOR, layout.ROOT_EPS and layout.STRIDE at step `t`, the last without a trust ratio."""
    correction1 = common.one_minus_power(tl.load(option_ptr + layout.CORRECTED1), t)
    root2 = tl.sqrt(common.one_minus_power(tl.load(option_ptr + layout.CORRECTED2), t))
    corrects_lr = tl.load(option_ptr + layout.CORRECTS_LR) != 0
    both, lr, eps = root2 / correction1, tl.load(option_ptr + common.LR), tl.load(option_ptr + layout.EPS)
    return (
        tl.where(corrects_lr, 1.0, both),
        tl.where(corrects_lr, eps, eps * root2),
        tl.where(corrects_lr, lr * both, lr),
    )


@triton.jit
def shrinkage(option_ptr, COMPUTE: tl.constexpr):
    """Return the factor of x in decoupled decay."""
    return (1 - tl.load(option_ptr + common.LR) * tl.load(option_ptr + common.DECAY)).to(COMPUTE)


@triton.jit
def bounded(value, low, high):
    """Return a scalar clamped to two numbers in memory; a NaN remains NaN."""
    value = tl.where(value < tl.load(low), tl.load(low), value)
    return tl.where(value > tl.load(high), tl.load(high), value)
