"""The base class of all optimizers: the step, for any algorithm, and the state that checkpoints hold.

A step resolves its options, finds or builds its plans (the tensors and their kernels), computes the factor of the
gradients and the apply mask, and runs the kernels.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from bighorn import arguments as checks
from bighorn.distributed import sharding
from bighorn.distributed.flat import FlatParams
from bighorn.names import listed
from bighorn.optim import flat_tensors, param_groups, plan_builder
from bighorn.optim.agreement import GIVE_GRADIENTS, Presence, check_agreement, described
from bighorn.optim.algorithm import Algorithm, Group, Variant
from bighorn.optim.checkpointing import (
    check_structure,
    converted,
    in_model_order,
    loaded_states,
    only_initialises,
    wrap,
)
from bighorn.optim.copied_defaults import remember, without_copied
from bighorn.optim.entries import Indices, check_backend, entries_of, parameters
from bighorn.optim.entry import Entry
from bighorn.optim.group_records import Gone, GroupRecord, adopted
from bighorn.optim.plan_cache import GuardInputs, PlanCache, StepParams, expected
from bighorn.optim.presets import ELSEWHERE, OFF_IS_OURS
from bighorn.optim.reports import Reports
from bighorn.optim.settings import Settings
from bighorn.optim.state import init_or_validate_state
from bighorn.optim.step_options import (
    SCHEDULED,
    OptionGuard,
    ScheduledOptions,
    ScheduleStep,
    attach_all,
    attach_schedules,
    refuse_unread,
    value_at,
)
from bighorn.optim.step_param import BegunStep, can_step, check_step_param
from bighorn.optim.step_plan import PartCall, StepPlan, scale_and_mask, square_sum_of

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")

_optimizers: WeakSet[KernelOptimizer] = WeakSet()


def _after_fork() -> None:
    """Let a forked process step: a thread of its parent may have been in a step, and in a kernel, with their locks."""
    for optimizer in _optimizers:
        optimizer._lock, optimizer._plans = threading.Lock(), PlanCache()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

NO_ARGUMENTS = ("self", "params", "unknown", "__class__")
"""The entries of a constructor's `locals()` that are not options."""


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Like `torch.compiler.disable`, which would import dynamo, inductor and triton with `import bighorn`: 1.7 s.

    The lazy form of torch imports them in the first call. It is not a public name, but `torch.optim` uses it.
    """
    wrapper = _disable_dynamo(function)
    # torch.optim's wrapper of step inherits the attribute. Without it, dynamo traces that wrapper and warns (torch
    # 2.13).
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper


class KernelOptimizer(Reports):
    """A `torch.optim.Optimizer` whose mathematics is in `bighorn.kernels`."""

    algorithm: ClassVar[Algorithm[Any]]
    """The algorithm that the optimizer computes."""

    takes_grad_scale: ClassVar[bool] = True
    """Whether `step` unscales, and skips an overflow, if `grad_scale` and `found_inf` are set, which LossScaler does.

    `_step_supports_amp_scaling` would have the same effect with torch's GradScaler, but if it is True, Lightning
    refuses to clip.
    """

    _settings: Settings
    _default_schedules: dict[str, Any]
    _records: list[GroupRecord]
    """A record for each group, also while a framework has left only some of them in `param_groups`."""
    _gone: Gone
    _groups: list[Group]
    """The groups of the records."""
    _scheduled: list[ScheduledOptions]
    """The scheduled options of each record."""
    _flat: list[FlatParams | None]
    """The parameters in the flat tensors of each record."""
    _ids: tuple[list[int], list[int]] = ([], [])
    """The `id`s of the groups and of their parameters at the last step."""
    _name_of: dict[int, str]
    """The names of these parameters, by their `id`."""
    _guard: OptionGuard
    _plans: PlanCache
    _lock: threading.Lock
    """Held during a step."""
    _owner: int | None = None
    """The thread in a step; without meaning while the lock is free."""
    _begun: BegunStep | None = None
    """The step that `step_param` has begun and `step` has not ended."""
    _prefix: str | None = None
    """The prefix of wrappers that groups remove from every parameter's name; None if parameters have no names."""
    _is_share: bool = False
    """Whether the optimizer holds one rank's share of a model, as `on_ranks` returns it."""
    _agreed: bool = False
    """Whether the ranks were found to agree; they are compared at the first step, and after groups were added."""
    _presence: Presence | None = None
    """The sharded parameters, whose gradients ranks compare; None if there are none."""
    _last: tuple[StepPlan, ...] = ()
    """The plans of the last step, one per part."""
    _skipped: Tensor | None = None
    """The number of steps that wrote nothing since the state was loaded; None if no step could have been skipped."""

    # torch.compile would lose attributes that are set before torch's constructor (2.13). Unlike torch.compiler.disable,
    # this imports the compiler in the first call, as torch's own add_param_group does.
    @_disable_dynamo
    def __init__(
        self, params: ParamsT, arguments: Mapping[str, Any], unknown: Mapping[str, Any], *, partial: bool = False
    ) -> None:
        """Create an optimizer from the arguments of its class. `partial`: it holds one rank's share of a model."""
        arguments = {name: value for name, value in arguments.items() if name not in NO_ARGUMENTS}
        given, unknown = len(unknown), without_copied(unknown, self.algorithm.group_only)
        checks.refuse_group_only(unknown, self.algorithm.group_only, type(self).__name__)
        if asked := checks.asked_for(unknown, OFF_IS_OURS):
            checks.refuse_unknown(asked, arguments, type(self).__name__, {**_options_of_others(), **ELSEWHERE})
        params = param_groups.in_lists(listed(params))
        self._settings = Settings.of(arguments, params)
        self._is_share, self._name_of, self._gone = partial, {}, {}
        self._forget()
        self._keep_records([])
        if not params:
            raise ValueError("params is empty: pass model.named_parameters() of a model that has some, each time anew")
        checked = checks.checked(self.algorithm.options, {**arguments, **self.algorithm.group_only})
        self._prefix = param_groups.prefix_of(params, self._settings)
        self._default_schedules = {name: checked[name] for name in SCHEDULED if callable(checked.get(name))}
        checked |= {name: value_at(name, schedule, 0) for name, schedule in self._default_schedules.items()}
        super().__init__(params, checked)
        if not partial:
            names = [name for group in self.param_groups for name in group.get("param_names", ())]
            names += [param.name for held in self._flat if held is not None for param in held.params]
            self._settings.check_exclusions(names)
            remember(self, copied=len(unknown) < given)

    def on_ranks(self, groups: list[dict[str, Any]], process_group: Any) -> Self:
        """Return a fresh optimizer with the same options for this rank's share of the parameters.

        Args:
            groups: This rank's share of each group.
            process_group: The ranks over which a global norm is summed, if an option needs one.

        Raises:
            ValueError: A group has flat tensors.
        """
        if any(self._flat):
            raise ValueError("optimizer holds flat tensors, whose state is on several ranks already: use it as it is")
        arguments = {**self.defaults, **self._default_schedules, **vars(self._settings), "names": None}
        arguments["grad_norm_group"] = process_group if self._settings.needs_all_grads else None
        part = type(self).__new__(type(self))
        mine = [self._as_given(group, own) for group, own in zip(groups, self._scheduled, strict=True)]
        KernelOptimizer.__init__(part, mine, arguments, {}, partial=True)
        return part

    def _as_given(self, group: dict[str, Any], scheduled: ScheduledOptions) -> dict[str, Any]:
        """Return a group with its schedules instead of their present values, and without those that are the default."""
        own = {name: option.schedule for name, option in scheduled.items()}
        default = [name for name in own if own[name] is self._default_schedules.get(name)]
        return {name: value for name, value in (group | own).items() if name not in default}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: `params`, and any option of the constructor that a group can have.

        Raises:
            TypeError: An unknown key, or a value of a wrong type.
            ValueError: A value out of range, an option of the whole optimizer, or a parameter that cannot be optimized
                here.
        """
        record = self._joined(param_group, len(self.param_groups))
        super().add_param_group(record.group)
        self._add_record(record)
        self._agreed = False
        self._forget_plans()

    def _joined(self, param_group: dict[str, Any], index: int) -> GroupRecord:
        """Return the record of a group that is to be added at this index, with every option, and names and tensors."""
        defaults = {**self.defaults, **self._default_schedules}
        param_group, layout = flat_tensors.split_layout(param_group)
        settings = self._settings if layout is None else self._settings.without_exclusions()
        recorded = set(map(id, self._groups))
        others = [group for group in self.param_groups if id(group) in recorded]
        group, tensors = param_groups.joining(
            param_group, index, others, defaults, self.algorithm, settings, self._prefix
        )
        flat = flat_tensors.joining(layout, group, tensors, index, self.algorithm)
        record = GroupRecord(group, flat=flat, given=tensors)
        attach_schedules(group, record.scheduled)
        if self._settings.backend != "auto":
            check_backend(group, index, tensors, self.algorithm, settings)
        return record

    # ---- the step -----------------------------------------------------------------------------------------

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient. `.grad` is only read.

        Args:
            closure: A function that computes the loss and its gradients again, and returns the loss. Default: None.

        Returns:
            The value that the closure returned.

        Raises:
            RuntimeError: A gradient is sparse, or a torch LRScheduler and a schedule both drive a group's lr.
            TypeError: `closure` is not a function, or a group holds a misspelt key or a value of a wrong type.
            ValueError: A gradient does not fit its parameter, an option in a group is out of range, or a schedule has
                ended. Parameters and state are unchanged.
        """
        loss = None
        try:
            if closure is not None:
                checks.closure(closure)
                with torch.enable_grad():
                    loss = closure()
            self._locked(self._take_step, waits=False)
        except BaseException:
            # GradScaler removes the attributes that it has set only after a step that returns.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return loss

    @eager
    @torch.no_grad()
    def step_in_parts(
        self,
        parts: list[list[Tensor]],
        wait: PartCall,
        stepped: PartCall | None = None,
        square_sum: Callable[[], Tensor] | None = None,
    ) -> None:
        """Take one step, part by part, while gradients of later parts have not arrived yet. No hooks run.

        Every error that does not depend on the values of gradients is raised before anything changes. With
        `max_grad_norm` or `skip_nonfinite`, only the sums of squares are computed part by part.

        Args:
            parts: All parameters that have a gradient, each in one part.
            wait: A function that is called with 0, 1, ..., more than once, and returns when the gradients of that part
                may be read.
            stepped: A function that is called with 0, 1, ... as soon as that part has taken the step. Default: None.
            square_sum: A function that waits for the sum of the squares of this rank's gradients, and returns it, for
                options that need it. Default: None, which computes it.

        Raises:
            RuntimeError: As for `step`.
            ValueError: As for `step`.
        """
        if any(self._flat):
            raise ValueError(f"no step can be taken in parts: {flat_tensors.WHOLE_STEP}")
        self._locked(partial(self._take_step, parts, wait, stepped, square_sum), waits=False)

    @eager
    @torch.no_grad()
    def step_param(self, param: Tensor, group: dict[str, Any] | None = None) -> None:
        """Step one parameter now and drop its gradient; a later `step()` steps the others and ends the step.

        The options are those at the first call in a step. `bighorn.release_gradients` calls this inside backward.

        Args:
            param: A parameter of this optimizer, with a gradient.
            group: Its group, in sd-scripts' protocol: nothing happens without a gradient, and `zero_grad()` or a
                second gradient ends the step, since that trainer calls no `step()`. Default: None.

        Raises:
            RuntimeError: As for `step`; or the parameter has taken this step already.
            ValueError: As for `step`; or an option needs every gradient before the first parameter is written.
        """
        # Autograd has a thread for each device.
        self._locked(partial(self._step_param, param, group), waits=True)

    def _step_param(self, param: Tensor, group: dict[str, Any] | None) -> None:
        if group is not None and not can_step(self, self._begun, param, group):
            return
        if (reason := self.whole_step_reason()) is not None:
            raise ValueError(f"no parameter can be stepped ahead of the others: {reason}")
        begun = self._begun
        if begun is None:
            self._present_params()
        indices = self._indices() if begun is None else begun.indices
        label = check_step_param(param, indices, begun, self.param_groups)
        if (ranks := sharding.ranks_of(param)) is not None:
            ranks.check_same([f"{label} to step next"], GIVE_GRADIENTS)
        schedule, [plan], fresh = self._prepare([param], None, None if begun is None else begun.schedule, indices)
        if ranks is not None and self._presence is not None:
            self._presence.stepped_alone[ranks] = None
        self._begun = begun = begun or BegunStep(schedule, indices, handed_in=group is not None)
        plan.read_grads()
        for launch in plan.kernels:
            launch.centre()
            launch.kernel.step()
        plan.step_shards(1.0, None)
        plan.release()
        begun.add(param, plan, fresh, self._at_rest())
        param.grad = None

    def step_parameter(self, parameter: Tensor, group: dict[str, Any], i: int | None = None) -> None:
        """Step one parameter now, as `step_param(parameter, group)` does.

        Args:
            parameter: A parameter of this optimizer, with a gradient or without.
            group: Its group.
            i: Its position in the group, which is not needed. Default: None.
        """
        del i
        self.step_param(parameter, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters. It ends a step whose parameters a trainer's hooks have handed in.

        Args:
            set_to_none: Whether gradients become None in place of zeros. Default: True.
        """
        if self._begun is not None and self._begun.handed_in:
            self._begun.end(self)
        super().zero_grad(set_to_none)

    def whole_step_reason(self) -> str | None:
        """The reason why every gradient is needed before the first parameter is written, or None."""
        if (option := self._settings.all_grads_option) is not None:
            return f"{option} looks at all gradients first; leave it out"
        return flat_tensors.WHOLE_STEP if any(self._flat) else None

    def _locked(self, step: Callable[[], None], *, waits: bool) -> None:
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

    def _take_step(
        self,
        parts: list[list[Tensor]] | None = None,
        wait: PartCall = lambda _: None,
        stepped: PartCall | None = None,
        known: Callable[[], Tensor] | None = None,
    ) -> None:
        """Take one step, of all parameters together if there are no parts."""
        begun, grad_scale, found_inf = self._begun, getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if begun is not None and found_inf is not None:
            raise RuntimeError(
                "a gradient scaler has scaled the gradients that parameters were stepped with inside backward, before "
                "it could unscale them: go back to a checkpoint, and train without it (bfloat16 needs none)"
            )
        settings, params = self._settings, self._present_params()
        if torch._C._current_graph_task_id() != -1:
            settings.refuse_in_backward()
        if begun is not None and begun.closed:
            params = []
        schedule, plans, fresh = self._prepare(params, parts, None if begun is None else begun.schedule)
        if begun is not None:
            fresh = fresh or bool(begun.fresh)
        try:
            scale: Tensor | float = 1.0
            mask = None
            if grad_scale is not None or found_inf is not None or settings.needs_all_grads:
                scale, mask = scale_and_mask(
                    settings,
                    grad_scale,
                    found_inf,
                    partial(square_sum_of, plans, wait, self.param_groups, settings, known),
                )
            for part in range(len(plans)) if fresh else ():
                wait(part)
            initialises = fresh and only_initialises(params, plans, begun, self.state)
            for part, plan in enumerate(plans):
                wait(part)
                plan.read_grads()
                for launch in plan.kernels if not initialises else ():
                    kernel, device, dtype, _, centring = launch
                    if centring:
                        launch.centre()
                    kernel.step(
                        scale.to(device, dtype) if isinstance(scale, Tensor) else scale,
                        None if mask is None else mask.to(device),
                    )
                if plan.meshes and not initialises:
                    plan.step_shards(scale, mask)
                plan.release()
                if stepped is not None:
                    stepped(part)
        except BaseException:
            if begun is None:
                schedule.undo()
            raise
        if not initialises:
            schedule.finish()
        if mask is not None:
            skipped = (~mask).long()
            self._skipped = skipped if self._skipped is None else self._skipped.to(skipped.device) + skipped
        earlier = [] if begun is None else begun.earlier_plans()
        if len(self.param_groups) < len(self._groups):  # the plans of the other groups' last steps stay
            stepped_now = {variant.group for plan in plans for variant in plan.variants()}
            earlier = [plan for plan in self._last if stepped_now.isdisjoint(v.group for v in plan.variants())]
        self._last = tuple([plan for plan in earlier + plans if plan.buckets]) or self._last
        self._begun = None

    # ---- the parts of a step ------------------------------------------------------------------------------

    def _present_params(self) -> list[Tensor]:
        """Return the parameters in `param_groups`, after what a program has changed there was adopted."""
        groups, ids = self.param_groups, self._ids
        if list(map(id, groups)) == ids[0]:
            params = self._params(groups)
            if list(map(id, params)) == ids[1]:
                return params
        records = adopted(groups, self._records, self._gone, self._put_there, self.algorithm)
        if list(map(id, records)) != list(map(id, self._records)):
            self._keep_records(records)
        return self._params(groups)

    def _put_there(self, group: Group, index: int) -> GroupRecord:
        """Return the record of a dict that a program has put into `param_groups`, as if it had been added."""
        with checks.about(f"param_groups[{index}]"):
            record = self._joined(group, index)
        group.update(record.group)
        record.group = group
        return record

    def _keep_records(self, records: list[GroupRecord]) -> None:
        """Set the records of all groups, and forget what depends on them."""
        if self._name_of:
            param_groups.follow_names([record.group for record in records if not record.flattened], self._name_of)
        self._records, self._groups, self._scheduled, self._flat = [], [], [], []
        self._ids, self._name_of = ([], []), {}
        for record in records:
            self._add_record(record)
        self._guard, self._agreed = OptionGuard(), False  # a new guard makes new plans

    def _add_record(self, record: GroupRecord) -> None:
        self._records.append(record)
        self._groups.append(record.group)
        self._scheduled.append(record.scheduled)
        self._flat.append(record.flat)
        ids_of_groups, ids_of_params = self._ids
        ids_of_groups.append(id(record.group))
        ids = list(map(id, record.group["params"]))
        ids_of_params += ids
        named = map(id, record.given) if record.flattened else ids
        self._name_of.update(zip(named, record.group.get("param_names", ()), strict=False))

    def _present_records(self) -> list[GroupRecord]:
        """Return the record of each group in `param_groups`; an empty one for a dict that has none yet."""
        record_of = {id(record.group): record for record in self._records}
        return [record_of.get(id(group)) or GroupRecord(group) for group in self.param_groups]

    def _some_groups(self) -> Sequence[int]:
        """Return the indices of the groups that DeepSpeed has left in `param_groups`, which are all of most."""
        if len(self.param_groups) == len(self._groups):
            return range(len(self._groups))
        index_of = {id(group): index for index, group in enumerate(self._groups)}
        present = [index_of[id(group)] for group in self.param_groups]
        count = sum(bool(group["params"]) for group in self._groups)
        if (option := self._settings.all_grads_option) is not None and len(present) < count:
            raise ValueError(
                f"{option} uses all gradients, and this step is of {len(present)} of {count} groups, as DeepSpeed's "
                "ZeRO steps them: leave it out, and set gradient_clipping in DeepSpeed's configuration, whose loss "
                "scaler skips overflows as well"
            )
        return present

    def _begin(self) -> ScheduleStep:
        """Resolve the options of a step, including values that were written into groups since the last one."""
        groups, scheduled = self._groups, self._scheduled
        if len(self.param_groups) < len(groups):
            scheduled = [scheduled[index] for index in self._some_groups()]
        attach_all(groups, self._scheduled, self.defaults, self.algorithm)
        schedule = ScheduleStep(self.param_groups, scheduled)
        try:
            if not self._agreed:
                refuse_unread(groups, self._scheduled, self.defaults)
            if not self._guard.refresh(groups, self.defaults, self.algorithm, self._settings):
                self._forget_plans()
            if not self._agreed:
                self._presence = None
                if any(self._flat) or sharding.any_distributed(self._params(groups)):
                    entries = list(self._entries(groups))
                    check_agreement(entries, groups, self.algorithm.options, self._settings)
                    self._presence = Presence(entries)
                self._agreed = True
        except BaseException:
            schedule.undo()
            raise
        return schedule

    def _prepare(
        self,
        params: list[Tensor],
        parts: list[list[Tensor]] | None,
        schedule: ScheduleStep | None,
        indices: Indices | None = None,
    ) -> tuple[ScheduleStep, list[StepPlan], bool]:
        """Return the options of a step, unless it has begun already, a plan for each of its parts, and `fresh`.

        `fresh` is whether the learning rates are 0 and a parameter gets its state now, as in a step that only creates
        it.


        Every error that does not depend on the values of gradients is raised here, and leaves everything unchanged.
        """
        begun = schedule is not None
        plans: list[StepPlan] = []
        built: list[tuple[StepParams, StepPlan, dict[Tensor, Any]]] = []
        schedule = schedule or self._begin()
        groups = self._groups
        try:
            if self._presence is not None and indices is None:  # all gradients are there
                self._presence.check(self.param_groups)
            if any(self._flat):
                flat_tensors.check_grads(groups, self._flat, self._some_groups())
            divided = StepParams.of(params, self.state).divided(parts)
            for mine in divided:
                plan = self._plans.find(mine, groups, self.state)
                if plan is None:
                    mine, plan, states = self._new_plan(mine, indices or self._indices())
                    built.append((mine, plan, states))
                elif plan.options_version != self._guard.version:
                    plan.set_options(self._options_of(plan.variants()), self._guard.version)
                    if not plan.filled and any(launch.kernel.reads_tensors for launch in plan.launches()):
                        inputs = GuardInputs.of(mine, groups, self.state)
                        plan.fill(inputs.params, inputs.states)
                plans.append(plan)
            for plan in plans:
                for launch in itertools.chain(plan.kernels, *plan.meshes.values()):
                    launch.kernel.prepare()
        except BaseException:
            if not begun:
                schedule.undo()
            raise
        fresh = (
            len(built) > 0
            and self._at_rest()
            and any(state and not self.state.get(param) for *_, states in built for param, state in states.items())
        )
        for mine, plan, states in built:
            self.state.update(states)
            parts_of_a_step = max(len(divided), len(indices or ()), len(groups) - len(self.param_groups) + 1)
            self._plans.keep(plan, mine, groups, self.state, parts=parts_of_a_step)
        return schedule, plans, fresh

    def _at_rest(self) -> bool:
        """Whether all learning rates are 0."""
        return all(float(group["lr"]) == 0 for group in self.param_groups)

    def _new_plan(self, mine: StepParams, indices: Indices) -> tuple[StepParams, StepPlan, dict[Tensor, Any]]:
        """Return a plan, its parameters, and their states.

        A parameter without a gradient may have been freed or replaced meanwhile. It must not prevent the step of the
        others, so the plan is built without it in that case.
        """
        try:
            return mine, *self._build(mine, indices)
        except (RuntimeError, ValueError):
            present = mine.with_grad()
            if len(present.params) == len(mine.params):
                raise
            return present, *self._build(present, indices)

    def _build(self, mine: StepParams, indices: Indices) -> tuple[StepPlan, dict[Tensor, Any]]:
        parameters = [(*indices[id(param)], param) for param in mine.params]
        entries = list(entries_of(parameters, self._groups, self._flat, self.algorithm, self._settings))
        options = self._options_of({entry.variant for entry in entries})
        grads, version, backend = expected(mine.params, mine.grads), self._guard.version, self._settings.backend
        plan, states = plan_builder.build(mine.params, grads, entries, options, version, self._init_state, backend)
        plan.bind([grad if grad is None else sharding.local(grad) for grad in mine.grads], mine.present)
        plan.note_written(mine.params, mine.present, states)
        return plan, dict(zip(mine.params, states, strict=True))

    def _options_of(self, variants: set[Variant]) -> dict[Variant, Any]:
        return {variant: self.algorithm.kernel_options(self._groups[variant.group], variant) for variant in variants}

    def _init_state(self, entry: Entry, dense: Tensor) -> dict[str, Any]:
        return init_or_validate_state(entry.param, dense, entry.spec, self.state.get(entry.param, {}), entry.label)

    @staticmethod
    def _params(groups: list[Group]) -> list[Tensor]:
        """Return every parameter, in the order in which a step visits them."""
        return list(itertools.chain.from_iterable([group["params"] for group in groups]))

    def _indices(self) -> Indices:
        return {id(param): (index, position) for index, position, param in parameters(self._groups)}

    def _entries(self, groups: list[Group]) -> Iterator[Entry]:
        flat = self._flat if groups is self._groups else [record.flat for record in self._present_records()]
        return entries_of(parameters(groups), groups, flat, self.algorithm, self._settings)

    def _forget(self) -> None:
        self._guard, self._begun, self._lock = OptionGuard(), None, threading.Lock()
        self._forget_plans()
        _optimizers.add(self)

    def _forget_plans(self) -> None:
        self._last, self._plans = (), PlanCache()

    def agreement(self, params: set[Tensor]) -> list[str]:
        """Return lines about the options and some parameters, which are the same on ranks that step alike.

        Args:
            params: The parameters that all ranks hold.
        """
        entries = (entry for entry in self._entries(self._groups) if entry.param in params)
        return described(entries, self._groups, self.algorithm.options, self._settings)

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # The groups hold the names; a module here would be copied with the optimizer.
        own = {name: self.__dict__[name] for name in ("_default_schedules", "_prefix")}
        each = [(record.scheduled, record.flat) for record in self._present_records()]
        return {**super().__getstate__(), **own, "_each": each, "_settings": replace(self._settings, names=None)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`. Each state tensor keeps the dtype that is declared for it.

        Checkpoints of torch's Adam and AdamW, timm's Lamb, apex's FusedLAMB and came-pytorch's CAME are converted, with
        a `ConvertedStateWarning` that describes how.

        The parameters keep the model's names. If the checkpoint has the same names, each parameter gets
        the state of its name. Otherwise state is loaded by position, as torch does, with a warning if names differ.

        Args:
            state_dict: A dict with `state` and `param_groups`; options in its groups override the present ones.

        Raises:
            RuntimeError: A step is running, in another thread or around this call.
            ValueError: It is not an optimizer's state, belongs to another model or algorithm, is of a newer format, or
                holds an option out of range. The optimizer is unchanged.
        """
        if self._lock.locked():
            raise RuntimeError("load_state_dict() was called while a step is running: call it before or after the step")
        self._present_params()
        check_structure(state_dict)
        max_grad_norm = self._settings.max_grad_norm
        state_dict = converted(state_dict, self.algorithm.name, self.param_groups, max_grad_norm)
        state_dict = in_model_order(state_dict, self.param_groups)
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: wrap(loaded, self.param_groups))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check and set a state, and drop the plans; load_state_dict, deepcopy and unpickling call this."""
        mine, copied = self.__dict__, state.pop("_each", None)  # empty while unpickling; None in load_state_dict
        old = self._present_records() if copied is None else [GroupRecord({}, *each) for each in copied]
        defaults = state["defaults"] if "defaults" in state else self.defaults  # noqa: SIM401 - may not exist yet
        current = mine.get("param_groups", state["param_groups"])
        groups = [
            param_groups.loaded(i, group, {**defaults, **current[i]}, self.algorithm, mine.get("_settings"))
            for i, group in enumerate(state["param_groups"])
        ]
        states = loaded_states(groups, [record.flat for record in old], state["state"], self.algorithm)
        super().__setstate__({**state, "state": states, "param_groups": groups})
        self.defaults.pop("differentiable", None)  # torch adds this key here, and would add it to later groups
        self._skipped, self._name_of, self._gone = None, {}, {}
        self._forget()
        for record, group in zip(old, groups, strict=True):
            record.group, record.given = group, record.given or [*group["params"]]
            for name, option in record.scheduled.items():
                option.written = option.left = group[name]
        self._keep_records(old if copied is not None else self._records)


def _options_of_others() -> dict[str, tuple[str, ...]]:
    """The options of all optimizers here: the classes that have each, and the remedy for one of another class."""
    classes: dict[str, list[str]] = {}
    for kind in KernelOptimizer.__subclasses__():
        for name in inspect.signature(kind).parameters:
            classes.setdefault(name, []).append(kind.__name__)
    return {
        name: (" and ".join(kinds), f"leave it out, or use {' or '.join(kinds)}") for name, kinds in classes.items()
    }
