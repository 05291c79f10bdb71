"""State dtypes, and the way of state tensors into an optimizer: checked, placed, never cast behind one's back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels import codec

MOMENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What LAMB's moments can be kept in, under the names that checkpoints use."""

MOMENTUM_DTYPES = {**MOMENT_DTYPES, "float16": torch.float16, "int8": torch.int8}
"""What CAME's momentum can be kept in. Its second moment is averages of many elements, which cost next to nothing."""

STEP_BYTES = 4
"""A parameter's count of steps is a float32, as in torch."""

MIN_8BIT_SIZE = 4096
"""Smaller tensors keep float32: what int8 would save is nothing, what it would round may be a norm's gain."""

Spec = Mapping[str, Tensor]
"""A parameter's state tensors by name, each as a tensor on the meta device: shape, memory order and dtype."""


def moments_dtype(param: Tensor, state_dtype: str | None) -> torch.dtype:
    """The dtype of a parameter's moments: at least float32, float64 for float64, unless one is asked for."""
    if state_dtype is not None:
        return MOMENT_DTYPES[state_dtype]
    return torch.float64 if param.dtype in (torch.float64, torch.complex128) else torch.float32


def momentum_spec(param: Tensor, state_dtype: str | None, stacked: int) -> Spec:
    """A parameter's momentum, with the scales of its blocks where it is kept in int8."""
    if state_dtype is None:
        return {"exp_avg": prototype(param, moments_dtype(param, None))}
    if state_dtype != "int8":
        return {"exp_avg": prototype(param, MOMENTUM_DTYPES[state_dtype])}
    if param.dim() - stacked < 2 or param.numel() < MIN_8BIT_SIZE:
        return {"exp_avg": prototype(param, torch.float32)}
    codes = torch.empty(param.shape, dtype=torch.int8, device="meta")
    scales = codec.scales_shape(param.shape[stacked:])
    return {
        "exp_avg": codes,
        "exp_avg_scale": torch.empty((*param.shape[:stacked], *scales), dtype=torch.float32, device="meta"),
    }


def recoded(state: Mapping[str, Any], spec: Spec) -> dict[str, Any]:
    """A state whose momentum is in 8 bits where `spec` says so, and nowhere else, whatever it was saved in."""
    out = dict(state)
    values, scales = out.get("exp_avg"), out.get("exp_avg_scale")
    if not isinstance(values, Tensor) or "exp_avg" not in spec:
        return out
    if "exp_avg_scale" in spec and values.is_floating_point() and values.shape == spec["exp_avg"].shape:
        outer = spec["exp_avg_scale"].dim() - 2
        codes, scales = codec.encode(values.flatten(0, outer))
        out["exp_avg"], out["exp_avg_scale"] = codes.view(values.shape), scales.view(spec["exp_avg_scale"].shape)
    elif "exp_avg_scale" not in spec and isinstance(scales, Tensor) and _are_codes(values, scales):
        decoded = codec.decode(values.flatten(0, scales.dim() - 2), scales.flatten(0, -2))
        out["exp_avg"] = decoded.view(values.shape)
        del out["exp_avg_scale"]
    return out


def _are_codes(values: Tensor, scales: Tensor) -> bool:
    """Whether these are 8-bit values and the scales of their blocks."""
    outer = scales.dim() - 2
    if values.dtype != torch.int8 or outer < 0:
        return False
    return scales.shape == (*values.shape[:outer], *codec.scales_shape(values.shape[outer:]))


def real_view(tensor: Tensor) -> Tensor:
    """Complex tensors as real ones with a last dimension of 2, others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory, as those of an expanded tensor do, so that writing one writes others."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape lie in memory in the same order. Strides of single elements say nothing."""
    if a.stride() == b.stride() or a.numel() == 0:
        return True
    return all(i == j for i, j, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)


def in_layout_of(like: Tensor, value: Tensor, device: torch.device) -> Tensor:
    """`value` on a device, in the memory order and dtype of `like`: itself where it is so already."""
    if value.dtype == like.dtype and value.device == device and same_layout(value, like):
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).copy_(value)


def prototype(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A state tensor of the shape and memory order of `like`, on the meta device."""
    return torch.empty_like(like, dtype=dtype, device="meta", requires_grad=False)


def complete(param: Tensor, spec: Spec, state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A parameter's whole state: what is there, checked and placed; zeros where there is nothing yet.

    Args:
        param: The parameter as kernels see it (real, dense).
        spec: The tensors that the optimizer keeps for it, besides `step`.
        state: What there is.
        what: The parameter's name for messages.

    Raises:
        ValueError: A tensor of another shape, a `step` that is no count, or a part of a state.
    """
    fresh = not any(name in state for name in (*spec, "step"))
    out = recoded(state, spec)
    if not fresh and "max_exp_avg_sq" in spec and "exp_avg_sq" in state:
        out.setdefault("max_exp_avg_sq", state["exp_avg_sq"].clone())  # amsgrad from now on
    if fresh or "step" in out:
        out["step"] = _count(out.get("step", 0), param, what)
    for name, like in spec.items():
        if fresh:
            out[name] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=param.device).zero_()
        elif name in out:
            out[name] = _placed(name, out[name], like, param.device, what)
    missing = [name for name in ("step", *spec) if name not in out]
    if missing:
        raise ValueError(
            f"the state of {what} lacks {missing[0]!r} and has {', '.join(map(repr, state))}: it is half a state, or "
            "was made with other options, and going on would take steps of a wrong size. Load the matching "
            "checkpoint, or drop optimizer.state of this parameter"
        )
    return out


def _placed(name: str, value: object, like: Tensor, device: torch.device, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"state {name!r} of {what} is a {type(value).__name__}, expected a tensor")
    value = real_view(value)
    if value.shape != like.shape:
        raise ValueError(
            f"state {name!r} of {what} has shape {tuple(value.shape)}, but the parameter needs "
            f"{tuple(like.shape)}: it is another model's, or was made with other options. Load the matching "
            "checkpoint, or drop optimizer.state of this parameter"
        )
    if value.dtype != like.dtype and not (value.is_floating_point() and like.is_floating_point()):
        raise ValueError(
            f"state {name!r} of {what} has dtype {value.dtype}, expected {like.dtype} (values in 8 bits need their "
            "scales): load the matching checkpoint, or drop optimizer.state of this parameter"
        )
    return in_layout_of(like, value, device)


def _count(step: object, param: Tensor, what: str) -> Tensor:
    value = torch.tensor(step, device="cpu") if isinstance(step, (int, float)) else step
    valid = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if not isinstance(value, Tensor) or not valid or (value.device.type == "cpu" and not 0 <= float(value) < math.inf):
        # Elsewhere than on the CPU the host would have to wait for the value.
        raise ValueError(f"state 'step' of {what} is {step!r}, expected how many steps it took, 0 or more")
    return value.reshape(()).to(device=param.device, dtype=torch.float32)


class Held:
    """Carries a tensor through `Optimizer.load_state_dict`, which casts tensors to the parameter's dtype.

    Torch calls its cast on `Optimizer` by name, so that overriding it does nothing (torch 2.13); a type that it
    does not know it leaves alone.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def hold(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose state tensors are held."""

    def held(state: object) -> object:
        if not isinstance(state, dict):
            return state
        return {name: Held(value) if isinstance(value, Tensor) else value for name, value in state.items()}

    return {**state_dict, "state": {key: held(state) for key, state in state_dict["state"].items()}}


def release(state: object) -> object:
    """One parameter's state with its tensors let go, each a copy of its own, as torch makes them."""
    if not isinstance(state, dict):
        return state
    return {name: value.tensor.clone() if isinstance(value, Held) else value for name, value in state.items()}
