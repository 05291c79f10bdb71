"""A step of an optimizer, from its options to its end, and what an optimizer keeps between its steps."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from bighorn._distributed import sharding
from bighorn._optim import flat_tensors, plan_builder
from bighorn._optim.agreement import GIVE_GRADIENTS, Presence, check_agreement, refuse_zeros
from bighorn._optim.algorithm import Algorithm, Variant
from bighorn._optim.entries import Indices, entries_of, parameters
from bighorn._optim.entry import Entry
from bighorn._optim.group_records import GroupRecords
from bighorn._optim.plan_cache import MOST_PLANS, GuardInputs, PlanCache, StepParams, expected
from bighorn._optim.settings import Settings
from bighorn._optim.state import init_or_validate_state
from bighorn._optim.step_options import StepOptions, refuse_unread
from bighorn._optim.step_param import Released
from bighorn._optim.step_plan import PartCall, StepPlan, scale_and_mask, square_sum_of


class Parts(NamedTuple):
    """A division of a step into parts, whose gradients arrive one after the other; the default is one whole step."""

    params: list[list[Tensor]] | None = None
    """The parameters of each part."""
    wait: PartCall = lambda _: None
    """A function that returns when the gradients of a part may be read."""
    stepped: PartCall | None = None
    """A function that is called as soon as a part has taken the step."""
    square_sum: Callable[[], Tensor] | None = None
    """A function that returns the sum of the squares of this rank's gradients, if the step need not compute it."""


WHOLE = Parts()


class NewPlan(NamedTuple):
    """A plan that a step has built."""

    part: StepParams
    plan: StepPlan
    states: dict[Tensor, Any]
    """The states of its parameters, which the optimizer does not have yet."""


class Steps:
    """The steps of an optimizer: what one leaves for the next, and the lock by which one thread at a time is in one.

    Args:
        algorithm: The algorithm, which declares options and state.
        settings: The options of the whole optimizer.
        records: The records of the groups.
    """

    def __init__(self, algorithm: Algorithm[Any], settings: Settings, records: GroupRecords) -> None:
        self.algorithm, self.settings, self.records = algorithm, settings, records
        self.needs_all_grads = settings.needs_all_grads
        self.plans = PlanCache()
        self.options_version = 0
        """A number that grows with every change of an option."""
        self.agreed = False
        """Whether the ranks were found to agree; they are compared at the first step, and after groups changed."""
        self.presence: Presence | None = None
        """The sharded parameters, whose gradients ranks compare; None if there are none."""
        self.begun: Step | None = None
        """The step that some parameters have taken alone, and that `step()` has not ended."""
        self.last: tuple[StepPlan, ...] = ()
        """The plans of the last step, one per part."""
        self.skipped: Tensor | None = None
        """The number of steps that wrote nothing since the state was loaded; None if no step could have been skipped.
        """
        self._lock = threading.Lock()
        self._owner: int | None = None
        """The thread in a step; without meaning while the lock is free."""
        _all_steps.add(self)

    @property
    def running(self) -> bool:
        """Whether a thread is in a step."""
        return self._lock.locked()

    def after_fork(self) -> None:
        """Let a forked process step: a thread of its parent may have been in a step, and in a kernel, with locks."""
        self._lock, self.plans = threading.Lock(), PlanCache()

    def forget(self) -> None:
        """Forget the plans, and that ranks agree, since groups have changed."""
        self.last, self.plans, self.agreed = (), PlanCache(), False

    def agree(self, optimizer: Optimizer) -> None:
        """Compare the parameters and options of the ranks, and refuse options that nothing reads.

        Raises:
            ValueError: The ranks differ, or a group has a multiplier that no scheduler has used.
        """
        refuse_unread(self.records.each, optimizer.defaults)
        groups, self.presence = self.records.groups, None
        if self.records.has_flat or sharding.any_distributed([param for group in groups for param in group["params"]]):
            entries = list(self._entries(parameters(groups)))
            check_agreement(entries, groups, self.algorithm.options, self.settings)
            self.presence = Presence(entries)
        self.agreed = True

    def new_plan(self, part: StepParams, state: Mapping[Tensor, Any], indices: Indices) -> NewPlan:
        """Return a plan, its parameters, and their states.

        A parameter without a gradient may have been freed or replaced meanwhile. It must not prevent the step of the
        others, so the plan is built without it in that case.
        """
        try:
            return self._build(part, state, indices)
        except (RuntimeError, ValueError):
            present = part.with_grad()
            if len(present.params) == len(part.params):
                raise
            return self._build(present, state, indices)

    def _build(self, part: StepParams, state: Mapping[Tensor, Any], indices: Indices) -> NewPlan:
        entries = list(self._entries((*indices[id(param)], param) for param in part.params))
        options, version = self.options_of({entry.variant for entry in entries}), self.options_version
        grads, backend = expected(part.params, part.grads), self.settings.backend
        if self.algorithm.never_zero is not None:
            norm, why = self.algorithm.never_zero
            kept = [each for each in entries if norm in each.spec and options[each.variant].adapt]
            if starting := [each for each in kept if norm not in state.get(each.param, {})]:
                refuse_zeros(starting, why)

        def init_state(entry: Entry, dense: Tensor) -> dict[str, Any]:
            before = state.get(entry.param, {})
            return init_or_validate_state(entry.param, dense, entry.spec, before, self.algorithm.forms, entry.label)

        plan, states = plan_builder.build(part.params, grads, entries, options, version, init_state, backend)
        plan.bind([grad if grad is None else sharding.local(grad) for grad in part.grads], part.present)
        plan.note_written(part.params, part.present, states)
        return NewPlan(part, plan, dict(zip(part.params, states, strict=True)))

    def _entries(self, params: Iterable[tuple[int, int, Tensor]]) -> Iterator[Entry]:
        return entries_of(params, self.records.groups, self.records.flat, self.algorithm, self.settings)

    def options_of(self, variants: set[Variant]) -> dict[Variant, Any]:
        """Return the options that the kernels of each variant receive."""
        groups = self.records.groups
        return {variant: self.algorithm.kernel_options(groups[variant.group], variant) for variant in variants}

    def alone(self, step: Callable[[], None], *, waits: bool) -> None:
        """Take a step, or a part of the step that this thread is in, while no other thread is in one.

        A `with` of the lock itself has no place for a KeyboardInterrupt between the lock and its release. A call of
        `acquire`, a method `__enter__` in Python, and the line of a `try` inside have one.

        Args:
            step: The step.
            waits: Whether to wait for a step of another thread.

        Raises:
            RuntimeError: Another thread is in a step, and `waits` is False.
        """
        if self._lock.locked():
            if self._owner == get_ident():
                step()
                return
            if not waits:
                raise RuntimeError(
                    "two threads step one optimizer at once: call step() in one thread, or give each its own optimizer"
                )
        with self._lock:
            self._owner = get_ident()
            step()

    def adopt(self, optimizer: Optimizer) -> list[Tensor]:
        """Adopt what a program has changed in `param_groups`, and return the parameters that are there."""
        if self.records.adopt(optimizer.param_groups, optimizer.defaults):
            self.forget()
        return [param for group in optimizer.param_groups for param in group["params"]]

    def begin(self, optimizer: Optimizer) -> Step:
        """Return the step that has begun, or a new one, of the parameters that are in `param_groups` now."""
        groups = optimizer.param_groups
        params = self.records.unchanged(groups)
        if params is None:
            params = self.adopt(optimizer)
        step = self.begun
        if step is None:
            some = len(groups) < len(self.records.each)
            records = self.records.stepping(groups) if some else self.records.each
            step = Step(self, optimizer, StepOptions(records, optimizer.defaults, self.algorithm, self.settings))
            if step.options.changed:
                self.options_version += 1
                if not step.options.changed <= self.algorithm.kernel_options_type.numbers:
                    self.last, self.plans = (), PlanCache()
        step.params = params
        return step

    def take(self, optimizer: Optimizer, parts: Parts) -> None:
        """Take one step, or end the step that has begun."""
        grad_scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if self.begun is not None and found_inf is not None:
            raise RuntimeError(
                "a gradient scaler has scaled the gradients that parameters were stepped with inside backward, before "
                "it could unscale them: go back to a checkpoint, and train without it (bfloat16 needs none)"
            )
        if torch._C._current_graph_task_id() != -1:
            self.settings.refuse_in_backward()
        with self.begin(optimizer) as step:
            step.prepare(parts)
            if grad_scale is not None or found_inf is not None or self.needs_all_grads:
                step.scale_and_mask(grad_scale, found_inf)
            step.run()

    def take_alone(self, optimizer: Optimizer, param: Tensor, *, handed_in: bool) -> None:
        """Let one parameter take a step ahead of the others; `take` ends the step."""
        step = self.begun or self.begin(optimizer)
        step.take_alone(param, handed_in=handed_in)


@dataclass
class Step:
    """One step. Its context ends the step, or undoes its options if an error is raised inside."""

    steps: Steps
    optimizer: Optimizer
    options: StepOptions
    params: list[Tensor] = field(default_factory=list)
    """The parameters that may have a gradient."""
    parts: Parts = WHOLE
    plans: list[StepPlan] = field(default_factory=list)
    """A plan for each part."""
    fresh: bool = False
    """Whether the learning rates are 0, and every parameter gets its state now."""
    scale: Tensor | float = 1.0
    """The factor of all gradients."""
    mask: Tensor | None = None
    """Whether the step is written; None if it is."""
    counts: bool = True
    """Whether the step is counted, as any but one that only creates state."""
    released: Released | None = None
    """The parameters that have taken the step alone."""

    def __enter__(self) -> Step:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            if self.released is None:  # no parameter has taken the step
                self.options.undo()
            return
        steps, released, last = self.steps, self.released, self.plans
        if self.counts:
            self.options.finish()
        if self.mask is not None:
            skipped = (~self.mask).long()
            steps.skipped = skipped if steps.skipped is None else steps.skipped.to(skipped.device) + skipped
        if released is not None:
            last = [*released.plans_once(), *last]
        if len(self.optimizer.param_groups) < len(steps.records.each):  # the plans of the other groups' last steps stay
            stepped = {variant.group for plan in last for variant in plan.variants()}
            last = [p for p in steps.last if stepped.isdisjoint(each.group for each in p.variants())] + last
        steps.last = tuple([plan for plan in last if plan.buckets]) or steps.last
        steps.begun = None

    def prepare(self, parts: Parts = WHOLE, alone: Tensor | None = None) -> None:
        """Find or build the plan of each part. Errors that do not depend on the values of gradients are raised here.

        Args:
            parts: The parts of the step. Default: one.
            alone: A parameter that takes the step ahead of the others. Default: None, for all that have not.
        """
        steps, state, released = self.steps, self.optimizer.state, self.released
        groups, indices, params = steps.records.groups, None, self.params
        if not steps.agreed:
            steps.agree(self.optimizer)
        if steps.presence is not None and alone is None:
            steps.presence.check(self.optimizer.param_groups)
        if steps.records.has_flat:
            present = steps.records.of(self.optimizer.param_groups)
            flat_tensors.check_grads(self.optimizer.param_groups, [record.flat for record in present])
        if released is not None and released.closed:
            params = self.params = []
        if released is not None and alone is not None:
            params, indices = [alone], released.indices
        whole, self.parts = StepParams.of(params, state), parts
        divided = [whole] if parts.params is None else whole.divided(parts.params)
        plans: list[StepPlan] = []
        built: list[NewPlan] = []
        for part in divided:
            plan = steps.plans.find(part, groups, state)
            if plan is None:
                built.append(steps.new_plan(part, state, indices or steps.records.indices()))
                plan = built[-1].plan
            elif plan.options_version != steps.options_version:
                plan.set_options(steps.options_of(plan.variants()), steps.options_version)
                if not plan.filled and any(launch.kernel.reads_tensors for launch in plan.launches()):
                    inputs = GuardInputs.of(part, groups, state)
                    plan.fill(inputs.params, inputs.states)
            plans.append(plan)
        for plan in plans:
            for launch in itertools.chain(plan.kernels, *plan.meshes.values()):
                launch.kernel.prepare()
        self.plans = plans
        creates = len(built) > 0 or (released is not None and len(released.fresh) > 0)
        self.fresh = creates and self.at_rest and not any(state.get(p) for part in divided for p in part.having_grad())
        for new in built:
            held = {param: state[param] for param in state.keys() & new.states.keys()}
            state.update(new.states)
            for param, values in held.items():  # state stays in the dict that a program may hold, as torch's does
                values.clear()
                values.update(state[param])
                state[param] = values
            steps.plans.keep(new.plan, new.part, groups, state, most=MOST_PLANS * steps.records.count)

    def scale_and_mask(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Compute the factor of the gradients, and whether the step is written."""
        settings, groups = self.steps.settings, self.optimizer.param_groups
        total = partial(square_sum_of, self.plans, self.parts.wait, groups, settings, self.parts.square_sum)
        self.scale, self.mask = scale_and_mask(settings, grad_scale, found_inf, total)

    def run(self) -> None:
        """Run the kernels, one part after the other."""
        scale, mask, wait, stepped = self.scale, self.mask, self.parts.wait, self.parts.stepped
        if self.fresh:
            self.counts = self._moves()
        for part, plan in enumerate(self.plans):
            wait(part)
            if plan.reads_tensors:
                plan.read_grads()
            for launch in plan.kernels if self.counts else ():
                kernel, device, dtype, _, centring = launch
                if centring:
                    launch.centre()
                kernel.step(
                    scale.to(device, dtype) if isinstance(scale, Tensor) else scale,
                    None if mask is None else mask.to(device),
                )
            if plan.meshes and self.counts:
                plan.step_shards(scale, mask)
            plan.release()
            if stepped is not None:
                stepped(part)

    def take_alone(self, param: Tensor, *, handed_in: bool) -> None:
        """Let one parameter take the step, and drop its gradient."""
        steps, first = self.steps, self.released is None
        released = self.released = self.released or Released(steps.records.indices(), handed_in)
        try:
            label = released.check(param, self.optimizer.param_groups)
            if (ranks := sharding.ranks_of(param)) is not None:
                ranks.check_same([f"{label} to step next"], GIVE_GRADIENTS)
            self.prepare(alone=param)
            if ranks is not None and steps.presence is not None:
                steps.presence.stepped_alone[ranks] = None
            fresh, self.fresh = self.fresh, False  # whether the step only creates state is known at its end
            self.run()
        except BaseException:
            if first:
                self.options.undo()
            raise
        released.add(param, self.plans[0], fresh=fresh, at_rest=self.at_rest)
        param.grad, steps.begun = None, self

    @property
    def at_rest(self) -> bool:
        """Whether all learning rates are 0."""
        return all(float(group["lr"]) == 0 for group in self.optimizer.param_groups)

    def _moves(self) -> bool:
        """Whether a gradient is not zero, in a step at lr 0 in which every parameter gets its state.

        If none is, torch.distributed.checkpoint takes the step, to make an optimizer create state. If it were counted,
        the first real step would be the second. The host waits for the gradients only in such steps.
        """
        released, moves = self.released, False
        for part in range(len(self.plans)):
            self.parts.wait(part)
        if released is not None:
            if len(released.fresh) < len(released.plans):
                return True
            moves = released.moves is not None and bool(released.moves)
        moves = moves or any(bool(sharding.local(p.grad).any()) for p in self.params if p.grad is not None)
        plans = self.plans if released is None else [*released.plans_once(), *self.plans]
        for reduce_group in dict.fromkeys(each for plan in plans for each in plan.meshes):
            moves = reduce_group.any(moves)  # all ranks take the step, or none
        if released is not None and not moves:
            released.reset(self.optimizer.state)
        return moves


_all_steps: WeakSet[Steps] = WeakSet()


def _after_fork() -> None:
    for steps in _all_steps:
        steps.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
