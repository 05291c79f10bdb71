"""The plan cache: one plan for each set of parameters, valid while none of its tensors moves or changes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from bighorn._distributed import sharding
from bighorn._distributed.sharding import PLAIN, Layout
from bighorn._kernels.storage import address_of, has_memory
from bighorn._optim.algorithm import Group
from bighorn._optim.state import REAL_DTYPES, is_dense
from bighorn._optim.step_plan import StepPlan

MOST_PLANS = 8
"""The most plans that are kept of each parameter, on average, for sets of parameters that alternate."""

State = dict[str, Any]
Guard = Callable[[Sequence[Any]], bool]

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
    present: list[bool]
    """Whether each parameter has a gradient."""
    plain: bool
    """Whether no parameter is distributed, or another subclass of Tensor."""

    @classmethod
    def of(cls, params: list[Tensor], state: Mapping[Tensor, Any]) -> StepParams:
        """Return the parameters that have a gradient or state."""
        grads, plain = [param.grad for param in params], set(map(type, params)) <= PLAIN
        if type(None) not in set(map(type, grads)):
            present = [True] * len(grads)
        else:
            if not (all(state.values()) and in_order(state, params)):
                takes_part = [g is not None or bool(state.get(p)) for p, g in zip(params, grads, strict=True)]
                params = list(itertools.compress(params, takes_part))
                grads = list(itertools.compress(grads, takes_part))
            present = list(map(operator.is_not, grads, itertools.repeat(None)))
            if not any(present):
                return NOTHING
        if not plain:
            grads = [g if g is None else sharding.aligned(g, p) for g, p in zip(grads, params, strict=True)]
        return cls(params, grads, present, plain)

    def with_grad(self) -> StepParams:
        """Return these without the parameters that have no gradient."""
        grads = itertools.compress(self.grads, self.present)
        return StepParams(list(self.having_grad()), list(grads), [True] * sum(self.present), self.plain)

    def having_grad(self) -> Iterator[Tensor]:
        """Return the parameters that have a gradient."""
        return itertools.compress(self.params, self.present)

    def divided(self, parts: list[list[Tensor]]) -> list[StepParams]:
        """Return the parameters of each part; a part without gradients has no parameters.

        Raises:
            ValueError: A parameter that has a gradient is in none of the parts.
        """
        part_of = {id(param): i for i, part in enumerate(parts) for param in part}
        having = list(self.having_grad())
        if missing := sum(id(param) not in part_of for param in having):
            raise ValueError(f"parts leave out {missing} of {len(having)} parameters that have a gradient")
        members: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in parts]
        for param, grad in zip(self.params, self.grads, strict=True):
            if id(param) in part_of:
                members[part_of[id(param)]].append((param, grad))
        return [
            StepParams([p for p, _ in each], [g for _, g in each], [g is not None for _, g in each], self.plain)
            if any(grad is not None for _, grad in each)
            else NOTHING
            for each in members
        ]


NOTHING = StepParams([], [], [], True)


def in_order(state: Mapping[Tensor, Any], params: list[Tensor]) -> bool:
    """Whether the state has these parameters alone, in this order."""
    return len(state) == len(params) and all(map(operator.is_, state, params))


def expected(params: list[Tensor], grads: list[Tensor | None]) -> list[Tensor]:
    """The gradients; in place of a missing one, a tensor like its parameter, since most gradients are like that.

    A gradient of another kind needs another plan when it arrives.
    """
    return [param.detach() if grad is None else grad for param, grad in zip(params, grads, strict=True)]


@dataclass
class PlanCache:
    """The plans that an optimizer has prepared, by their parameters."""

    _plans: dict[tuple[int, ...], tuple[StepPlan, PlanGuards]] = field(default_factory=dict)
    _params: int = 0
    """The number of parameters of all plans, or more."""

    def find(self, part: StepParams, groups: list[Group], state: Mapping[Tensor, Any]) -> StepPlan | None:
        """Return the plan of these parameters, bound to this step's gradients, if its guards hold or can be renewed."""
        key = tuple(map(id, part.params))
        plan, guards = self._plans.get(key, (None, None))
        if plan is None or guards is None:
            return None
        inputs = GuardInputs.of(part, groups, state)
        complete = all(part.present)
        if complete and part.plain:
            plan.written = inputs.tensors
        else:
            whole = inputs.states if part.plain else [state[param] for param in part.params]
            plan.note_written(part.params, part.present, whole)
        if guards.hold(inputs) and (given := guards.grad_addresses(inputs, part.present, complete)) is not None:
            if plan.reads_tensors:
                plan.fill(inputs.params, inputs.states)
            plan.bind(inputs.grads, part.present, given)
            return plan
        del self._plans[key]
        if (changed := guards.renewed(inputs)) is None:
            return None
        if changed:
            plan.expect(inputs.params, inputs.grads)
        plan.fill(inputs.params, inputs.states)
        plan.refresh(inputs.grads, part.present)
        self._plans[key] = plan, guards
        return plan

    def keep(
        self, plan: StepPlan, part: StepParams, groups: list[Group], state: Mapping[Tensor, Any], most: int
    ) -> None:
        """Store a plan; if the plans have more than `most` parameters, it is the only one then."""
        self._params += len(part.params)
        if self._params > most:
            self._plans.clear()
            self._params = len(part.params)
        inputs = GuardInputs.of(part._replace(grads=[*expected(part.params, part.grads)]), groups, state)
        guards = PlanGuards(inputs, [entry for param in part.params for entry in state.get(param, {}).values()])
        self._plans[tuple(map(id, part.params))] = plan, guards


class GuardInputs(NamedTuple):
    """The values that the guards of a plan compare."""

    groups: list[tuple[int, list[str] | None]]
    """The number of parameters of each group, and their names."""
    layouts: list[Layout | None] | None
    """The layouts of gradients; None if all parameters are plain tensors."""
    params: list[Tensor]
    grads: list[Tensor | None]
    states: list[State]
    tensors: list[Any]
    """The parameters, and then their state, which may hold a user's entries, too."""
    addresses: list[int]
    """The addresses of these tensors."""

    @classmethod
    def of(cls, part: StepParams, groups: list[Group], state: Mapping[Tensor, Any]) -> GuardInputs:
        """Return the present values; of distributed tensors, the shards of this rank."""
        params, grads, layouts = part.params, part.grads, None
        # The state is in the order of the parameters unless a program has changed it; looking it up takes longer.
        states = list(state.values()) if in_order(state, params) else [state[p] for p in params if p in state]
        if not part.plain:
            pairs = list(zip(params, grads, strict=True))
            layouts = [sharding.layout_of(param if grad is None else grad) for param, grad in pairs]
            params = list(map(sharding.local, params))
            grads = [grad if grad is None else sharding.local(grad) for grad in grads]
            states = [{name: sharding.local(value) for name, value in each.items()} for each in states]
        tensors = [*params, *itertools.chain.from_iterable(map(dict.values, states))]
        sizes_and_names = [(len(group["params"]), group.get("param_names")) for group in groups]
        return cls(sizes_and_names, layouts, params, grads, states, tensors, addresses(tensors))


class PlanGuards:
    """The guards of a plan: the kinds of all tensors, and the addresses of parameters and state, must not change.

    Gradients may move, and may be missing. If only parameters have moved, or gradients have changed their kinds, the
    guards can be renewed.
    """

    def __init__(self, inputs: GuardInputs, entries: Iterable[Any]) -> None:
        grads = [grad for grad in inputs.grads if grad is not None]
        groups = [(size, None if names is None else [*names]) for size, names in inputs.groups]
        self._groups_and_layouts = groups, inputs.layouts
        self._addresses: list[Any] = inputs.addresses
        gone: Any = self._addresses.append
        self._state = [ref(entry, gone) for entry in entries if isinstance(entry, Tensor)]
        """References to the state: one to a tensor that is gone, whose address may be another's, joins the addresses.

        Parameters have none, since torch.utils.swap_tensors refuses a tensor with one (torch 2.13); their kinds are
        compared at each step.
        """
        self._params_alike = alike(inputs.params)
        self._grads_alike: Guard | None = alike(grads)
        """The check of all gradients; None from a change of their kinds until all of them have been compared."""
        self._each_alike = [alike([grad]) for grad in grads]
        self._no_memory = [address == 0 for address in addresses(grads)]

    def hold(self, inputs: GuardInputs) -> bool:
        """Whether parameters and state are the same, of the same kinds, at the same addresses."""
        return (
            self._groups_and_layouts == inputs[:2]
            and self._addresses == inputs.addresses
            and self._params_alike(inputs.params)
        )

    def grad_addresses(self, inputs: GuardInputs, present: list[bool], complete: bool) -> list[int] | None:
        """Return the addresses of gradients, 0 for None; or None if one is of another kind, or has lost its memory."""
        grads = inputs.grads
        filled: list[Any] = grads if complete else expected(inputs.params, grads)
        if self._grads_alike is None or not self._grads_alike(filled):
            if self._changed_grads(grads):
                return None
            if complete:
                self._grads_alike = alike(filled)
        given = addresses(filled)
        if given.count(0) != self._no_memory.count(True):
            return None
        return given if complete else list(map(operator.mul, given, present))

    def renewed(self, inputs: GuardInputs) -> bool | None:
        """Whether gradients have changed their kinds, if the plan can be refreshed for these inputs.

        The guards hold for them from now on. If the plan cannot, the result is None: a new one raises errors about
        parameters and gradients.
        """
        count, grads = len(inputs.params), inputs.grads
        if self._groups_and_layouts != inputs[:2] or not self._params_alike(inputs.params):
            return None
        if self._addresses[count:] != inputs.addresses[count:]:
            return None
        if self._addresses != inputs.addresses and overlap(inputs.params, inputs.addresses[:count]):
            return None
        changed = self._changed_grads(grads)
        if changed and not set(map(type, grads)) <= {*PLAIN, type(None)}:
            return None
        if not all(fits(grad, inputs.params[i]) for i, grad in changed):
            return None
        self._addresses[:] = inputs.addresses
        for i, grad in changed:
            self._each_alike[i], self._no_memory[i], self._grads_alike = alike([grad]), not grad.numel(), None
        return bool(changed)

    def _changed_grads(self, grads: list[Tensor | None]) -> list[tuple[int, Tensor]]:
        """The gradients of other kinds, or that have lost their memory, with their indices."""
        return [
            (i, grad)
            for i, (grad, guard, no_memory) in enumerate(zip(grads, self._each_alike, self._no_memory, strict=True))
            if grad is not None and not (guard([grad]) and (address_or_0(grad) == 0) == no_memory)
        ]


def overlap(params: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Whether parameters at these addresses share memory, or may have none. Those with gaps are not compared."""
    pairs = zip(params, addresses, strict=True)
    spans = sorted((start, param.nbytes) for param, start in pairs if is_dense(param, 0))
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


def addresses(tensors: list[Any]) -> list[int]:
    """The address of each tensor; 0 for anything that has none."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except (RuntimeError, TypeError):  # a tensor of functorch, or a user's own entry in the state
        return list(map(address_or_0, tensors))


def address_or_0(thing: Any) -> int:
    """The address of a tensor; 0 for anything that has none."""
    return (address_of(thing) if isinstance(thing, Tensor) else None) or 0


def alike(tensors: Sequence[Tensor]) -> Guard:
    """A check that tensors have the types, dtypes, devices, shapes, strides, and conj and neg bits of `tensors`."""
    if TensorGuards is None:
        return alike_by_attributes(tensors)
    if not tensors:
        return lambda others: not others
    check, count = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check, len(tensors)
    return lambda others: len(others) == count and check(*others)


def alike_by_attributes(tensors: Sequence[Tensor]) -> Guard:
    """Return the guard of `tensors` for versions of torch without `TensorGuards`."""
    attributes = _attributes(tensors)
    return lambda others: attributes == _attributes(others)


def _attributes(tensors: Sequence[Tensor]) -> list[object]:
    return [(type(t), t.dtype, t.device, t.layout, t.shape, _strides(t), t.is_neg(), t.is_conj()) for t in tensors]


def _strides(tensor: Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else None
