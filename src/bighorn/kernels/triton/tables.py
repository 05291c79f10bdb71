"""Tables of numbers on the device, made from lists of the host."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import torch
from torch import Tensor

from bighorn.kernels.triton.device import capturing, current_stream

ABSENT = -1
"""The address of a gradient that is missing, `ABSENT` of common_kernels.py: that of an empty tensor is 0."""

TYPE_CODES = {torch.int64: "q", torch.int32: "i", torch.float64: "d"}
"""What the standard library's arrays call these dtypes."""

Numbers: TypeAlias = "list[int] | list[float] | array[int]"

_captured: list[Tensor] = []


class Uploads:
    """Makes tables on one device.

    Attributes:
        device: The device.
        stream: The stream that launches of this step go to; None without streams, and in a graph.
        streams: All streams that steps have been launched on: the memory of a freed table waits for each of them.
        recording: Whether launches are recorded into a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: list[torch.Stream] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Ask once for all tables of a step where launches go."""
        self.stream, self.recording = current_stream(self.device), capturing(self.device)
        if self.recording:
            self.stream = None

    def table(self, values: Numbers, dtype: torch.dtype) -> Tensor:
        """A flat table. The host does not wait: torch keeps the pinned memory until the copy from it is done."""
        if self.recording:
            # The host's memory would have to live as long as the graph; numbers in the arguments of kernels do.
            recorded = torch.zeros(len(values), dtype=dtype, device=self.device)
            torch._foreach_add_(list(recorded.unbind()), list(values))
            return recorded
        if not values:
            return torch.empty(0, dtype=dtype, device=self.device)
        packed = values if isinstance(values, array) else array(TYPE_CODES[dtype], values)
        staged = torch.frombuffer(packed, dtype=dtype)  # in half the time of a tensor from a list
        if self.device.type != "cpu":
            staged = staged.pin_memory()  # fresh memory, or memory that no copy is reading any more: torch sees to it
        return staged.to(self.device, non_blocking=True)


class CachedTable:
    """A table that is made anew when its numbers change."""

    def __init__(self, dtype: torch.dtype, uploads: Uploads) -> None:
        self.dtype, self.uploads = dtype, uploads
        self.values: Numbers | None = None
        self.table = torch.empty(0, dtype=dtype, device=uploads.device)

    def of(self, values: Numbers) -> Tensor:
        """The table with these numbers."""
        if self.uploads.recording:  # a graph has tables of its own, since it may run at any time, and often
            return self.uploads.table(values, self.dtype)
        if values != self.values:
            self.table, self.values = self.uploads.table(values, self.dtype), values
            streams = self.uploads.streams
            for stream in streams if len(streams) > 1 else ():  # one alone is that which made it
                self.table.record_stream(stream)
        return self.table

    def of_addresses(self, grads: list[Tensor | None]) -> Tensor:
        """The table of the addresses of gradients."""
        present = [g for g in grads if g is not None]
        found = array("Q", map(Tensor.data_ptr, present))
        if len(present) < len(grads):
            each = iter(found)
            found = array("q", [ABSENT if g is None else next(each) for g in grads])
        return self.of(found)


def keep_alive(tables: tuple[Tensor, ...]) -> None:
    """Let tables live as long as the process: a graph holds their addresses, and may be replayed at any time."""
    _captured.extend(tables)


def in_order_of(x: Tensor, g: Tensor) -> Tensor:
    """A gradient in the memory order of its parameter: a copy only where its order is another one."""
    if all(a == b for a, b, size in zip(g.stride(), x.stride(), x.shape, strict=True) if size > 1):
        return g
    return torch.empty_strided(x.shape, x.stride(), dtype=g.dtype, device=x.device).copy_(g)
