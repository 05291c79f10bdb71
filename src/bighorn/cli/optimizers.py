"""The optimizers that a run can name, each with the defaults that suit it: adding one is one entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bighorn import Lamb
from bighorn.cli.errors import InputError

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """How to build an optimizer, and its defaults.

    Attributes:
        lr: Default learning rate.
        weight_decay: Default weight decay of matrices.
        grid: The learning rates that ``bighorn compare`` tries.
        build: From parameter groups, learning rate and Lamb's backend (None for the others) to the optimizer.
    """

    lr: float
    weight_decay: float
    grid: tuple[float, ...]
    build: Callable[[Groups, float, str | None], torch.optim.Optimizer]


def _lamb(groups: Groups, lr: float, backend: str | None) -> torch.optim.Optimizer:
    return Lamb(groups, lr=lr, backend=backend or "auto")


def _adamw(groups: Groups, lr: float, _: str | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def _adam(groups: Groups, lr: float, _: str | None) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=lr, fused=True)


def _sgd(groups: Groups, lr: float, _: str | None) -> torch.optim.Optimizer:
    # Not fused: on the CPU that leaves bf16 parameters as they are (https://github.com/pytorch/pytorch/issues/191763).
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=True)


OPTIMIZERS = {
    "lamb": Recipe(0.03, 0.01, (0.005, 0.01, 0.02, 0.05, 0.1, 0.2), _lamb),
    "adamw": Recipe(0.003, 0.01, (0.001, 0.002, 0.005, 0.01, 0.02, 0.05), _adamw),
    "adam": Recipe(0.003, 0.0, (0.001, 0.002, 0.005, 0.01, 0.02, 0.05), _adam),
    "sgd": Recipe(0.1, 0.0005, (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), _sgd),
}


def build_optimizer(
    name: str, model: nn.Module, lr: float, weight_decay: float, backend: str | None
) -> torch.optim.Optimizer:
    """Build the optimizer ``name`` over named parameters.

    Vectors (biases and norms) take neither weight decay nor, in Lamb, a trust ratio: what LAMB's authors do for BERT.
    """
    named = list(model.named_parameters())
    matrices = [(label, parameter) for label, parameter in named if parameter.ndim > 1]
    vectors = [(label, parameter) for label, parameter in named if parameter.ndim <= 1]
    groups: Groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if name == "lamb":
        groups[1]["adapt"] = False
    try:
        return OPTIMIZERS[name].build([group for group in groups if group["params"]], lr, backend)
    except (ValueError, RuntimeError) as error:  # a backend that this machine does not have, for one
        raise InputError(f"--optimizer {name}: {error}") from error


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    states = optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
