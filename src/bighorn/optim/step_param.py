"""Gradient release: a step that each parameter takes as soon as its gradient is complete, and protocols for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bighorn.optim.eager import eager
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


class StepParameter(Optimizer):
    """The methods by which trainers step one parameter inside backward."""

    _begun: BegunStep | None = None
    """The step that `step_param` has begun and `step` has not ended."""

    def _step_now(self, param: Tensor) -> None:
        """Step a parameter now."""
        raise NotImplementedError

    @eager
    def step_param(self, param: Tensor, group: dict[str, Any] | None = None) -> None:
        """Step one parameter now and drop its gradient; a later `step()` steps the others and ends the step.

        The options are those at the first call in a step. `bighorn.release_gradients` calls this inside backward.

        Args:
            param: A parameter of this optimizer, with a gradient.
            group: Its group, in sd-scripts' protocol: nothing happens without a gradient, and a second gradient ends
                the step, since that trainer calls no `step()`. Default: None.

        Raises:
            RuntimeError: As for `step`; or the parameter has taken this step already.
            ValueError: As for `step`; or an option needs every gradient before the first parameter is written.
        """
        if group is not None and not can_step(self, self._begun, param, group):
            return
        self._step_now(param)

    def step_parameter(self, parameter: Tensor, group: dict[str, Any], i: int | None = None) -> None:
        """Step one parameter now, as `step_param(parameter, group)` does.

        Args:
            parameter: A parameter of this optimizer, with a gradient or without.
            group: Its group.
            i: Its position in the group, which is not needed. Default: None.
        """
        del i
        self.step_param(parameter, group)


def can_step(optimizer: Optimizer, begun: BegunStep | None, param: Tensor, group: object) -> bool:
    """Whether a trainer's hook, which passes a group, has a gradient to step with; end the last step if need be.

    Such trainers may never call `step()`, so that a parameter's second gradient is the sign that a new step begins: one
    that was not used in the last step, and comes first in this one, still joins the last. Autograd's graph task ids
    would tell, but reentrant checkpoints, which sd-scripts uses, have several of them in one backward.

    Raises:
        TypeError: The group is not a dict.
    """
    if not isinstance(group, dict):
        raise TypeError(f"group must be the parameter's group, a dict of param_groups, not a {type(group).__name__}")
    if param.grad is None:
        return False
    if begun is not None and param in begun.plans:
        grad, param.grad = param.grad, None
        try:
            optimizer.step()
        finally:
            param.grad = grad
    return True


def check_step_param(
    param: Tensor, indices: Indices, begun: BegunStep | None, name: Callable[[tuple[int, int], Tensor], str]
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
        raise ValueError(f"{name(indices[id(param)], param)} has no gradient to be stepped with: run backward() first")
    if begun is not None and param in begun.plans:
        raise RuntimeError(
            f"{name(indices[id(param)], param)} has taken this step already, and now has another gradient: call "
            "optimizer.step() after each backward(). Gradients of several of them, or of reentrant checkpoints "
            "that share the parameter, cannot be added up where each is stepped as soon as it is there"
        )
