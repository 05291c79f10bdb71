"""The plan cache: one plan for each set of parameters, valid while none of its tensors moves or changes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bighorn.distributed import sharding
from bighorn.distributed.sharding import PLAIN, Layout
from bighorn.kernels.storage import address_of, has_memory
from bighorn.optim.algorithm import Group
from bighorn.optim.state import REAL_DTYPES, is_dense
from bighorn.optim.step_plan import StepPlan

MOST_PLANS = 8
"""The most plans that are kept for each part of a step, for sets of parameters that alternate."""

State = dict[str, Any]
Guard = Callable[[Sequence[Tensor]], bool]

TensorGuards: Any = None
with suppress(ImportError):
    # torch.compile checks its inputs with this class, in 0.06 us per tensor; reading the same attributes from Python
    # takes 0.7. The class is not public, so there is a fallback. Both can be removed once torch has a public
    # equivalent.
    from torch._C._dynamo.guards import TensorGuards


class StepParams(NamedTuple):
    """The parameters of a step, or of a part of one, in the order in which a step visits them.

    They include parameters that have state but no gradient in this step, so that one plan serves steps with and without
    it.
    """

    params: list[Tensor]
    grads: list[Tensor | None]

    @classmethod
    def of(cls, params: list[Tensor], state: Mapping[Tensor, Any]) -> StepParams:
        """Return the parameters that have a gradient or state."""
        grads = [param.grad for param in params]
        takes_part = [g is not None or bool(state.get(p)) for p, g in zip(params, grads, strict=True)]
        if not all(takes_part):
            params, grads = list(itertools.compress(params, takes_part)), list(itertools.compress(grads, takes_part))
        if not set(map(type, params)) <= PLAIN:
            grads = [g if g is None else sharding.aligned(g, p) for g, p in zip(grads, params, strict=True)]
        return cls(params, grads)

    def with_grad(self) -> StepParams:
        """Return the parameters that have a gradient."""
        pairs = [(param, grad) for param, grad in zip(*self, strict=True) if grad is not None]
        return StepParams([param for param, _ in pairs], [grad for _, grad in pairs])

    def expected(self) -> list[Tensor]:
        """The gradients; in place of a missing one, a tensor like its parameter, since most gradients are like that.

        A gradient of another kind needs another plan when it arrives.
        """
        return [param.detach() if grad is None else grad for param, grad in zip(*self, strict=True)]

    def divided(self, parts: list[list[Tensor]] | None) -> list[StepParams]:
        """Return the parameters of each part, or all of them; a part without gradients has no parameters.

        Raises:
            ValueError: A parameter that has a gradient is in none of the parts.
        """
        divided = [self] if parts is None else self._cut(parts)
        return [part if any(grad is not None for grad in part.grads) else StepParams([], []) for part in divided]

    def _cut(self, parts: list[list[Tensor]]) -> list[StepParams]:
        part_of = {id(param): i for i, part in enumerate(parts) for param in part}
        having = self.with_grad().params
        if missing := sum(id(param) not in part_of for param in having):
            raise ValueError(f"parts leave out {missing} of {len(having)} parameters that have a gradient")
        cut = [StepParams([], []) for _ in parts]
        for param, grad in zip(*self, strict=True):
            if id(param) in part_of:
                part = cut[part_of[id(param)]]
                part.params.append(param)
                part.grads.append(grad)
        return cut


@dataclass
class PlanCache:
    """The plans that an optimizer has prepared, by their parameters."""

    _plans: dict[tuple[int, ...], tuple[StepPlan, PlanGuards]] = field(default_factory=dict)

    def find(self, mine: StepParams, groups: list[Group], state: Mapping[Tensor, Any]) -> StepPlan | None:
        """Return the plan of these parameters, bound to this step's gradients, if its guards hold or can be renewed."""
        key = tuple(map(id, mine.params))
        plan, guards = self._plans.get(key, (None, None))
        if plan is None or guards is None:
            return None
        inputs = GuardInputs.of(mine, groups, state)
        changes = guards.changes(inputs)
        if changes is not None and not any(changes):
            plan.bind(inputs.grads)
            return plan
        del self._plans[key]
        if changes is None or not guards.renewed(inputs, changes):
            return None
        plan.refresh(inputs.params, inputs.grads)
        self._plans[key] = plan, guards
        return plan

    def keep(
        self, plan: StepPlan, mine: StepParams, groups: list[Group], state: Mapping[Tensor, Any], parts: int
    ) -> None:
        """Store the plan of a step that has so many parts."""
        if len(self._plans) >= MOST_PLANS * parts:
            self._plans.clear()
        guards = PlanGuards(GuardInputs.of(StepParams(mine.params, [*mine.expected()]), groups, state))
        self._plans[tuple(map(id, mine.params))] = plan, guards


class GuardInputs(NamedTuple):
    """The values that the guards of a plan compare."""

    group_sizes: list[int]
    layouts: list[Layout | None] | None
    """The layouts of gradients; None if all parameters are plain tensors."""
    params: list[Tensor]
    grads: list[Tensor | None]
    states: list[State]

    @classmethod
    def of(cls, mine: StepParams, groups: list[Group], state: Mapping[Tensor, Any]) -> GuardInputs:
        """Return the present values; of distributed tensors, the shards of this rank."""
        (params, grads), layouts = mine, None
        # The state is in the order of the parameters unless a program has changed it; looking it up takes longer.
        ordered = len(state) == len(params) and all(map(operator.is_, state, params))
        states = list(state.values()) if ordered else [state[p] for p in params if p in state]
        if not set(map(type, params)) <= PLAIN:
            pairs = list(zip(params, grads, strict=True))
            layouts = [sharding.layout_of(param if grad is None else grad) for param, grad in pairs]
            params = list(map(sharding.local, params))
            grads = [grad if grad is None else sharding.local(grad) for grad in grads]
            states = [{name: sharding.local(value) for name, value in each.items()} for each in states]
        return cls([len(group["params"]) for group in groups], layouts, params, grads, states)

    def state_addresses(self) -> list[int | None]:
        """The addresses of the state."""
        return addresses(list(itertools.chain.from_iterable(map(dict.values, self.states))))


class Changes(NamedTuple):
    """The changes since a plan was built or refreshed that it can be refreshed for."""

    moved: list[int | None] | None
    """The addresses of all parameters; None if they are the same."""
    grads: list[tuple[int, Tensor]]
    """The gradients of other kinds, or that have lost their memory, with their indices."""


class PlanGuards:
    """The guards of a plan: the kinds of all tensors, and the addresses of parameters and state, must not change.

    Gradients may move, and may be missing. If only parameters have moved, or gradients have become of other kinds, the
    guards can be renewed.
    """

    def __init__(self, inputs: GuardInputs) -> None:
        grads = [grad for grad in inputs.grads if grad is not None]
        self._groups_and_layouts = inputs[:2]
        self._alive = inputs.params, [list(state.values()) for state in inputs.states]  # so no address is reused
        self._param_addresses, self._state_addresses = addresses(inputs.params), inputs.state_addresses()
        self._params_alike = alike(inputs.params)
        self._grads_alike: Guard | None = alike(grads)
        self._each_alike = list(map(alike_one, grads))
        self._no_memory = [address == 0 for address in addresses(grads)]

    def changes(self, inputs: GuardInputs) -> Changes | None:
        """Return what has changed; None if the plan must be built anew."""
        if not self._same_params(inputs) or self._state_addresses != inputs.state_addresses():
            return None
        grads = []
        if not self._same_grads(inputs.grads):
            if not set(map(type, inputs.grads)) <= {*PLAIN, type(None)}:
                return None
            grads = self._changed_grads(inputs.grads)
        moved = addresses(inputs.params)
        return Changes(None if moved == self._param_addresses else moved, grads)

    def renewed(self, inputs: GuardInputs, changes: Changes) -> bool:
        """Whether the plan can be refreshed for these inputs; if so, the guards hold for them from now on.

        If not, the plan is built anew, which raises errors about parameters and gradients.
        """
        if changes.moved is not None and overlap(inputs.params, changes.moved):
            return False
        if not all(fits(grad, inputs.params[i]) for i, grad in changes.grads):
            return False
        self._param_addresses = changes.moved or self._param_addresses
        for i, grad in changes.grads:
            self._each_alike[i], self._no_memory[i], self._grads_alike = alike_one(grad), not grad.numel(), None
        return True

    def _same_params(self, inputs: GuardInputs) -> bool:
        return self._groups_and_layouts == inputs[:2] and self._params_alike(inputs.params)

    def _changed_grads(self, grads: list[Tensor | None]) -> list[tuple[int, Tensor]]:
        each = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        has_none = [address == 0 for address in addresses([grad for _, grad in each])]
        return [
            (i, grad)
            for (i, grad), no_memory in zip(each, has_none, strict=True)
            if no_memory != self._no_memory[i] or not self._each_alike[i](grad)
        ]

    def _same_grads(self, grads: list[Tensor | None]) -> bool:
        """Whether the gradients are of the same kinds, and none of them has lost its memory."""
        present, no_memory = [grad for grad in grads if grad is not None], self._no_memory
        if len(present) < len(grads):
            has_grad = [grad is not None for grad in grads]
            no_memory = list(itertools.compress(no_memory, has_grad))
            each_alike = itertools.compress(self._each_alike, has_grad)
            same = all(alike(grad) for alike, grad in zip(each_alike, present, strict=True))
        elif self._grads_alike is None:
            same = not self._changed_grads(grads)
            self._grads_alike = alike(present) if same else None
        else:
            same = self._grads_alike(present)
        return same and no_memory.count(True) == addresses(present).count(0)


def overlap(params: Sequence[Tensor], addresses: Sequence[int | None]) -> bool:
    """Whether parameters at these addresses share memory, or may have none. Those with gaps are not compared."""
    pairs = zip(params, addresses, strict=True)
    spans = sorted((start or 0, param.nbytes) for param, start in pairs if is_dense(param, 0))
    freed = any(start == 0 < size for start, size in spans)
    return freed or any(start + size > following for (start, size), (following, _) in itertools.pairwise(spans))


def fits(grad: Tensor, param: Tensor) -> bool:
    """Whether a gradient is one that every plan of its parameter serves."""
    return (
        grad.layout is torch.strided
        and grad.dtype in REAL_DTYPES
        and not param.is_complex()
        and not grad.is_neg()
        and grad.shape == param.shape
        and grad.device == param.device
        and has_memory(grad)
    )


def addresses(tensors: Sequence[Any]) -> list[int | None]:
    """The address of each tensor; None for anything that has none."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except (RuntimeError, TypeError):  # a tensor of functorch, or a user's own entry in the state
        return [address_of(thing) if isinstance(thing, Tensor) else None for thing in tensors]


def alike(tensors: Sequence[Tensor]) -> Guard:
    """A check that tensors have the types, dtypes, devices, shapes, strides, and conj and neg bits of `tensors`."""
    if TensorGuards is None:
        return alike_by_attributes(tensors)
    if not tensors:
        return lambda others: not others
    check, count = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check, len(tensors)
    return lambda others: len(others) == count and check(*others)


def alike_one(tensor: Tensor) -> Callable[[Tensor], bool]:
    """The same check for one tensor."""
    if TensorGuards is None:
        guard = alike_by_attributes([tensor])
        return lambda other: guard([other])
    check: Callable[[Tensor], bool] = TensorGuards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def alike_by_attributes(tensors: Sequence[Tensor]) -> Guard:
    """The same check for versions of torch without `TensorGuards`."""
    attributes = _attributes(tensors)
    return lambda others: attributes == _attributes(others)


def _attributes(tensors: Sequence[Tensor]) -> list[object]:
    return [(type(t), t.dtype, t.device, t.layout, t.shape, _strides(t), t.is_neg(), t.is_conj()) for t in tensors]


def _strides(tensor: Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else None
