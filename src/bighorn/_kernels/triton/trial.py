"""A LAMB step on a device with a known result, which is made before Triton is chosen there."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from bighorn._kernels.bucket import Bucket
from bighorn._kernels.options import LambOptions
from bighorn._kernels.triton.lamb import Lamb

ON: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "bias_correction": True,
    "grad_averaging": True,
    "decay_mode": "ratio",
    "adapt": True,
    "weight_norm_bounds": None,
    "trust_ratio_bounds": None,
    "second_moment": "adam",
    "weight_rounding": "nearest",
}
OPTIONS = LambOptions(**{**{field.name: False for field in fields(LambOptions)}, **ON})
"""Every other option is off or 0."""


def lamb_step(device: torch.device) -> float:
    """Return the value of a weight of 1 after a first step of size 0.1, which is 0.9."""
    x, g = (torch.ones(2000, device=device) for _ in "12")
    step = torch.zeros((), device=device)
    state = {name: [torch.zeros_like(x)] for name in ("exp_avg", "exp_avg_sq")}
    kernel = Lamb([Bucket(OPTIONS, [x], state, [step], [step], torch.zeros(1, 3, device=device), [g])])
    kernel.prepare()
    kernel.step()
    return float(x.mean())
