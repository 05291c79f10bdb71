"""Gradient release: a step that each parameter takes as soon as its gradient is complete, and protocols for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from bighorn.optim.algorithm import Group
from bighorn.optim.entries import Indices
from bighorn.optim.param_groups import label_of
from bighorn.optim.step_options import ScheduleStep
from bighorn.optim.step_plan import StepPlan


@dataclass
class BegunStep:
    """A step that some parameters have taken and that `step()` has not ended."""

    schedule: ScheduleStep
    indices: Indices
    handed_in: bool = False
    """Whether a trainer's hooks hand in the parameters, and may never call `step()`."""
    closed: bool = False
    """Whether `step()` steps no other parameters, whose gradients may be incomplete or still scaled."""
    plans: dict[Tensor, StepPlan] = field(default_factory=dict)
    """The plans of the parameters that have taken the step."""

    def end(self, optimizer: Optimizer) -> None:
        """End the step with the parameters that have taken it, as a `step()` with its hooks."""
        self.closed = True
        try:
            optimizer.step()
        finally:
            self.closed = False


def can_step(optimizer: Optimizer, begun: BegunStep | None, param: Tensor, group: object) -> bool:
    """Whether a trainer's hook, which passes a group, has a gradient to step with; end the last step if need be.

    Such trainers may never call `step()`: their `zero_grad()` ends a step, or else a parameter's second gradient.
    Autograd's graph task ids are no better sign, since reentrant checkpoints, which sd-scripts uses, have several of
    them in one backward.

    Raises:
        TypeError: The group is not a dict.
    """
    if not isinstance(group, dict):
        raise TypeError(f"group must be the parameter's group, a dict of param_groups, not a {type(group).__name__}")
    if param.grad is None:
        return False
    if begun is not None and param in begun.plans:
        begun.end(optimizer)
    return True


def check_step_param(param: Tensor, indices: Indices, begun: BegunStep | None, groups: list[Group]) -> None:
    """Raise for a parameter that cannot take such a step.

    Raises:
        RuntimeError: The parameter has taken the step already.
        ValueError: The optimizer does not hold the parameter, or it has no gradient.
    """
    if id(param) not in indices:
        what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
        raise ValueError(f"{what} is no parameter of this optimizer")
    index, position = indices[id(param)]
    label = label_of(index, position, groups[index].get("param_names"))
    if param.grad is None:
        raise ValueError(f"{label} has no gradient to be stepped with: run backward() first")
    if begun is not None and param in begun.plans:
        raise RuntimeError(
            f"{label} has taken this step already, and now has another gradient: call "
            "optimizer.step() after each backward(). Gradients of several of them, or of reentrant checkpoints "
            "that share the parameter, cannot be added up where each is stepped as soon as it is there"
        )
