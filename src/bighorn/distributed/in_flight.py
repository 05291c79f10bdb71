"""Gradients in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor


@dataclass
class InFlightBucket:
    """A bucket in flight. Gradients of its parameters are views of its buffer."""

    work: dist.Work | None
    params: list[Tensor]
    buffer: Tensor
    overflow: Tensor | None
    """Whether this rank's own part of the buffer is not finite: 1.0 or 0.0; None where no scaler asks."""
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.buffer._version

    def wait(self) -> None:
        """Return when the buffer may be read: the host may go on earlier, the device's stream not."""
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
        """Refuse gradients that were changed in flight: every rank would go on with others."""
        replaced = any(p.grad is not None and not within(p.grad, self.buffer) for p in self.params)
        if replaced or self.buffer._version != self.version:
            raise RuntimeError(
                "gradients were changed while they were in flight (clip_grad_norm_ and the like between backward() "
                "and step()): call overlap.synchronize() before that; overlap.zero_grad() forgets these"
            )


def within(grad: Tensor, buffer: Tensor) -> bool:
    """Whether a gradient lies in a buffer."""
    return not grad.numel() or buffer.data_ptr() <= grad.data_ptr() < buffer.data_ptr() + buffer.nbytes
