"""Gradient release: a step that each parameter takes as soon as its gradient is complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from bighorn.optim.param_info import Indices
from bighorn.optim.step_options import ScheduleStep
from bighorn.optim.step_plan import StepPlan


@dataclass
class BegunStep:
    """A step that some parameters have taken and that `step()` has not ended."""

    schedule: ScheduleStep
    indices: Indices
    plans: dict[Tensor, StepPlan] = field(default_factory=dict)
    """The plans of the parameters that have taken the step."""


def check_step_param(
    param: Tensor, indices: Indices, begun: BegunStep | None, name: Callable[[tuple[int, int]], str]
) -> None:
    """Raise for a parameter that cannot take such a step.

    Raises:
        RuntimeError: The parameter has taken the step already.
        ValueError: The optimizer does not hold the parameter, or it has no gradient.
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
