"""LAMB on the device, in Triton: two passes over the model, with one program per tensor before and between them.

Programs read all inputs from tables of addresses and numbers (`lamb.py` builds them), so that a launch serves any
number of tensors, and nothing is compiled again when a number changes. The lines tagged `LAMB-...` follow
`reference/lamb.py`, which has the details. Arithmetic is in COMPUTE: float64 for parameters in float64, else
float32. Sums of squares, and numbers that exist once per tensor, are in float64.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bighorn.kernels.triton import codec_kernels as codec
from bighorn.kernels.triton import common_kernels as common
from bighorn.kernels.triton import lamb_layout as layout
from bighorn.kernels.triton import layer_kernels as layer
from bighorn.kernels.triton import weight_kernels as weights


class Own(NamedTuple):
    """LAMB's constants."""

    DECAY_MODE: Any
    AMSGRAD: Any
    CAUTIOUS: Any


@triton.jit
def lamb_factors(rows_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, _SOURCES: tl.constexpr):
    """Compute the bias corrections, with one program per tensor: their float64 would cost each program too much."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    factor_ptr = factors_ptr + index * layer.FACTOR
    m_factor, root_eps, stride = corrections(common.count(row_ptr), option_ptr)
    tl.store(factor_ptr + layout.M_FACTOR, m_factor)
    tl.store(factor_ptr + layout.ROOT_EPS, root_eps)
    tl.store(factor_ptr + layout.STRIDE, stride)


@triton.jit
def lamb_moments(
    rows_ptr, grads_ptr, program_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, V: tl.constexpr, COMPUTE: tl.constexpr,
    M_FORM: tl.constexpr, V_FORM: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr,
    DECAY_MODE: tl.constexpr, AMSGRAD: tl.constexpr, CAUTIOUS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Run the first pass: moments, the sums of each chunk, and x itself without a trust ratio."""
    layer.run_chunk(
        (rows_ptr, grads_ptr, program_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr),
        (common.EXP_AVG, layer.EXP_AVG_SQ, layer.MAX_EXP_AVG_SQ), moments, moment_numbers, SUMS,
        layer.Mode(
            X, G, S, V, COMPUTE, M_FORM, V_FORM, ROUNDING, CUT, CHUNK, BLOCK,
            Own(DECAY_MODE, AMSGRAD, CAUTIOUS),
        ),
    )  # fmt: skip


@triton.jit
def moment_numbers(option_ptr, factor_ptr, COMPUTE: tl.constexpr):
    """Return the numbers that `moments` takes."""
    return (
        update_numbers(option_ptr, factor_ptr, COMPUTE),
        common.number(option_ptr + layout.option.BETA1, COMPUTE),
        common.number(option_ptr + layout.option.BETA2, COMPUTE),
        common.number(option_ptr + layout.option.BETA3, COMPUTE),
        common.number(option_ptr + layout.option.BETA4, COMPUTE),
        tl.load(option_ptr + layout.option.ADAPTS) == 0,
    )


@triton.jit
def moments(x, g, stored, numbers, place, VECTOR: tl.constexpr, mode, sums):
    """Step a block of the moments, and of x without a trust ratio; add to the sums."""
    of_update, beta1, beta2, beta3, beta4, writes_x = numbers
    m_factor, root_eps, stride, decay, shrink = of_update
    g = with_decay(g, x, decay, mode.OWN.DECAY_MODE)
    m = beta1 * codec.read_moment(stored[0], place.where, mode.M_FORM, VECTOR) + beta3 * g  # LAMB-m
    v = beta2 * codec.read_moment(stored[1], place.where, mode.V_FORM, VECTOR) + beta4 * (g * g)  # LAMB-v
    m = codec.write_moment(stored[0], place.where, m, 0, mode.M_FORM, VECTOR)
    key, start, offsets = place.rng
    shifts = weights.dither(key, start + offsets) if mode.V_FORM == "unsigned" else 0
    v = codec.write_moment(stored[1], place.where, v, shifts, mode.V_FORM, VECTOR)
    if mode.OWN.AMSGRAD:
        v_max = tl.maximum(codec.read_moment(stored[2], place.where, "", VECTOR), v, propagate_nan=tl.PropagateNan.ALL)
        v = codec.write_moment(stored[2], place.where, v_max, 0, "", VECTOR)
    if mode.OWN.DECAY_MODE == "decoupled":
        x *= shrink
    u = ratio(m, v, m_factor, root_eps)
    if mode.OWN.CAUTIOUS:
        agree = agreeing(m, g)
        kept = sums[2] + common.folded(agree)
        u *= agree
    elif mode.OWN.DECAY_MODE == "ratio":
        u += decay * x  # LAMB-u
    if VECTOR != common.UNMASKED:
        u = tl.where(place.where[1], u, 0.0)  # without eps, u is 0 / 0 for elements outside the mask
    x_squares, u_squares = layer.with_product(sums[0], x, x), layer.with_product(sums[1], u, u)
    if not mode.OWN.CAUTIOUS:
        if writes_x:
            _stored = layer.write_weight(place, x - stride * u, VECTOR, mode)  # LAMB-x
        return x_squares, u_squares
    elif mode.OWN.DECAY_MODE == "ratio":
        return x_squares, u_squares, kept, layer.with_product(sums[3], x, u)
    else:
        return x_squares, u_squares, kept


@triton.jit
def lamb_norms(
    rows_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, totals_ptr,
    SUMS: tl.constexpr, PER_CHUNK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute each tensor's norms and trust ratio, and count its step."""
    tables = rows_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, totals_ptr
    layer.run_tensor(tables, norms, SUMS, PER_CHUNK)


@triton.jit
def norms(totals, row_ptr, option_ptr, factor_ptr):
    """Return the norms of x and u, and the trust ratio, which joins the stride."""
    x_squares, u_squares = totals[0], totals[1]
    if len(totals) > 2:  # of a cautious update, they are those of r, masked but not scaled up
        share = totals[2] / tl.maximum(tl.load(row_ptr + layer.NUMEL), 1)
        growth = 1 / tl.maximum(share, layout.LEAST_SHARE)
        tl.store(factor_ptr + layout.M_FACTOR, tl.load(factor_ptr + layout.M_FACTOR) * growth)
        u_squares *= growth * growth
    if len(totals) > 3:  # the last are products of this r and x
        decay = tl.load(option_ptr + common.DECAY)
        u_squares += 2 * growth * decay * totals[3] + decay * decay * x_squares
        u_squares = tl.where(u_squares < 0, 0.0, u_squares)  # if u cancels to 0
    weight_norm, update_norm = tl.sqrt(x_squares), tl.sqrt(u_squares)
    q = trust_ratio(weight_norm, update_norm, option_ptr)
    tl.store(factor_ptr + layout.STRIDE, tl.load(factor_ptr + layout.STRIDE) * q)
    return weight_norm, update_norm, q


@triton.jit
def trust_ratio(weight_norm, update_norm, option_ptr):
    """Return the `trust_ratio` of the reference; bounds that are not set are 0 and infinity, and a NaN remains NaN."""
    weight_low, weight_high = option_ptr + layout.option.WEIGHT_LOW, option_ptr + layout.option.WEIGHT_HIGH
    q = bounded(weight_norm, weight_low, weight_high) / update_norm  # LAMB-q
    q = bounded(q, option_ptr + layout.option.RATIO_LOW, option_ptr + layout.option.RATIO_HIGH)
    one = (weight_norm == 0) | (update_norm == 0) | (tl.load(option_ptr + layout.option.ADAPTS) == 0)
    return tl.where(one, 1.0, q)


@triton.jit
def lamb_apply(
    rows_ptr, grads_ptr, waiting_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, G_AGAIN: tl.constexpr, S: tl.constexpr, V: tl.constexpr, COMPUTE: tl.constexpr,
    M_FORM: tl.constexpr, V_FORM: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr,
    DECAY_MODE: tl.constexpr, AMSGRAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Run the second pass: x.

    G_AGAIN is the dtype of gradients if updates are cautious, whose masks are computed from them again, else None.
    """
    CAUTIOUS: tl.constexpr = G_AGAIN is not None
    V_COLUMN: tl.constexpr = layer.MAX_EXP_AVG_SQ if AMSGRAD else layer.EXP_AVG_SQ
    CODES: tl.constexpr = 128 // X.primitive_bitwidth if M_FORM != "" else 0
    layer.run_chunk(
        (rows_ptr, grads_ptr, waiting_to_row_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr),
        (common.EXP_AVG, V_COLUMN), step, update_numbers, 0,
        layer.Mode(
            X, G_AGAIN if CAUTIOUS else X, S, V, COMPUTE, M_FORM, V_FORM, ROUNDING, CUT, CHUNK, BLOCK,
            Own(DECAY_MODE, AMSGRAD, CAUTIOUS),
        ),
        READS_G=CAUTIOUS, CODES=CODES,
    )  # fmt: skip


@triton.jit
def step(x, g, stored, numbers, place, VECTOR: tl.constexpr, mode):
    """Step a block of x."""
    m_factor, root_eps, stride, decay, shrink = numbers
    m = codec.read_moment(stored[0], place.where, mode.M_FORM, VECTOR)
    v = codec.read_moment(stored[1], place.where, mode.V_FORM, VECTOR)
    g = with_decay(g, x, decay, mode.OWN.DECAY_MODE)
    if mode.OWN.DECAY_MODE == "decoupled":
        x *= shrink
    u = ratio(m, v, m_factor, root_eps)
    if mode.OWN.CAUTIOUS:
        u *= agreeing(m, g)
    if mode.OWN.DECAY_MODE == "ratio":
        u += decay * x  # LAMB-u
    layer.write_weight(place, x - stride * u, VECTOR, mode)  # LAMB-x


# ---- arithmetic of both passes -------------------------------------------------------------------------------------


@triton.jit
def update_numbers(option_ptr, factor_ptr, COMPUTE: tl.constexpr):
    """Return the tensor's factors, its decay, and the factor of x in decoupled decay."""
    return (
        common.number(factor_ptr + layout.M_FACTOR, COMPUTE),
        common.number(factor_ptr + layout.ROOT_EPS, COMPUTE),
        common.number(factor_ptr + layout.STRIDE, COMPUTE),
        common.number(option_ptr + common.DECAY, COMPUTE),
        (1 - tl.load(option_ptr + common.LR) * tl.load(option_ptr + common.DECAY)).to(COMPUTE),
    )


@triton.jit
def with_decay(g, x, decay, DECAY_MODE: tl.constexpr):
    """Return a block of g as the moments take it."""
    if DECAY_MODE == "l2":
        g += tl.where(decay == 0, 0.0, decay * x)  # a weight that is not finite leaves the moments as they are
    return g


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
    """Return M_FACTOR, ROOT_EPS and STRIDE at step `t`, the last without a trust ratio."""
    correction1 = common.one_minus_power(tl.load(option_ptr + layout.option.CORRECTED1), t)
    root2 = tl.sqrt(common.one_minus_power(tl.load(option_ptr + layout.option.CORRECTED2), t))
    corrects_lr = tl.load(option_ptr + layout.option.CORRECTS_LR) != 0
    both, lr, eps = root2 / correction1, tl.load(option_ptr + common.LR), tl.load(option_ptr + layout.option.EPS)
    return (
        tl.where(corrects_lr, 1.0, both),
        tl.where(corrects_lr, eps, eps * root2),
        tl.where(corrects_lr, lr * both, lr),
    )


@triton.jit
def bounded(value, low, high):
    """Return a scalar clamped to two numbers in memory; a NaN remains NaN."""
    value = tl.where(value < tl.load(low), tl.load(low), value)
    return tl.where(value > tl.load(high), tl.load(high), value)
