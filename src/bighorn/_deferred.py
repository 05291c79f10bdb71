"""A number that a device computes and the host reads one step later."""

from __future__ import annotations

import torch
from torch import Tensor


class DeferredScalar:
    """A number on a device whose copy to the host has begun; when the host reads it, it was computed long ago."""

    def __init__(self, value: Tensor) -> None:
        accelerator = torch.accelerator.current_accelerator()
        has_events = accelerator is not None and accelerator.type == value.device.type  # the CPU and XLA have none
        self.value = value.to("cpu", non_blocking=has_events)
        self.event = torch.Event(value.device) if has_events else None
        if self.event is not None:
            self.event.record(torch.accelerator.current_stream(value.device))

    def read(self) -> int:
        """Return the value. This waits for the end of the last step; an event query could differ between ranks."""
        if self.event is not None:
            self.event.synchronize()
        return int(self.value)
