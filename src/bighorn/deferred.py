"""A number that a device computes, and the host reads a step later."""

from __future__ import annotations

import torch
from torch import Tensor


class DeferredScalar:
    """Such a number, on its way to the host; when it is read it has long been computed."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.to("cpu", non_blocking=True)
        self.event: torch.Event | None = None
        if value.device.type != "cpu":
            self.event = torch.Event(value.device)
            self.event.record(torch.accelerator.current_stream(value.device))

    def read(self) -> int:
        """Its value. It waits for the last step's end, not for this one's: a query could tell ranks apart."""
        if self.event is not None:
            self.event.synchronize()
        return int(self.value)
