"""Gradient release: the parameters that take a step as soon as their gradients are complete, and protocols for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bighorn._distributed import sharding
from bighorn._optim.algorithm import Group
from bighorn._optim.entries import Indices
from bighorn._optim.param_groups import label_of
from bighorn._optim.step_plan import StepPlan


@dataclass
class Released:
    """The parameters that have taken a step which `step()` has not ended."""

    indices: Indices
    handed_in: bool = False
    """Whether a trainer's hooks hand in the parameters, and may never call `step()`."""
    closed: bool = False
    """Whether `step()` steps no other parameters, whose gradients may be incomplete or still scaled."""
    plans: dict[Tensor, StepPlan] = field(default_factory=dict)
    """The plans of the parameters that have taken the step."""
    fresh: list[Tensor] = field(default_factory=list)
    """Those that got their state in this step, at learning rates of 0."""
    moves: Tensor | None = None
    """Whether a gradient was not zero, at learning rates of 0."""

    def check(self, param: Tensor, groups: list[Group]) -> str:
        """Return the name of a parameter in messages; raise for one that cannot take the step.

        Raises:
            RuntimeError: The parameter has taken the step already.
            ValueError: The optimizer does not hold the parameter, or it has no gradient.
        """
        if id(param) not in self.indices:
            what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
            raise ValueError(f"{what} is no parameter of this optimizer")
        index, position = self.indices[id(param)]
        label = label_of(index, position, groups[index].get("param_names"))
        if param.grad is None:
            raise ValueError(f"{label} has no gradient to be stepped with: run backward() first")
        if param in self.plans:
            raise RuntimeError(
                f"{label} was already stepped, and now has another gradient: call optimizer.step() before another "
                "backward(). Gradients of several backward() calls, or of reentrant checkpoints that share the "
                "parameter, cannot be accumulated with released gradients"
            )
        return label

    def add(self, param: Tensor, plan: StepPlan, *, fresh: bool, at_rest: bool) -> None:
        """Add a parameter that has taken the step. `at_rest`: the learning rates are 0."""
        self.plans[param] = plan
        self.fresh += [param] * fresh
        if at_rest and param.grad is not None:
            moves = sharding.local(param.grad).any()
            self.moves = moves if self.moves is None else moves | self.moves.to(moves.device)

    def plans_once(self) -> list[StepPlan]:
        """Return the plans of the parameters that have taken the step, each once."""
        return list({id(plan): plan for plan in self.plans.values()}.values())

    def reset(self, state: Mapping[Tensor, Any]) -> None:
        """Let parameters start anew that got their state in this step."""
        for value in (value for param in self.fresh for value in state[param].values()):
            value.zero_()

    def end(self, optimizer: Optimizer) -> None:
        """End the step with the parameters that have taken it, as a `step()` with its hooks."""
        self.closed = True
        try:
            optimizer.step()
        finally:
            self.closed = False


def can_step(optimizer: Optimizer, released: Released | None, param: Tensor, group: object) -> bool:
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
    if released is not None and param in released.plans:
        released.end(optimizer)
    return True
