"""State dtypes, and the way of state tensors into an optimizer: checked, placed, never cast behind one's back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What moments can be kept in, under the names that checkpoints use."""

Spec = Mapping[str, torch.dtype]
"""State tensors that have their parameter's shape: name to dtype."""


def moments_dtype(param: Tensor, state_dtype: str | None) -> torch.dtype:
    """The dtype of a parameter's moments: at least float32, float64 for float64, unless one is asked for."""
    if state_dtype is not None:
        return DTYPES[state_dtype]
    return torch.float64 if param.dtype in (torch.float64, torch.complex128) else torch.float32


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


def in_layout_of(like: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` on the device and in the memory order of `like`, in a dtype: itself where it is so already."""
    if value.dtype == dtype and value.device == like.device and same_layout(value, like):
        return value
    out = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
    return out.copy_(value)


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
    out = dict(state)
    if not fresh and "max_exp_avg_sq" in spec and "exp_avg_sq" in state:
        out.setdefault("max_exp_avg_sq", state["exp_avg_sq"].clone())  # amsgrad from now on
    missing = [name for name in ("step", *spec) if name not in out]
    if missing and not fresh:
        raise ValueError(
            f"the state of {what} lacks {missing[0]!r} and has {', '.join(map(repr, state))}: going on would take "
            "steps of a wrong size. Load a whole checkpoint, or drop optimizer.state of this parameter"
        )
    out["step"] = _count(out.get("step", 0), param, what)
    for name, dtype in spec.items():
        out[name] = torch.zeros_like(param, dtype=dtype) if fresh else _placed(name, out[name], param, dtype, what)
    return out


def _placed(name: str, value: object, param: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"state {name!r} of {what} is a {type(value).__name__}, expected a tensor")
    value = real_view(value)
    if value.shape != param.shape:
        raise ValueError(
            f"state {name!r} of {what} has shape {tuple(value.shape)}, but the parameter has {tuple(param.shape)}: "
            "it belongs to another model. Load the matching checkpoint, or drop optimizer.state of this parameter"
        )
    return in_layout_of(param, value, dtype)


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
