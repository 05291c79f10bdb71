"""The step template: what every optimizer here shares, whatever its mathematics.

A step settles its options, finds or makes its plans (which tensors, which kernels), settles what gradients are
multiplied with and whether anything is written at all, and hands over to the kernels.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bighorn import sharding
from bighorn.arguments import about
from bighorn.optim import checks, explain, foreign, hooks, order, param_groups
from bighorn.optim.agreement import check_agreement
from bighorn.optim.ahead import Ahead
from bighorn.optim.algorithm import Algorithm, Variant
from bighorn.optim.checkpoints import check_structure, loaded_states, only_initialises
from bighorn.optim.commit import scale_and_commit, square_sum_of
from bighorn.optim.eager import eager
from bighorn.optim.parts import Part, Places, check_backend, parameters, part_of
from bighorn.optim.plan import Plan, build
from bighorn.optim.plan_cache import Looks, PlanCache, Ready
from bighorn.optim.scheduling import SCHEDULED, Drive, Drivers, take_over, value_at
from bighorn.optim.settings import Settings
from bighorn.state import complete, hold

if TYPE_CHECKING:
    from typing_extensions import Self

NO_OPTIONS = ("self", "params", "unknown", "__class__")
"""What a constructor's `locals()` hold beside options."""


class KernelOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose mathematics lie in `bighorn.kernels`."""

    algorithm: ClassVar[Algorithm[Any]]
    """What it computes."""

    takes_grad_scale: ClassVar[bool] = True
    """`step` unscales, and skips an overflow, if it finds `grad_scale` and `found_inf`. LossScaler sees to it.

    `_step_supports_amp_scaling` would tell torch's GradScaler the same, but where it is True Lightning refuses to clip.
    """

    _settings: Settings
    _default_schedules: dict[str, Any]
    _drivers: list[Drivers]
    """What drives options of each group."""
    _order: order.Order
    _watch: param_groups.Watch
    _plans: PlanCache
    _prefix: str | None = None
    """What wrappers put in front of every parameter's name, which groups hold without it; None without names."""
    _agreed: bool = False
    """Other ranks have the same parameters and options: asked at the first step, and after groups were added."""
    _ahead: Ahead | None = None
    """The step that `step_ahead` has begun and `step` has not ended."""
    _last: tuple[Plan, ...] = ()
    """The plans of the last step, one for each part of it."""
    _skipped: Tensor | None = None
    """How many steps wrote nothing; None if none could have been skipped."""

    # torch.compile would lose attributes that are set before torch's constructor (2.13). Unlike torch.compiler.disable
    # this imports the compiler when it is called first, as torch's own add_param_group does.
    @_disable_dynamo
    def __init__(
        self, params: ParamsT, arguments: Mapping[str, Any], unknown: Mapping[str, Any], *, partial: bool = False
    ) -> None:
        """An optimizer from the arguments of its class; `partial`: the parameters are one rank's part of a model's."""
        arguments = {name: value for name, value in arguments.items() if name not in NO_OPTIONS}
        checks.refuse_group_only(unknown, self.algorithm.group_only, type(self).__name__)
        checks.refuse_unknown(unknown, arguments, type(self).__name__)
        self._settings = Settings.of(arguments)
        self._drivers, self._order = [], []
        self._forget()
        params, ordered = order.split(params)
        params = param_groups.in_lists(params)
        if not params:
            raise ValueError("params is empty: pass model.named_parameters() of a model that has some, each time anew")
        checked = self.algorithm.checked({**arguments, **self.algorithm.group_only})
        self._prefix = param_groups.prefix_of(params, self._settings)
        self._default_schedules = {name: checked[name] for name in SCHEDULED if callable(checked.get(name))}
        checked |= {name: value_at(name, schedule, 0) for name, schedule in self._default_schedules.items()}
        super().__init__(params, checked)
        self._order = order.places(ordered, self.param_groups)
        if not partial:
            self._settings.check_exclusions(
                [name for group in self.param_groups for name in group.get("param_names", ())]
            )

    def on_ranks(self, groups: list[dict[str, Any]], process_group: Any) -> Self:
        """A fresh optimizer with the same options for this rank's part of the parameters.

        Args:
            groups: This rank's part of each group.
            process_group: The ranks whose gradients count in a global norm, if one is asked for.
        """
        settings = vars(self._settings)
        used = settings["max_grad_norm"] is not None or settings["skip_nonfinite"]
        arguments = {**self.defaults, **self._default_schedules, **settings, "names": None}
        arguments["process_group"] = process_group if used else None
        part = type(self).__new__(type(self))
        mine = [self._as_given(group, drivers) for group, drivers in zip(groups, self._drivers, strict=True)]
        KernelOptimizer.__init__(part, mine, arguments, {}, partial=True)
        return part

    def _as_given(self, group: dict[str, Any], drivers: Drivers) -> dict[str, Any]:
        """A group with its schedules instead of their present values; the default ones will be found again."""
        own = {name: driven.schedule for name, driven in drivers.items()}
        default = [name for name in own if own[name] is self._default_schedules.get(name)]
        return {name: value for name, value in (group | own).items() if name not in default}

    def _patch_step_function(self) -> None:
        step = type(self).step
        super()._patch_step_function()
        if type(self).step is not step:
            type(self).step = hooks.where_there_are_some(step, type(self).step)  # type: ignore[method-assign]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: `params`, and any option of the constructor that a group can have.

        Raises:
            TypeError: An unknown key, or a value of a wrong type.
            ValueError: A value out of range, an option of the whole optimizer, or a parameter that cannot be optimized
                here.
        """
        defaults = {**self.defaults, **self._default_schedules}
        group, tensors = param_groups.joining(
            param_group, self.param_groups, defaults, self.algorithm, self._settings, self._prefix
        )
        drivers: Drivers = {}
        take_over(group, drivers)
        if self._settings.backend != "auto":
            check_backend(group, tensors, self.algorithm, self._settings.backend)
        super().add_param_group(group)
        self._agreed = False
        self._drivers.append(drivers)
        if self._order:
            self._order += [(len(self.param_groups) - 1, position) for position in range(len(tensors))]
        self._forget_plans()

    # ---- the step -----------------------------------------------------------------------------------------

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient. `.grad` is only read.

        Args:
            closure: Computes the loss anew, with gradients, and returns it. Default: None.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: A gradient is sparse, or a torch LRScheduler and a schedule both drive a group's lr.
            TypeError: `closure` is no function, or a group holds a misspelt key or a value of a wrong type.
            ValueError: A gradient does not fit its parameter, an option in a group is out of range, or a schedule is
                over; parameters and state are as before.
        """
        loss = None
        try:
            if closure is not None:
                checks.closure(closure)
                with torch.enable_grad():
                    loss = closure()
            self._step(None, lambda _: None)
        except BaseException:
            # GradScaler removes what it handed over only after a step that returns.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return loss

    @eager
    @torch.no_grad()
    def step_in_parts(self, parts: list[list[Tensor]], wait: Callable[[int], None]) -> None:
        """Take one step, part by part, while gradients of later parts are not there yet. No hooks run.

        Whatever can be wrong without a look at gradients' values is found before anything changes. With
        `max_grad_norm` or `skip_nonfinite` only the sums of squares are taken part by part, since every gradient is
        needed before the first parameter can be written.

        Args:
            parts: All parameters that have a gradient, each in one part.
            wait: Called with 0, 1, ..., more than once; returns when the gradients of that part may be read.

        Raises:
            RuntimeError: As `step`.
            ValueError: As `step`.
        """
        self._step(parts, wait)

    @eager
    @torch.no_grad()
    def step_ahead(self, param: Tensor) -> None:
        """Step one parameter now and drop its gradient; a later `step()` takes the others and ends the step.

        Options are those at the first call in a step. `bighorn.parallel.release_gradients` calls this inside backward.

        Args:
            param: One of this optimizer's, with a gradient.

        Raises:
            RuntimeError: As `step`; or the parameter has taken this step already.
            ValueError: As `step`; or an option needs every gradient before the first parameter is written.
        """
        if (reason := self.why_whole()) is not None:
            raise ValueError(f"no parameter can be stepped ahead of the others: {reason}")
        ahead = self._ahead or Ahead(self._begin(), self._places())
        try:
            ahead.check(param, lambda place: self._part(*place, param).label)
            [plan] = self._plans_of([Ready.of([param])], False, ahead.places)
        except BaseException:
            if self._ahead is None:
                ahead.drive.undo()
            raise
        self._ahead = ahead
        plan.step(1.0, None)
        plan.finish()
        ahead.plans[param] = plan
        param.grad = None
        # What autograd has saved of the parameter is not what it was; compiled kernels do not say so by themselves.
        torch.autograd.graph.increment_version(param)

    def why_whole(self) -> str | None:
        """Why every gradient must be there before the first parameter is written, or None."""
        for name in ("max_grad_norm", "skip_nonfinite"):
            if getattr(self._settings, name):
                return f"{name}={getattr(self._settings, name)!r} looks at all gradients first; leave it out"
        return None

    def _step(self, parts: list[list[Tensor]] | None, wait: Callable[[int], None]) -> None:
        """One step; of all parameters together where there are no parts."""
        ahead, grad_scale, found_inf = self._ahead, getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if ahead is not None and found_inf is not None:
            raise RuntimeError(
                "a gradient scaler has scaled the gradients that parameters were stepped with inside backward, before "
                "it could unscale them: go back to a checkpoint, and train without it (bfloat16 needs none)"
            )
        drive = ahead.drive if ahead is not None else self._begin()
        try:
            fresh = not self.state
            ready = Ready.of(self.in_order())
            plans = self._plans_of([ready] if parts is None else ready.divided(parts), parts is None)
            scale, commit = scale_and_commit(
                self._settings,
                grad_scale,
                found_inf,
                lambda: square_sum_of(plans, wait, self.param_groups, self._settings),
            )
            for part in range(len(plans)) if fresh else ():
                wait(part)
            initialises = fresh and bool(ready.params) and only_initialises(self.param_groups, self.in_order(), plans)
            for part, plan in enumerate(plans):
                wait(part)
                if not initialises:
                    plan.step(scale, commit)
                plan.finish()
        except BaseException:
            if ahead is None:
                drive.undo()
            raise
        if not initialises:
            drive.finish()
        if commit is not None:
            skipped = (~commit).long()
            self._skipped = skipped if self._skipped is None else self._skipped + skipped
        earlier = list(ahead.plans.values()) if ahead is not None else []
        self._last = tuple([plan for plan in earlier + plans if plan.slots]) or self._last
        self._ahead = None

    # ---- what a step is made of ---------------------------------------------------------------------------

    def _begin(self) -> Drive:
        """Settle the options of a step, whatever was written into groups since the last one."""
        self._take_over_schedules()
        drive = Drive(self.param_groups, self._drivers)
        try:
            self._refresh_options()
            if not self._agreed:
                if sharding.any_distributed(self.in_order()):
                    check_agreement(self._parts(), self.param_groups, self.algorithm.options, self._settings)
                self._agreed = True
        except BaseException:
            drive.undo()
            raise
        return drive

    def _take_over_schedules(self) -> None:
        if len(self.param_groups) != len(self._drivers):
            raise ValueError(
                f"param_groups has {len(self.param_groups)} groups, where {len(self._drivers)} were added: add groups "
                "with add_param_group(), and make a new optimizer to do without some"
            )
        for index, (group, drivers) in enumerate(zip(self.param_groups, self._drivers, strict=True)):
            values = [group.setdefault(name, self.defaults.get(name)) for name in SCHEDULED]
            if not all(isinstance(value, (float, int, Tensor)) for value in values):
                with about(f"param_groups[{index}]"):
                    group.update(self.algorithm.checked({name: group[name] for name in SCHEDULED}))
                    take_over(group, drivers)

    def _refresh_options(self) -> None:
        if not self._watch.refresh(self.param_groups, self.defaults, self.algorithm, self._settings):
            self._forget_plans()

    def _plans_of(self, divided: list[Ready], all_of_them: bool, places: Places | None = None) -> list[Plan]:
        """A plan for each of these sets of parameters, fed with this step's gradients: a cached one if nothing moved.

        Nothing changes before every plan is made.
        """
        groups, found = self.param_groups, []
        for ready in divided:
            looks = Looks.of(ready, groups, self.state, all_of_them=all_of_them)
            plan = self._plans.find(ready, looks)
            if plan is not None:
                plan.feed(looks.grads, self._options_of({slot.variant for slot in plan.slots}))
            found.append((plan, {}) if plan is not None else self._new_plan(ready, places or self._places()))
        for ready, (plan, states) in zip(divided, found, strict=True):
            self.state.update(states)
            if states:
                looks = Looks.of(ready, groups, self.state, all_of_them=all_of_them)
                self._plans.keep(plan, ready, looks, parts=max(len(divided), len(places or ())))
        plans = [plan for plan, _ in found]
        for plan in plans:
            plan.prepare()
        return plans

    def _new_plan(self, ready: Ready, places: Places) -> tuple[Plan, dict[Tensor, Any]]:
        """A plan, and the states that belong to it."""
        parts = [self._part(*places[id(param)], param) for param in ready.params]
        options = self._options_of({part.variant for part in parts})
        plan, states = build(parts, ready.grads, options, self._complete, self._settings.backend)
        return plan, {part.param: state for part, state in zip(parts, states, strict=True)}

    def _options_of(self, variants: set[Variant]) -> dict[Variant, Any]:
        return {
            variant: self.algorithm.kernel_options(self.param_groups[variant.group], variant) for variant in variants
        }

    def _complete(self, part: Part, dense: Tensor) -> tuple[dict[str, Any], list[str]]:
        spec = self.algorithm.state_spec(self.param_groups[part.variant.group], part.param)
        return complete(part.param, dense, spec, self.state.get(part.param, {}), part.label), list(spec)

    def in_order(self) -> list[Tensor]:
        """Every parameter, in the order in which a step visits them: that of `order_params`, if given."""
        if self._order:
            return [param for _, _, param in parameters(self.param_groups, self._order)]
        return list(itertools.chain.from_iterable([group["params"] for group in self.param_groups]))

    def _places(self) -> Places:
        return {id(param): (index, position) for index, position, param in parameters(self.param_groups, self._order)}

    def _part(self, index: int, position: int, param: Tensor) -> Part:
        return part_of(param, self.param_groups[index], (index, position), self.algorithm, self._settings)

    def _parts(self) -> Iterator[Part]:
        return itertools.starmap(self._part, parameters(self.param_groups, self._order))

    def _forget(self) -> None:
        self._watch, self._ahead = param_groups.Watch(), None
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._last, self._plans = (), PlanCache()

    # ---- what it says of itself -----------------------------------------------------------------------------

    def _figures(self) -> tuple[tuple[str, ...], Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Names, three figures and the learning rate for each, and how many steps were skipped: telemetry's fields."""
        skipped = torch.zeros((), dtype=torch.int64, device="cpu") if self._skipped is None else self._skipped.clone()
        return (*explain.figures(self._last), skipped)

    @classmethod
    def state_bytes(cls, params: nn.Module | ParamsT, **options: Any) -> dict[str, int]:
        """How many bytes of state each parameter will have, from shapes alone: nothing is allocated.

        Args:
            params: A module, or parameters as the constructor takes them; they may lie on the meta device.
            **options: Of the constructor; a learning rate is not needed.

        Returns:
            Bytes by the parameter's name, or by its place in `param_groups`, without frozen ones, which get no state;
            their sum is what the first step allocates for good.

        Raises:
            TypeError: As the constructor.
            ValueError: As the constructor.

        Example:
            >>> import torch
            >>> from bighorn import Came, Lamb
            >>> model = torch.nn.Linear(1000, 500, device="meta")
            >>> Lamb.state_bytes(model)
            {'weight': 4000004, 'bias': 4004}
            >>> Came.state_bytes(model, state_dtype="int8")
            {'weight': 520004, 'bias': 4004}
        """
        if isinstance(params, nn.Module):
            params = params.named_parameters()
        if not options.get("relative_step"):
            for name in {"lr", "learning_rate"} & inspect.signature(cls).parameters.keys():
                options.setdefault(name, 0.0)
        optimizer = cls(params=params, **options)
        return explain.bytes_of_state(optimizer._parts(), optimizer.param_groups, cls.algorithm)

    def explain(self) -> str:
        """Which backend serves which tensors, and why: one line for each kind of tensor.

        Raises:
            ValueError: As `step` would, where the backend that is asked for does not serve a tensor.
        """
        self._take_over_schedules()
        self._refresh_options()
        return explain.explained(self._parts(), self.param_groups, self.algorithm, self._settings.backend)

    # ---- state in and out -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Names are in the groups by now; a module here would be copied with the optimizer.
        own = {name: self.__dict__[name] for name in ("_drivers", "_default_schedules", "_order", "_prefix")}
        return {**super().__getstate__(), **own, "_settings": replace(self._settings, names=None)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave. Each state tensor keeps the dtype that is declared for it.

        Checkpoints of torch's Adam and AdamW, timm's Lamb, apex's FusedLAMB and came-pytorch's CAME are converted, with
        a `ConvertedStateWarning` that says how.

        Args:
            state_dict: `state` and `param_groups`; options in its groups win over the ones at hand.

        Raises:
            ValueError: It is no optimizer's state, belongs to another model or algorithm, is of a newer format, or
                holds an option out of range; the optimizer is as before.
        """
        check_structure(state_dict)
        max_grad_norm = self._settings.max_grad_norm
        state_dict = foreign.converted(state_dict, self.algorithm.name, self.param_groups, max_grad_norm)
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: hold(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reached from load_state_dict, deepcopy and unpickling: check everything, take it, forget the plans."""
        mine = self.__dict__  # nothing yet while unpickling
        defaults = state["defaults"] if "defaults" in state else self.defaults  # noqa: SIM401 - may not be there yet
        current = mine.get("param_groups", state["param_groups"])
        prefix = param_groups.loaded_prefix(state["param_groups"], current)
        groups = [
            param_groups.loaded(i, group, {**defaults, **current[i]}, self.algorithm, mine.get("_settings"), prefix)
            for i, group in enumerate(state["param_groups"])
        ]
        states = loaded_states(groups, state["state"], self.algorithm)
        super().__setstate__({**state, "state": states, "param_groups": groups})
        self.defaults.pop("differentiable", None)  # torch adds it here, and would add it to later groups
        for group, drivers in zip(self.param_groups, self._drivers, strict=True):
            for name, driven in drivers.items():
                driven.written = driven.left = group[name]
        self._forget()
