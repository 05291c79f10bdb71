"""Tables of numbers on the device, made from lists of the host."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from bighorn.kernels.triton.device import capturing

CODES = {torch.int64: "q", torch.int32: "i", torch.float64: "d"}
"""What the standard library's arrays call these dtypes."""

_captured: list[Tensor] = []


def table(values: list[int] | list[float] | array[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat table. The host does not wait: the copy is made from pinned memory, which torch keeps until it is done."""
    if capturing(device):
        # The host's memory would have to live as long as the graph; so would numbers lie in the arguments of kernels.
        recorded = torch.zeros(len(values), dtype=dtype, device=device)
        torch._foreach_add_(list(recorded.unbind()), list(values))
        return recorded
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    packed = values if isinstance(values, array) else array(CODES[dtype], values)
    staged = torch.frombuffer(packed, dtype=dtype)  # in half the time of a tensor from a list
    if device.type != "cpu":
        staged = staged.pin_memory()  # fresh memory, or some that no copy is on its way from: torch sees to it
    return staged.to(device, non_blocking=True)


def in_order_of(x: Tensor, g: Tensor) -> Tensor:
    """A gradient in the memory order of its parameter: a copy only where it lies otherwise."""
    if all(a == b for a, b, size in zip(g.stride(), x.stride(), x.shape, strict=True) if size > 1):
        return g
    return torch.empty_strided(x.shape, x.stride(), dtype=g.dtype, device=x.device).copy_(g)


def keep(*tables: Tensor) -> None:
    """Let tables live as long as the process where a graph is told their addresses: it may be replayed at any time."""
    if capturing(tables[0].device):
        _captured.extend(tables)


class Mirror:
    """A table that is made anew when the numbers change."""

    def __init__(self, dtype: torch.dtype, device: torch.device, streams: list[torch.Stream]) -> None:
        self.dtype, self.device, self.streams = dtype, device, streams
        self.values: list[int] | list[float] | array[int] | None = None
        self.table = torch.empty(0, dtype=dtype, device=device)

    def of(self, values: list[int] | list[float] | array[int]) -> Tensor:
        """The table with these numbers."""
        if capturing(self.device):  # a graph has tables of its own: when it runs, and how often, nobody knows here
            return table(values, self.dtype, self.device)
        if values != self.values:
            self.table, self.values = table(values, self.dtype, self.device), values
            for stream in self.streams if len(self.streams) > 1 else ():  # one alone is that which made it
                self.table.record_stream(stream)
        return self.table
