"""Tensors in pieces that fit a CPU's cache, and the workspace for a step's temporaries."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bighorn.kernels.arithmetic import write


def piece_bytes() -> int:
    """Return the bytes of a piece, of which a CPU's cache holds a few: with fewer, calls cost more than arithmetic."""
    return 1 << 20


ALIGNED = 8
"""The elements at whose multiples tensors begin in the workspace: a dot product's last bits depend on the address."""

Slot = tuple[int, int]
"""A slot of the workspace: its first and last bounds, in pieces."""


class Workspace:
    """Memory that is kept from step to step, since fresh memory costs a CPU a page fault for every 4 KB."""

    def __init__(self, size: int) -> None:
        self.unit = piece_bytes()
        self.memory = torch.empty(size * self.unit, dtype=torch.uint8, device="cpu")

    def views(self, slot: Slot, like: Sequence[Tensor], dtype: torch.dtype, offset: int = 0) -> list[Tensor]:
        """Return flat memory in a slot for each of `like`; fresh memory for what does not fit."""
        sizes = list(map(aligned_size, like))
        start = slot[0] * self.unit + offset
        end = start + sum(sizes) * dtype.itemsize
        if end > slot[1] * self.unit:
            return [torch.empty(tensor.numel(), dtype=dtype, device="cpu") for tensor in like]
        parts = zip(self.memory[start:end].view(dtype).split_with_sizes(sizes), like, sizes, strict=True)
        return [part if tensor.numel() == size else part[: tensor.numel()] for part, tensor, size in parts]

    def copies(self, slot: Slot, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return copies of the tensors in a slot, flat, in row-major order."""
        copies = self.views(slot, tensors, dtype)
        torch._foreach_copy_([copy.view(t.shape) for copy, t in zip(copies, tensors, strict=True)], list(tensors))
        return copies

    def load(self, slot: Slot, tensors: list[Tensor], dtype: torch.dtype, copy: bool) -> list[Tensor]:
        """Return tensors to compute in: the tensors themselves, or copies if their dtype or `copy` requires that."""
        if not tensors or (not copy and all(tensor.dtype == dtype for tensor in tensors)):
            return tensors
        return self.copies(slot, tensors, dtype)

    def square_sums(self, slot: Slot, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of each tensor, as `square_sums.square_sums`."""
        # The norm uses one thread, and takes longer than this on one, too.
        return torch.stack([torch.dot(copy, copy) for copy in self.copies(slot, tensors, torch.float64)])


def aligned_size(tensor: Tensor) -> int:
    """Return the elements that a tensor takes in the workspace."""
    return -(-tensor.numel() // ALIGNED) * ALIGNED


_kept = threading.local()


def workspace(size: int) -> Workspace:
    """Return the calling thread's workspace. It is created once, and all optimizers share it."""
    spaces: dict[int, Workspace] = _kept.__dict__.setdefault("spaces", {})
    if size not in spaces:
        spaces[size] = Workspace(size)
    return spaces[size]


def groups(tensors: Sequence[Tensor], limit: int) -> Iterator[slice]:
    """Yield slices of consecutive tensors of up to `limit` elements in all, with at least one tensor each."""
    first, total = 0, 0
    for i, tensor in enumerate(tensors):
        if i > first and total + tensor.numel() > limit:
            yield slice(first, i)
            first, total = i, 0
        total += tensor.numel()
    if tensors:
        yield slice(first, len(tensors))


def pieces(
    tensors: Sequence[Tensor], limit: int, cut: bool = True, deep: bool = True
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield pieces and their rows: small tensors together, up to `limit` elements, large ones divided (if `cut`).

    The division depends only on shapes: sequences of the same shapes are divided alike. If not `deep`, large tensors
    are divided along dim 0 alone.
    """
    for rows in groups(tensors, limit):
        together = list(tensors[rows])
        if len(together) == 1 and cut:
            yield from ((rows, [piece]) for piece in pieces_of(together[0], limit, deep))
        else:
            yield rows, together


def pieces_of(tensor: Tensor, limit: int, deep: bool = True) -> Iterator[Tensor]:
    """Yield a tensor in row-major order in pieces of consecutive elements, up to `limit` or, if not `deep`, one row."""
    if tensor.numel() <= limit:
        yield tensor
        return
    for part in torch.split(tensor, max(1, limit * tensor.shape[0] // tensor.numel())):
        if part.shape[0] == 1 and deep:
            yield from pieces_of(part[0], limit)
        else:
            yield part


def memory_order(x: Tensor) -> list[int]:
    """Return the dims of a dense tensor, outermost in memory first. The tensor is contiguous if permuted so.

    A dim of one element can have any stride: a contiguous tensor keeps its order, since blocks run along its rows.
    """
    if x.is_contiguous():
        return list(range(x.dim()))
    return sorted(range(x.dim()), key=lambda dim: -x.stride()[dim])


def store_pieces(tensors: Sequence[Tensor], work: Sequence[Tensor], apply_mask: Tensor | None) -> None:
    """Store the results that were computed in borrowed tensors of the same shapes, unless `work` is `tensors`."""
    if work is tensors:
        return
    if apply_mask is None:
        torch._foreach_copy_(list(tensors), list(work))
    else:
        for tensor, value in zip(tensors, work, strict=True):
            write(tensor, value, apply_mask)
