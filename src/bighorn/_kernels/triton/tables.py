"""Tables of numbers on the device, made from lists on the host."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import torch
from torch import Tensor

from bighorn._kernels.triton.device import capturing, current_stream

ABSENT = -1
"""The address of a gradient that is missing, `ABSENT` of common_kernels.py; the address of an empty tensor is 0."""

TYPE_CODES = {torch.int64: "q", torch.int32: "i", torch.float64: "d"}
"""The names of these dtypes in the standard library's arrays."""

Numbers: TypeAlias = "list[int] | list[float] | array[int]"

_captured: list[Tensor] = []


class Uploads:
    """The tables on one device.

    Attributes:
        device: The device.
        stream: The stream of this step's launches; None without streams, and in a graph.
        streams: All streams that steps have been launched on: the memory of a freed table waits for each of them.
        recording: Whether launches are recorded into a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: list[torch.Stream] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Look up the stream of this step's launches, once for all tables."""
        self.stream, self.recording = current_stream(self.device), capturing(self.device)
        if self.recording:
            self.stream = None

    def table(self, values: Numbers, dtype: torch.dtype) -> Tensor:
        """Return a flat table. The host does not wait: torch keeps the pinned memory until the copy from it is done."""
        if self.recording:
            # Pinned memory would have to exist as long as the graph, as the arguments of recorded kernels do.
            recorded = torch.zeros(len(values), dtype=dtype, device=self.device)
            torch._foreach_add_(list(recorded.unbind()), list(values))
            return recorded
        if not values:
            return torch.empty(0, dtype=dtype, device=self.device)
        packed = values if isinstance(values, array) else array(TYPE_CODES[dtype], values)
        staged = torch.frombuffer(packed, dtype=dtype)  # takes half the time of a tensor from a list
        if self.device.type != "cpu":
            staged = staged.pin_memory()  # torch reuses pinned memory only after the copies from it are done
        return staged.to(self.device, non_blocking=True)


class CachedTable:
    """A table that is rebuilt when its numbers change."""

    def __init__(self, dtype: torch.dtype, uploads: Uploads) -> None:
        self.dtype, self.uploads = dtype, uploads
        self.values: Numbers | None = None
        self.table = torch.empty(0, dtype=dtype, device=uploads.device)

    def of(self, values: Numbers) -> Tensor:
        """Return the table with these numbers."""
        if self.uploads.recording:  # a graph has separate tables, since it can be replayed at any time, and repeatedly
            return self.uploads.table(values, self.dtype)
        if values != self.values:
            self.table, self.values = self.uploads.table(values, self.dtype), values
            streams = self.uploads.streams
            for stream in streams if len(streams) > 1 else ():  # a single stream built it
                self.table.record_stream(stream)
        return self.table


def keep_alive(tables: tuple[Tensor, ...]) -> None:
    """Keep tables until the process ends: a graph has their addresses, and can be replayed at any time."""
    _captured.extend(tables)
