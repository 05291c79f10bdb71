"""A step that some parameters take before the others, each as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from bighorn.optim.param_info import Indices
from bighorn.optim.step_options import ScheduleStep
from bighorn.optim.step_plan import StepPlan


@dataclass
class BegunStep:
    """Such a step, begun and not ended."""

    schedule: ScheduleStep
    indices: Indices
    plans: dict[Tensor, StepPlan] = field(default_factory=dict)
    """Those of the parameters that have taken it."""


def check_step_param(
    param: Tensor, indices: Indices, begun: BegunStep | None, name: Callable[[tuple[int, int]], str]
) -> None:
    """Refuse a parameter that cannot take such a step.

    Raises:
        RuntimeError: The parameter has taken it already.
        ValueError: It is not the optimizer's, or has no gradient.
    """
    if id(param) not in indices:
        what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
        raise ValueError(f"{what} is no parameter of this optimizer")
    if param.grad is None:
        raise ValueError(f"{name(indices[id(param)])} has no gradient to be stepped with: run backward() first")
    if begun is not None and param in begun.plans:
        raise RuntimeError(
            f"{name(indices[id(param)])} has taken this step already, and now has another gradient: call "
            "optimizer.step() after each backward(). Gradients of several of them, or of reentrant checkpoints "
            "that share the parameter, cannot be added up where each is stepped as soon as it is there"
        )
