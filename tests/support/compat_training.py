"""Parameters, gradients and learning rates for the tests of compatibility layers.

They include a norm above 10, a zero parameter, a zero gradient and one of 1e-3. Weight decay is not 0, since without it
the trust ratio would hide a constant factor of the update.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

LRS = (0.1, 0.05, 0.2, 0.08, 0.15, 0.02)
STEPS = len(LRS)

SHAPES = {
    "conv.weight": (4, 3, 3, 3),
    "conv.bias": (17,),
    "norm.gamma": (9,),
    "norm.beta": (9,),
    "fc.weight": (6, 5),
    "big.weight": (12, 11),
    "zero.weight": (3, 4),
    "quiet.weight": (4, 5),
    "tiny.weight": (5, 3),
}
FACTORS = {"big.weight": 4.0, "zero.weight": 0.0}
GRAD_FACTORS = {"quiet.weight": 0.0, "tiny.weight": 1e-3}


def noise(name: str, seed: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}".encode()))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Parameter]:
    return {name: Parameter(noise(name, "x", dtype) * FACTORS.get(name, 1.0)) for name in SHAPES}


def gradient(name: str, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return noise(name, f"g{step}", dtype) * GRAD_FACTORS.get(name, 1.0)


def step(params: Mapping[str, Parameter], optimizer: Optimizer, number: int) -> None:
    """Take a step with gradients that are multiplied by the optimizer's loss_scale."""
    for name, param in params.items():
        param.grad = gradient(name, number, param.dtype) * getattr(optimizer, "loss_scale", 1)
    optimizer.step()


def trained(make: Callable[[dict[str, Parameter]], Optimizer], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return the parameters after the steps of the optimizer that `make` builds."""
    params = weights(dtype)
    optimizer = make(params)
    for number in range(STEPS):
        step(params, optimizer, number)
    return {name: param.detach() for name, param in params.items()}
