"""The capabilities of a device, tried on it once; its name decides nothing."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a device.

    Attributes:
        float64: Whether float64 stays float64 there, and its norm is right. Ascend converts it to float32 with a
            warning; Arc and Apple's GPUs refuse it.
        float64_norms: Whether a float64 norm of narrower numbers adds up squares in float64. torch_xla
            squares first (2.9), in float32 or bfloat16, which overflows above 1e19 or is off by 2^-9.
        bfloat16: Whether bfloat16 is stored and converted.
        addresses: Whether tensors have an address. On torch_xla and "meta" the address is 0.
    """

    float64: bool
    float64_norms: bool
    bfloat16: bool
    addresses: bool


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """Return the capabilities of a device.

    The CPU and CUDA have all of it and are not tried: the host would wait, which ends the capture of a graph.

    Example:
        >>> capabilities(torch.device("cpu"))
        Capabilities(float64=True, float64_norms=True, bfloat16=True, addresses=True)
    """
    if device.type in ("cpu", "cuda"):
        return Capabilities(float64=True, float64_norms=True, bfloat16=True, addresses=True)
    if device.type == "meta":
        return Capabilities(float64=True, float64_norms=True, bfloat16=True, addresses=False)
    numbers = torch.tensor([3.0, 4.0], device=device)
    float64 = _keeps(numbers, torch.float64, 2.0**500)  # beyond float32, which torch_xla on Neuron calls float64
    return Capabilities(
        float64=float64,
        float64_norms=float64 and float(vector_norm(numbers * 2.0**100, dtype=torch.float64)) == 5 * 2.0**100,
        bfloat16=_keeps(numbers, torch.bfloat16, 1.0),
        addresses=_has_address(numbers),
    )


def _keeps(numbers: Tensor, dtype: torch.dtype, scale: float) -> bool:
    """Whether a device keeps a dtype, with the right norm of (3, 4) times `scale`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ascend warns
            converted = numbers.to(dtype) * scale
            return converted.dtype == dtype and vector_norm(converted).item() == 5 * scale
    except (TypeError, ValueError, RuntimeError):
        return False


def _has_address(tensor: Tensor) -> bool:
    """Whether a tensor has an address; one without storage, as of a device with textures, raises."""
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


@functools.cache
def wide(device: torch.device) -> torch.dtype:
    """Return the dtype for norms, powers of beta and scales: float64, or float32 on a device that does not have it."""
    return torch.float64 if capabilities(device).float64 else torch.float32
