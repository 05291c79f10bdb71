"""Copies between a device and the host: the only module of offload that depends on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Tensors on the host, and those on the device that they are copied from or to."""


class Arrival(Protocol):
    """The end of some copies that have begun."""

    def synchronize(self) -> None:
        """Return when the copies have ended."""

    def wait(self) -> None:
        """Make later work of this thread on the device wait for the copies."""


class Copies(Protocol):
    """Host memory that a device can access, and copies in both directions.

    Copies in one direction need not take place in the order in which they began, except copies to the same memory.
    """

    def pinned(self, nbytes: int) -> Tensor:
        """Return memory of the host, as a tensor of bytes."""

    def to_host(self, pairs: Pairs) -> Arrival:
        """Begin to copy (host, device) pairs to the host, after the work on this thread's current stream."""

    def to_device(self, pairs: Pairs) -> Arrival:
        """Begin to copy (host, device) pairs to the device."""


class AcceleratorCopies:
    """Copies of a GPU or another accelerator of torch, with one stream in each direction.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward, self._inward = torch.Stream(device), torch.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory, which the device can copy without the CPU."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def to_host(self, pairs: Pairs) -> Arrival:
        """Begin to copy (host, device) pairs to the host, after the work on this thread's current stream."""
        self._outward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._outward:
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
        return self._outward.record_event()

    def to_device(self, pairs: Pairs) -> Arrival:
        """Begin to copy (host, device) pairs to the device. The host has waited for all readers of the old values."""
        with self._inward:
            for host, device in pairs:
                device.copy_(host, non_blocking=True)
        return self._inward.record_event()
