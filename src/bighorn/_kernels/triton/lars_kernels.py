"""LARS on the device, in Triton: norms, one program per tensor for its trust ratio, and the step.

The lines tagged `LARS-...` follow `reference/lars.py`, which has the details. Arithmetic is in float32. Sums of
squares, and numbers that exist once per tensor, are in float64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

from bighorn._kernels.triton import codec_kernels as codec
from bighorn._kernels.triton import columns
from bighorn._kernels.triton import common_kernels as common
from bighorn._kernels.triton import lars_layout as layout
from bighorn._kernels.triton import layer_kernels as layer


@triton.jit
def lars_norms(
    slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr,
    ROUNDING: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute each chunk's sums of squares of x and of the gradient."""
    layer.run_chunk(
        (slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr),
        (), squares, numbers, True,
        layer.Mode(X, G, S, S, M_FORM, "", ROUNDING, CUT, CHUNK, BLOCK),
    )  # fmt: skip


@triton.jit
def squares(x, g, _moments, numbers, _place, _VECTOR: tl.constexpr, _mode, sums):
    """Add the squares of x and of the gradient with its decay to the sums."""
    return layer.with_squares(sums, x, decayed(x, g, numbers[0]))


@triton.jit
def lars_ratio(
    slots_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, totals_ptr,
    PER_CHUNK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute each tensor's trust ratio and factors, and count its step."""
    tables = slots_ptr, grads_ptr, options_ptr, apply_mask_ptr, factors_ptr, totals_ptr
    layer.run_tensor(tables, ratio, PER_CHUNK)


@triton.jit
def ratio(weight_norm, norm, option_ptr, factor_ptr):
    """Return the norm of u, with its decay, and the trust ratio."""
    lr, decay = tl.load(option_ptr + columns.LR), tl.load(option_ptr + columns.DECAY)
    # With decay in the gradient whose norm is taken, that norm is the denominator; without decay, too.
    update_norm = tl.where(tl.load(option_ptr + layout.option.NORM_DECAY) == decay, norm, norm + decay * weight_norm)
    share = tl.load(option_ptr + layout.option.TRUST_COEFFICIENT)
    q = share * weight_norm / (update_norm + tl.load(option_ptr + layout.option.EPS))
    q = tl.where((weight_norm == 0) | (norm < common.LEAST_NORM), 1.0, q)  # LARS-q
    q = tl.where(tl.load(option_ptr + layout.option.CLIPS) != 0, tl.where(q >= lr, 1.0, q / lr), q)
    q = tl.where(tl.load(option_ptr + layout.option.ADAPTS) != 0, q, 1.0)

    inside = tl.load(option_ptr + layout.option.LR_IN_MOMENTUM) != 0
    after = tl.where(inside, 1.0, lr)
    nesterov = tl.load(option_ptr + layout.option.NESTEROV) != 0
    tl.store(factor_ptr + layout.BEFORE, tl.where(inside, lr * q, q))
    tl.store(factor_ptr + layout.AFTER_U, tl.where(nesterov, after, 0.0))
    after_m = tl.where(nesterov, after * tl.load(option_ptr + layout.option.MOMENTUM), after)
    tl.store(factor_ptr + layout.AFTER_M, after_m)
    return update_norm, q


@triton.jit
def lars_apply(
    slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr,
    ROUNDING: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Step momentum and x."""
    # A thread has as many codes of 4 bits as elements of the parameter in 128 bits.
    CODES: tl.constexpr = 4 if M_FORM == "int4" and tl.float32 == X else 8
    layer.run_chunk(
        (slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr),
        (columns.slot.EXP_AVG,), step, numbers, False,
        layer.Mode(X, G, S, S, M_FORM, "", ROUNDING, CUT, CHUNK, BLOCK), CODES=CODES,
    )  # fmt: skip


@triton.jit
def numbers(_slot_ptr, option_ptr, factor_ptr):
    """Return the numbers that the rules take; a tensor's own ones are stored before the second pass."""
    return (
        common.number(option_ptr + layout.option.NORM_DECAY),
        common.number(option_ptr + columns.DECAY),
        common.number(option_ptr + layout.option.MOMENTUM),
        common.number(factor_ptr + layout.BEFORE),
        common.number(factor_ptr + layout.AFTER_U),
        common.number(factor_ptr + layout.AFTER_M),
    )


@triton.jit
def step(x, g, moments, numbers, place, VECTOR: tl.constexpr, mode):
    """Step a block of momentum and of x."""
    _, decay, momentum, before, after_u, after_m = numbers
    u = before * decayed(x, g, decay)
    m = momentum * codec.read_moment(moments[0], place.where, mode.M_FORM, VECTOR) + u  # LARS-m
    m = codec.write_moment(moments[0], place.where, m, place.rng, mode.M_FORM, VECTOR)
    layer.write_weight(place, x - (after_u * u + after_m * m), VECTOR, mode)  # LARS-x


@triton.jit
def decayed(x, g, decay):
    """Return a block of g with its decay; a decay of 0 is not added, as in every backend."""
    return g + tl.where(decay == 0, 0.0, decay * x)  # LARS-u, without its factor


PASSES = (lars_norms,), (lars_ratio, lars_apply)
