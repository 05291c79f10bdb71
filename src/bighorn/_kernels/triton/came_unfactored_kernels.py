"""CAME on the device for tensors whose second moment is not factored: rules for chunks, as LAMB has."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bighorn._kernels.triton import came_layout as layout
from bighorn._kernels.triton import came_scaling_kernels as scaling
from bighorn._kernels.triton import codec_kernels as codec
from bighorn._kernels.triton import columns
from bighorn._kernels.triton import common_kernels as common
from bighorn._kernels.triton import layer_kernels as layer

V = tl.constexpr(tl.float32)
"""The dtype of the second moment."""


class Constants(NamedTuple):
    """CAME's constants."""

    SCALES_LR: Any
    """Whether the size of x scales the learning rate."""


@triton.jit
def came_second_moment(
    slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, SCALES_LR: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the second moment; compute the sums of u^2 of each chunk, and of x^2 if it scales the learning rate."""
    layer.run_chunk(
        (slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr),
        (columns.slot.EXP_AVG, columns.slot.EXP_AVG_SQ), second_moment, second_numbers, True,
        layer.Mode(X, G, V, V, "", "", ROUNDING, False, CHUNK, BLOCK, Constants(SCALES_LR), layout.SUM),
    )  # fmt: skip


@triton.jit
def second_numbers(slot_ptr, option_ptr, _factor_ptr):
    """Return beta2, 1 - beta2 and eps1."""
    rest = scaling.second_rest(slot_ptr, option_ptr)
    return (1 - rest).to(tl.float32), rest.to(tl.float32), common.number(option_ptr + layout.option.EPS1)


@triton.jit
def second_moment(x, g, stored, numbers, place, VECTOR: tl.constexpr, mode, sums):
    """Advance a block of the second moment; add to the sums."""
    beta2, rest, eps = numbers
    v = beta2 * codec.read_moment(stored[1], place.where, mode.V_FORM, VECTOR) + rest * (g * g + eps)  # CAME-v
    u = scaling.unfactored(g, codec.write_moment(stored[1], place.where, v, place.rng, mode.V_FORM, VECTOR))
    weight, update = layer.with_squares((sums[layout.X_SQUARES], sums[layout.U_SQUARES]), x, u)
    return update, weight if mode.CONSTANTS.SCALES_LR else sums[layout.X_SQUARES], sums[layout.CONFIDENCES]


@triton.jit
def came_move(
    slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr,
    X: tl.constexpr, G: tl.constexpr, S: tl.constexpr, M_FORM: tl.constexpr,
    ROUNDING: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, _SOURCES: tl.constexpr,
):  # fmt: skip
    """Advance the average, and step the parameter."""
    layer.run_chunk(
        (slots_ptr, grads_ptr, program_to_slot_ptr, options_ptr, scale_ptr, apply_mask_ptr, factors_ptr, sums_ptr),
        (columns.slot.EXP_AVG, columns.slot.EXP_AVG_SQ), move, move_numbers, False,
        layer.Mode(X, G, S, V, M_FORM, "", ROUNDING, CUT, CHUNK, BLOCK),
    )  # fmt: skip


@triton.jit
def move_numbers(_slot_ptr, option_ptr, factor_ptr):
    """Return beta1, 1 - beta1, the clip factor of u, the learning rate, and its product with the decay."""
    lr = tl.load(factor_ptr + layout.RATE)
    return (
        common.number(option_ptr + layout.option.BETA1),
        common.number(option_ptr + layout.option.BETA1_REST),
        common.number(factor_ptr + layout.CLIP),
        lr.to(tl.float32),
        (lr * tl.load(option_ptr + columns.DECAY)).to(tl.float32),
    )


@triton.jit
def move(x, g, stored, numbers, place, VECTOR: tl.constexpr, mode):
    """Step a block of the average and of x."""
    beta1, beta1_rest, clip, lr, decay = numbers
    u = scaling.unfactored(g, codec.read_moment(stored[1], place.where, mode.V_FORM, VECTOR)) * clip
    m = beta1 * codec.read_moment(stored[0], place.where, mode.M_FORM, VECTOR) + beta1_rest * u  # CAME-m
    m = codec.write_moment(stored[0], place.where, m, place.rng, mode.M_FORM, VECTOR)
    x -= decay * x
    layer.write_weight(place, x - lr * m, VECTOR, mode)  # CAME-x
