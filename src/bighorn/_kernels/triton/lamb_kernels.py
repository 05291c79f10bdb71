"""LAMB on the device, in Triton: two passes over the model, with one program per tensor before and between them.

Programs read all inputs from tables of addresses and numbers (`lamb.py` builds them), so that a launch serves any
number of tensors, and nothing is compiled again when a number changes. The lines tagged `LAMB-...` follow
`reference/lamb.py`, which has the details. Arithmetic is in float32. Sums of squares,
and numbers that exist once per tensor, are in float64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bighorn._kernels.triton import codec_kernels as codec
from bighorn._kernels.triton import columns, layer_layout
from bighorn._kernels.triton import common_kernels as common
from bighorn._kernels.triton import lamb_layout as layout
from bighorn._kernels.triton import layer_kernels as layer


class Constants(NamedTuple):
    """LAMB's constants."""

    DECAY_MODE: Any
    """As the option; or "ball", on which there is no decay."""


@triton.jit
def lamb_factors(slots_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, _SOURCES: tl.constexpr):
    """Compute the bias corrections, with one program per tensor: their float64 would cost each program too much."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    slot_ptr, option_ptr = common.entries(slots_ptr, options_ptr, index)
    factor_ptr, t = factors_ptr + index * layer_layout.FACTOR, common.count(slot_ptr)
    correction1 = common.one_minus_power(tl.load(option_ptr + layout.option.CORRECTED1), t)
    root2 = tl.sqrt(common.one_minus_power(tl.load(option_ptr + layout.option.CORRECTED2), t))
    corrects_lr = tl.load(option_ptr + layout.option.CORRECTS_LR) != 0
    both, lr, eps = root2 / correction1, tl.load(option_ptr + columns.LR), tl.load(option_ptr + layout.option.EPS)
    tl.store(factor_ptr + layout.M_FACTOR, tl.where(corrects_lr, 1.0, both))
    tl.store(factor_ptr + layout.ROOT_EPS, tl.where(corrects_lr, eps, eps * root2))
    tl.store(factor_ptr + layout.STRIDE, tl.where(corrects_lr, lr * both, lr))
    tl.store(factor_ptr + layout.BACK, 1 - lr * tl.load(option_ptr + columns.DECAY))


@triton.jit
def lamb_moments(
    slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    M_FORM: tl.constexpr, V_FORM: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr,
    DECAY_MODE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Run the first pass: moments, the sums of each chunk, and x itself without a trust ratio."""
    layer.run_chunk(
        (slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr),
        (columns.slot.EXP_AVG, columns.slot.EXP_AVG_SQ), moments, moment_numbers, True,
        layer.Mode(X, G, S, V, M_FORM, V_FORM, ROUNDING, CUT, CHUNK, BLOCK, Constants(DECAY_MODE),
                   3 if DECAY_MODE == "ball" else 2),
    )  # fmt: skip


@triton.jit
def moment_numbers(slot_ptr, option_ptr, factor_ptr):
    """Return the numbers that `moments` takes."""
    return (
        update_numbers(slot_ptr, option_ptr, factor_ptr),
        common.number(option_ptr + layout.option.BETA1),
        common.number(option_ptr + layout.option.BETA2),
        common.number(option_ptr + layout.option.BETA3),
        common.number(option_ptr + layout.option.BETA4),
        tl.load(option_ptr + layout.option.ADAPTS) == 0,
    )


@triton.jit
def moments(x, g, stored, numbers, place, VECTOR: tl.constexpr, mode, sums):
    """Step a block of the moments, and of x without a trust ratio; add to the sums."""
    of_update, beta1, beta2, beta3, beta4, writes_x = numbers
    m_factor, root_eps, stride, decay, back = of_update
    if mode.CONSTANTS.DECAY_MODE == "l2":
        g += tl.where(decay == 0, 0.0, decay * x)  # a weight that is not finite leaves the moments as they are
    m, v = read_moments(stored, place, VECTOR, mode)
    m = beta1 * m + beta3 * g  # LAMB-m
    v = beta2 * v + beta4 * g * g  # LAMB-v
    v = codec.write_moment(stored[1], place.where, v, place.rng, mode.V_FORM, VECTOR)
    if mode.M_FORM == "int4":
        root = tl.sqrt_rn(v)
        is_zero = root == 0
        m = tl.div_rn(tl.where(is_zero, 0.0, m), tl.where(is_zero, 1.0, root))
        m = codec.write_moment(stored[0], place.where, m, place.rng, mode.M_FORM, VECTOR) * root
    else:
        m = codec.write_moment(stored[0], place.where, m, place.rng, mode.M_FORM, VECTOR)
    if mode.CONSTANTS.DECAY_MODE == "decoupled":
        x *= back
    u = ratio(m, v, m_factor, root_eps, mode)
    if mode.CONSTANTS.DECAY_MODE == "ratio":
        u += decay * x  # LAMB-u
    if VECTOR != common.UNMASKED:
        u = tl.where(place.where.mask, u, 0.0)  # without eps, u is 0 / 0 for elements outside the mask
    if writes_x:
        _stored = layer.write_weight(place, x - stride * u, VECTOR, mode)  # LAMB-x
    return layer.with_products(sums, x, u) if mode.CONSTANTS.DECAY_MODE == "ball" else layer.with_squares(sums, x, u)


@triton.jit
def lamb_norms(
    slots_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, totals_ptr,
    DECAY_MODE: tl.constexpr, PER_CHUNK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute each tensor's norms and trust ratio, and count its step."""
    tables = slots_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, totals_ptr
    if DECAY_MODE == "ball":
        layer.run_tensor(tables, ball_step, PER_CHUNK, True)
    else:
        layer.run_tensor(tables, ratio_of, PER_CHUNK)


@triton.jit
def ratio_of(weight_norm, update_norm, option_ptr, factor_ptr):
    """Return the norm of u, and the trust ratio, which joins the stride, as `trust_ratio` of the reference.

    Bounds that are not set are 0 and infinity, and a NaN remains NaN.
    """
    weight_low, weight_high = option_ptr + layout.option.WEIGHT_LOW, option_ptr + layout.option.WEIGHT_HIGH
    q = bounded(weight_norm, weight_low, weight_high) / update_norm  # LAMB-q
    q = bounded(q, option_ptr + layout.option.RATIO_LOW, option_ptr + layout.option.RATIO_HIGH)
    one = (weight_norm == 0) | (update_norm < common.LEAST_NORM) | (tl.load(option_ptr + layout.option.ADAPTS) == 0)
    q = tl.where(one, 1.0, q)
    tl.store(factor_ptr + layout.STRIDE, tl.load(factor_ptr + layout.STRIDE) * q)
    return update_norm, q


@triton.jit
def ball_step(weight_norm, update_norm, inner, slot_ptr, _option_ptr, factor_ptr):
    """Return the norm of u, and q, which joins the stride, as `ball_step` of the reference; store the factor of x."""
    radius_ptr = tl.load(slot_ptr + layer_layout.slot.RADIUS).to(tl.pointer_type(tl.float32))
    radius = tl.load(radius_ptr)
    radius = tl.where(radius == 0, weight_norm.to(tl.float32), radius)
    tl.store(radius_ptr, radius)
    radius, stride = radius.to(tl.float64), tl.load(factor_ptr + layout.STRIDE)
    square = weight_norm * weight_norm - 2 * stride * radius / update_norm * inner + stride * stride * radius * radius
    norm = tl.sqrt(tl.where(square < 0, 0.0, square))
    stays = (update_norm < common.LEAST_NORM) | (norm == 0)
    back = tl.where(stays, 1.0, radius / norm)
    q = tl.where(stays, 0.0, back * radius / update_norm)  # LAMB-ball
    tl.store(factor_ptr + layout.BACK, back)
    tl.store(factor_ptr + layout.STRIDE, stride * q)
    return update_norm, q


@triton.jit
def lamb_apply(
    slots_ptr, grads_ptr, waiting_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    M_FORM: tl.constexpr, V_FORM: tl.constexpr, ROUNDING: tl.constexpr, CUT: tl.constexpr,
    DECAY_MODE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Run the second pass: x."""
    # A thread moves 128 bits of the parameter at a time. Triton 3.3 has no bits of a dtype argument.
    CODES: tl.constexpr = 0 if M_FORM == "" else 4 if tl.float32 == X else 8
    layer.run_chunk(
        (slots_ptr, grads_ptr, waiting_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr),
        (columns.slot.EXP_AVG, columns.slot.EXP_AVG_SQ), step, update_numbers, False,
        layer.Mode(X, X, S, V, M_FORM, V_FORM, ROUNDING, CUT, CHUNK, BLOCK, Constants(DECAY_MODE)),
        READS_G=False, CODES=CODES,
    )  # fmt: skip


@triton.jit
def step(x, _g, stored, numbers, place, VECTOR: tl.constexpr, mode):
    """Step a block of x."""
    m_factor, root_eps, stride, decay, back = numbers
    m, v = read_moments(stored, place, VECTOR, mode)
    if mode.CONSTANTS.DECAY_MODE == "decoupled" or mode.CONSTANTS.DECAY_MODE == "ball":
        x *= back
    u = ratio(m, v, m_factor, root_eps, mode)
    if mode.CONSTANTS.DECAY_MODE == "ratio":
        u += decay * x  # LAMB-u
    layer.write_weight(place, x - stride * u, VECTOR, mode)  # LAMB-x


# ---- arithmetic of both passes -------------------------------------------------------------------------------------


@triton.jit
def update_numbers(_slot_ptr, option_ptr, factor_ptr):
    """Return the tensor's factors of u, its decay, and the factor of x in decoupled decay and on the ball."""
    return (
        common.number(factor_ptr + layout.M_FACTOR),
        common.number(factor_ptr + layout.ROOT_EPS),
        common.number(factor_ptr + layout.STRIDE),
        common.number(option_ptr + columns.DECAY),
        common.number(factor_ptr + layout.BACK),
    )


@triton.jit
def read_moments(stored, place, VECTOR: tl.constexpr, mode):
    """Return blocks of m and v as they are stored: codes of 4 bits are relative to the root of v."""
    m = codec.read_moment(stored[0], place.where, mode.M_FORM, VECTOR)
    v = codec.read_moment(stored[1], place.where, mode.V_FORM, VECTOR)
    return (m * tl.sqrt_rn(v) if mode.M_FORM == "int4" else m), v


@triton.jit
def ratio(m, v, m_factor, root_eps, mode):
    """Return r of a block. Both bias corrections are in the tensor's scalars."""
    m, divisor = m * m_factor, tl.sqrt_rn(v) + root_eps
    if mode.M_FORM == "int4":
        # A GPU divides 0 in a subroutine, for which all threads of a warp wait, and of codes of 4 bits many are 0.
        is_zero = m == 0
        return tl.div_rn(tl.where(is_zero, 2.0**-64, m), divisor) * tl.where(is_zero, m, 1.0)
    else:
        return tl.div_rn(m, divisor)


@triton.jit
def bounded(value, low, high):
    """Return a scalar clamped to two numbers in memory; a NaN remains NaN."""
    value = tl.where(value < tl.load(low), tl.load(low), value)
    return tl.where(value > tl.load(high), tl.load(high), value)


PASSES = (lamb_factors, lamb_moments), (lamb_norms, lamb_apply)
