"""LARS on the device, in Triton: norms, one program per tensor for its trust ratio, and the step.

The lines tagged `LARS-...` follow `reference/lars.py`, which has the details. Arithmetic is in COMPUTE: float64 for
parameters in float64, else float32. Sums of squares, and numbers that exist once per tensor, are in float64.
"""

import triton
import triton.language as tl

from bighorn.kernels.triton import codec_kernels as codec
from bighorn.kernels.triton import common_kernels as common
from bighorn.kernels.triton import lars_layout as layout
from bighorn.kernels.triton import layer_kernels as layer
from bighorn.kernels.triton import weight_kernels as weights


@triton.jit
def lars_norms(
    rows_ptr, grads_ptr, program_to_row_ptr, options_ptr, grad_scale_ptr, apply_mask_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, COMPUTE: tl.constexpr, M_FORM: tl.constexpr, ROUNDING: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute each chunk's sums of squares of x and of the gradient."""
    chunk = tl.program_id(0)
    index = tl.load(program_to_row_ptr + chunk).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    first, start, size = layer.chunk_of(row_ptr, chunk, M_FORM, CHUNK)
    g = tl.load(grads_ptr + index)
    whole = layer.aligned(weights.weight_addresses(row_ptr), row_ptr, size, M_FORM, BLOCK)
    pointers = weights.weight_at(row_ptr, start, X, ROUNDING), common.at(g, start, G)
    numbers = (
        common.gradient_scale(grad_scale_ptr, option_ptr, COMPUTE),
        common.number(option_ptr + layout.NORM_DECAY, COMPUTE),
    )
    positions = first, tl.load(row_ptr + common.INNER)
    VECTOR: tl.constexpr = common.UNMASKED if M_FORM == "" else 8
    if g % 16 == 0:
        x1, u1 = squares(pointers, numbers, positions, 0, whole, VECTOR, VECTOR, M_FORM, ROUNDING, BLOCK)
    else:  # gradients of FSDP2 and DDP are often not aligned: only they are loaded one element at a time
        x1, u1 = squares(pointers, numbers, positions, 0, whole, VECTOR, 1, M_FORM, ROUNDING, BLOCK)
    x2, u2 = squares(pointers, numbers, positions, whole, size, 1, 1, M_FORM, ROUNDING, BLOCK)
    tl.store(sums_ptr + chunk * layout.SUM + layout.X_SQUARES, tl.sum(x1 + x2, 0))
    tl.store(sums_ptr + chunk * layout.SUM + layout.U_SQUARES, tl.sum(u1 + u2, 0))


@triton.jit
def squares(
    pointers, numbers, positions, first, stop,
    VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, M_FORM: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sums of squares over elements `first` to `stop` of a chunk, one of each per lane."""
    AT_ONCE: tl.constexpr = BLOCK // layer.FEWER if VECTOR == 1 else BLOCK
    x_squares = tl.zeros((common.LANES,), tl.float64)
    u_squares = tl.zeros((common.LANES,), tl.float64)
    for i in range(first, stop, AT_ONCE):
        where = codec.blocks_at(positions[0], i, stop, positions[1], VECTOR, M_FORM, AT_ONCE)
        x = weights.read_weight(pointers[0], where[0], where[1], ROUNDING, VECTOR)
        u = decayed(pointers[1], where, x, numbers[0], numbers[1], G_VECTOR)
        x_squares += common.folded(x.to(tl.float64) * x.to(tl.float64))
        u_squares += common.folded(u.to(tl.float64) * u.to(tl.float64))
    return x_squares, u_squares


@triton.jit
def lars_ratio(
    rows_ptr, grads_ptr, options_ptr, apply_mask_ptr, sums_ptr, factors_ptr,
    PER_CHUNK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Compute each tensor's trust ratio and factors, and count its step; `sums` have a row per chunk or tensor."""
    index = tl.program_id(0).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    weight_norm = tl.sqrt(layer.tensor_total(sums_ptr + layout.X_SQUARES, row_ptr, index, layout.SUM, PER_CHUNK))
    norm = tl.sqrt(layer.tensor_total(sums_ptr + layout.U_SQUARES, row_ptr, index, layout.SUM, PER_CHUNK))
    lr, decay = tl.load(option_ptr + common.LR), tl.load(option_ptr + common.DECAY)
    # With decay in the gradient whose norm is taken, that norm is the denominator; without decay, too.
    update_norm = tl.where(tl.load(option_ptr + layout.NORM_DECAY) == decay, norm, norm + decay * weight_norm)
    q = tl.load(option_ptr + layout.TRUST_COEFFICIENT) * weight_norm / (update_norm + tl.load(option_ptr + layout.EPS))
    q = tl.where((weight_norm == 0) | (norm == 0), 1.0, q)  # LARS-q
    q = tl.where(tl.load(option_ptr + layout.CLIPS) != 0, tl.where(q >= lr, 1.0, q / lr), q)
    q = tl.where(tl.load(option_ptr + layout.ADAPTS) != 0, q, 1.0)

    inside = tl.load(option_ptr + layout.LR_IN_MOMENTUM) != 0
    after = tl.where(inside, 1.0, lr)
    nesterov = tl.load(option_ptr + layout.NESTEROV) != 0
    factor = factors_ptr + index * layout.FACTOR
    tl.store(factor + layout.BEFORE, tl.where(inside, lr * q, q))
    tl.store(factor + layout.AFTER_U, tl.where(nesterov, after, 0.0))
    tl.store(factor + layout.AFTER_M, tl.where(nesterov, after * tl.load(option_ptr + layout.MOMENTUM), after))
    tl.store(factor + layout.STEP_NUMBER, common.count(row_ptr))
    metrics = tl.load(row_ptr + common.NORMS).to(tl.pointer_type(tl.float32))
    tl.store(metrics, weight_norm.to(tl.float32))
    tl.store(metrics + 1, update_norm.to(tl.float32))
    tl.store(metrics + 2, q.to(tl.float32))
    common.count_step(row_ptr)


@triton.jit
def lars_apply(
    rows_ptr, grads_ptr, program_to_row_ptr, options_ptr, grad_scale_ptr, apply_mask_ptr, factors_ptr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, COMPUTE: tl.constexpr, M_FORM: tl.constexpr,
    ROUNDING: tl.constexpr, CUT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Step momentum and x, in reverse order, since the last chunks of the first pass may still be in cache."""
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tl.load(program_to_row_ptr + chunk).to(tl.int64)
    if not common.takes_part(grads_ptr, apply_mask_ptr, index):
        return
    row_ptr, option_ptr = common.entries(rows_ptr, options_ptr, index)
    factor = factors_ptr + index * layout.FACTOR
    first, start, size = layer.chunk_of(row_ptr, chunk, M_FORM, CHUNK)
    g, m = tl.load(grads_ptr + index), tl.load(row_ptr + common.EXP_AVG)
    whole = layer.aligned(weights.weight_addresses(row_ptr) | m, row_ptr, size, M_FORM, BLOCK)
    pointers = (
        weights.weight_at(row_ptr, start, X, ROUNDING),
        common.at(g, start, G),
        codec.moment_at(m, tl.load(row_ptr + layout.EXP_AVG_SCALE), start, S, M_FORM),
    )
    numbers = (
        common.gradient_scale(grad_scale_ptr, option_ptr, COMPUTE),
        common.number(option_ptr + common.DECAY, COMPUTE),
        common.number(option_ptr + layout.MOMENTUM, COMPUTE),
        common.number(factor + layout.BEFORE, COMPUTE),
        common.number(factor + layout.AFTER_U, COMPUTE),
        common.number(factor + layout.AFTER_M, COMPUTE),
    )
    t = tl.load(factor + layout.STEP_NUMBER)
    rng_key = weights.rng_key(row_ptr, t, ROUNDING == "stochastic", CUT)
    positions = first, start, tl.load(row_ptr + common.INNER), rng_key
    # With 8 codes a thread, a block is in one warp, whose threads find its scale without a barrier.
    VECTOR: tl.constexpr = common.UNMASKED if M_FORM == "" else 8
    if g % 16 == 0:
        apply(pointers, numbers, positions, 0, whole, VECTOR, VECTOR, M_FORM, ROUNDING, BLOCK)
    else:
        apply(pointers, numbers, positions, 0, whole, VECTOR, 1, M_FORM, ROUNDING, BLOCK)
    apply(pointers, numbers, positions, whole, size, 1, 1, M_FORM, ROUNDING, BLOCK)


@triton.jit
def apply(
    pointers, numbers, positions, first, stop,
    VECTOR: tl.constexpr, G_VECTOR: tl.constexpr, M_FORM: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step elements `first` to `stop` of a chunk."""
    AT_ONCE: tl.constexpr = BLOCK // layer.FEWER if VECTOR == 1 else BLOCK
    scale, decay, momentum, before, after_u, after_m = numbers
    for i in range(first, stop, AT_ONCE):
        where = codec.blocks_at(positions[0], i, stop, positions[2], VECTOR, M_FORM, AT_ONCE)
        x = weights.read_weight(pointers[0], where[0], where[1], ROUNDING, VECTOR)
        u = before * decayed(pointers[1], where, x, scale, decay, G_VECTOR)
        m = momentum * codec.read_moment(pointers[2], where, M_FORM, VECTOR) + u  # LARS-m
        m = codec.write_moment(pointers[2], where, m, 0, M_FORM, VECTOR)
        rng = positions[3], positions[1], where[0]
        x -= after_u * u + after_m * m  # LARS-x
        weights.write_weight(pointers[0], where[0], where[1], x, rng, ROUNDING, VECTOR)


@triton.jit
def decayed(pointer, where, x, scale, decay, VECTOR: tl.constexpr):
    """Return a block of g with its decay; a decay of 0 is not added, as in every backend."""
    g = common.gradient(pointer, where[0], where[1], scale, VECTOR)
    return g + tl.where(decay == 0, 0.0, decay * x)  # LARS-u, without its factor
