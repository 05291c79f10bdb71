"""Gradients in flight: their all-reduce has begun and not ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor


@dataclass
class InFlightBucket:
    """A bucket of gradients in flight. The gradients of its parameters are views of its buffer."""

    work: dist.Work | None
    params: list[Tensor]
    buffer: Tensor
    overflow: Tensor | None
    """1.0 if this rank's own values in the buffer are not finite, else 0.0; None without a scaler."""
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.buffer._version

    def wait(self) -> None:
        """Return when the buffer may be read. The host may continue earlier, but the device's stream waits."""
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} waited in vain for the gradients of the other ranks; most likely one of them "
                f"has stopped, and its own output says why ({error})"
            ) from error
        self.work = None

    def check_untouched(self) -> None:
        """Raise if gradients were changed in flight, since every rank would continue with different ones."""
        replaced = any(p.grad is not None and not within(p.grad, self.buffer) for p in self.params)
        if replaced or self.buffer._version != self.version:
            raise RuntimeError(
                "gradients were changed while they were in flight (by clip_grad_norm_ and the like between backward() "
                "and step(), or by a step that has failed after it unscaled some): call overlap.synchronize() before "
                "that; overlap.zero_grad() forgets these"
            )


def within(grad: Tensor, buffer: Tensor) -> bool:
    """Whether the memory of a gradient is inside a buffer."""
    return not grad.numel() or buffer.data_ptr() <= grad.data_ptr() < buffer.data_ptr() + buffer.nbytes
