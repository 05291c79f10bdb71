"""Tests whether tensors have memory of their own that kernels can read and write."""

from __future__ import annotations

import warnings

from torch import Tensor
from torch.nn import Parameter

from bighorn._capabilities import capabilities


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are at its address.

    A wrapper subclass (torchao's float8 weights, torch's TwoTensor) holds other tensors, and a storage can be freed
    with `resize_(0)`: both have the address 0. A tensor of functorch has none. On a device without addresses, every
    tensor counts as having memory.
    """
    return bool(address_of(tensor)) or tensor.numel() == 0 or not capabilities(tensor.device).addresses


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's storage was freed, so that torch's own kernels would read address 0."""
    return type(tensor) in (Tensor, Parameter) and not has_memory(tensor) and address_of(tensor) == 0


def address_of(tensor: Tensor) -> int | None:
    """Return a tensor's address, 0 if it holds other tensors or was freed; None if torch cannot determine it."""
    try:
        if type(tensor) in (Tensor, Parameter):
            return tensor.data_ptr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FakeTensor warns that it has no address, and returns 0
            return tensor.data_ptr()
    except RuntimeError:  # for a tensor of functorch
        return None
