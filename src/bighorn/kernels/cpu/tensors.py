"""What the library is told about tensors, and which of them it cannot serve."""

from __future__ import annotations

import ctypes
from array import array

import torch
from torch import Tensor

from bighorn.kernels.bucket import CameOptions, LambOptions
from bighorn.kernels.cpu import library

BLOCK = 8192  # of csrc/run.h
LONGEST_FAN = 1 << 16  # a mean is taken again for each block that it covers, so rows beyond are left to foreach

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GRAD_TYPES = {**TYPES, torch.float64: 3}


def unsupported(param: Tensor, options: LambOptions | CameOptions) -> str | None:
    """Why no algorithm of the library can serve such a tensor, or None."""
    if library.LIBRARY is None:
        return library.LIBRARY_DETAIL
    if param.device.type != "cpu":
        return f"it lies on {param.device}"
    if param.dtype not in TYPES:
        return f"its dtype is {param.dtype}"
    if options.weight_rounding != "nearest":
        return f'weight_rounding="{options.weight_rounding}" is not in the C library'
    if options.centre and param.numel() > LONGEST_FAN * param.shape[0]:
        return f"gradient centralisation over more than {LONGEST_FAN} elements is not in the C library"
    return None


class Gradient(ctypes.Structure):
    """`Gradient` of csrc/gradient.h."""

    _fields_ = [
        ("layout", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("size", "fan")),
        ("type", ctypes.c_int32),
    ]


def gradient(x: Tensor, g: Tensor, centre: bool, layout: array[int] | None) -> Gradient:
    """How a gradient lies, which may have to be centred."""
    return Gradient(
        layout=layout.buffer_info()[0] if layout else None,
        size=x.numel(),
        fan=x.numel() // x.shape[0] if centre and x.numel() else 0,
        type=GRAD_TYPES[g.dtype],
    )


def grad_layout(x: Tensor, g: Tensor) -> array[int] | None:
    """Where a gradient's elements lie, in the order of the parameter's; None where they lie in that order."""
    order, strides = x.stride(), g.stride()
    dims = sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: -order[d])
    if all(order[d] == strides[d] for d in dims):
        return None
    return array("q", [len(dims), *(x.shape[d] for d in dims), *(strides[d] for d in dims)])
