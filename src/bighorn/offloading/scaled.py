"""A loss scaler for gradients that are in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


class Scaled:
    """A stand-in that a GradScaler steps: its only gradient is not finite if one on the host is not.

    Args:
        scaler: The scaler.
        step: A function that takes the step, with the scaler's `grad_scale` and `found_inf`.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor
    """The GradScaler sets `grad_scale` and `found_inf` during its step."""
    found_inf: Tensor

    def __init__(self, scaler: GradScaler, step: Callable[[Tensor, Tensor], None]) -> None:
        self.scaler = scaler
        self._step = step
        self.param_groups: list[dict[str, Any]] = []

    def step_all(self, square_sum: Tensor) -> None:
        """Step as `scaler.step(optimizer)` does; the sum of squares is finite if all gradients are."""
        shown = torch.zeros((), device=square_sum.device)
        shown.grad = torch.where(square_sum.isfinite(), 0.0, torch.inf).float()
        self.param_groups = [{"params": [shown], "param_names": ["an offloaded gradient"]}]
        self.scaler.step(cast(Optimizer, self))

    def step(self) -> None:
        """Take the step; the scaler calls this method."""
        self._step(self.grad_scale, self.found_inf)
