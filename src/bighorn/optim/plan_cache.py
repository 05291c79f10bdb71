"""Plans that are remembered: one for each set of parameters that has had gradients, for as long as nothing moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from bighorn import sharding
from bighorn.optim.algorithm import Group
from bighorn.optim.fingerprint import Fingerprint
from bighorn.optim.plan import Plan

MOST_PLANS = 8
"""How many sets of parameters with gradients are remembered, where these alternate (GANs, experts)."""


class Ready(NamedTuple):
    """Parameters that have a gradient, in the order in which they are visited, and their gradients."""

    params: list[Tensor]
    grads: list[Tensor]

    @classmethod
    def of(cls, params: list[Tensor]) -> Ready:
        """Those of the parameters that have one."""
        grads = [param.grad for param in params]
        ready = cls(params, [grad for grad in grads if grad is not None])
        if len(ready.grads) < len(grads):
            ready = ready._replace(params=[param for param in params if param.grad is not None])
        if sharding.any_distributed(params):
            ready = ready._replace(grads=list(map(sharding.aligned, ready.grads, ready.params)))
        return ready

    def which(self) -> tuple[int, ...]:
        """By what their plan is remembered."""
        return tuple(map(id, self.params))

    def divided(self, parts: list[list[Tensor]]) -> list[Ready]:
        """Those of each part.

        Raises:
            ValueError: A parameter is in none of the parts.
        """
        part_of = {id(param): i for i, part in enumerate(parts) for param in part}
        if missing := sum(id(param) not in part_of for param in self.params):
            raise ValueError(f"parts leave out {missing} of {len(self.params)} parameters that have a gradient")
        divided = [Ready([], []) for _ in parts]
        for param, grad in zip(*self, strict=True):
            part = divided[part_of[id(param)]]
            part.params.append(param)
            part.grads.append(grad)
        return divided


class Looks(NamedTuple):
    """What a fingerprint is taken of."""

    facts: list[object]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]

    @classmethod
    def of(cls, ready: Ready, groups: list[Group], state: Mapping[Tensor, Any], *, all_of_them: bool) -> Looks:
        """As all is now. If these are all parameters, no state is looked up, since each would take its time."""
        states = list(state.values() if all_of_them else [state[p] for p in ready.params if p in state])
        (params, grads), layouts = ready, None
        if sharding.any_distributed(params) or sharding.any_distributed(grads):
            layouts = list(map(sharding.layout_of, grads))
            params, grads = list(map(sharding.local, params)), list(map(sharding.local, grads))
            states = [{name: sharding.local(value) for name, value in state.items()} for state in states]
        return cls([[len(group["params"]) for group in groups], layouts], params, grads, states)


class PlanCache:
    """Plans by their parameters."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], tuple[Plan, Fingerprint]] = {}

    def find(self, ready: Ready, looks: Looks) -> Plan | None:
        """The plan of these parameters, if all is as it was."""
        plan, fingerprint = self._plans.get(ready.which(), (None, None))
        return plan if fingerprint is not None and fingerprint.holds(*looks) else None

    def keep(self, plan: Plan, ready: Ready, looks: Looks, parts: int) -> None:
        """Remember a plan of a step that has so many."""
        if len(self._plans) >= MOST_PLANS * parts:
            self._plans.clear()
        self._plans[ready.which()] = plan, Fingerprint.of(*looks)
