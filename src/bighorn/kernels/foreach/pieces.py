"""Large tensors in pieces, and what the dtypes of tensors ask for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bighorn.kernels.arithmetic import compute_dtype, write

CHUNK = 1 << 18  # elements; 1 MB of float32, a core's second-level cache


def borrow(tensors: list[Tensor], dtype: torch.dtype, commit: Tensor | None) -> list[Tensor]:
    """The tensors themselves to compute in, or copies where their dtype or a pending decision forbids that."""
    return [tensor.to(dtype, copy=commit is not None) for tensor in tensors]


def give_back(tensors: list[Tensor], work: list[Tensor], commit: Tensor | None) -> list[Tensor]:
    """Store what was computed in borrowed tensors, and return it as it is (or would be) stored."""
    for tensor, value in zip(tensors, work, strict=True):
        if value is not tensor:
            write(tensor, value, commit)
    return tensors if commit is None else [w.to(t.dtype) for t, w in zip(tensors, work, strict=True)]


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor of any layout in pieces of about CHUNK elements, in no order that matters."""
    if tensor.numel() <= CHUNK or tensor.dim() == 0:
        yield tensor
        return
    for part in torch.split(tensor, max(1, CHUNK * tensor.shape[0] // tensor.numel())):
        if part.shape[0] == 1:
            yield from chunks(part[0])
        else:
            yield part


def in_order_of(x: Tensor, g: Tensor) -> Tensor:
    """A gradient in the memory order of its parameter: a copy only where it lies otherwise."""
    if g.stride() == x.stride():
        return g
    return torch.empty_strided(x.shape, x.stride(), dtype=g.dtype, device=x.device).copy_(g)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie in memory."""
    return tensor if tensor.dim() == 1 else tensor.as_strided((tensor.numel(),), (1,))


def per_row(values: Tensor, like: Tensor) -> list[Tensor]:
    """One 0-dim tensor per row, in the dtype of the arithmetic."""
    return list(values.to(compute_dtype(like)).unbind())
