"""The step template: what every optimizer here shares, whatever its mathematics.

A step validates, finds or makes its plan (which tensors, which kernels), settles what gradients are multiplied with
and whether anything is written at all, and hands over to the kernels.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bighorn import kernels, sharding
from bighorn.kernels.bucket import Options
from bighorn.names import excludes, named
from bighorn.optim import checks, foreign, order
from bighorn.optim.checks import Check
from bighorn.optim.fingerprint import Fingerprint
from bighorn.optim.plan import Part, Plan, Variant, build, row_shard
from bighorn.optim.scheduling import COUNT, SCHEDULED, Drive, Drivers, take_over, value_at
from bighorn.optim.settings import Settings
from bighorn.schedules import check_count
from bighorn.state import STEP_BYTES, Spec, complete, hold, local_view, release, weight_spec, whole_view, why_unfit

if TYPE_CHECKING:
    from typing_extensions import Self

NO_OPTIONS = ("self", "params", "unknown", "__class__")
"""What a constructor's `locals()` hold beside options."""

LABELS = ("params", "param_names", "name")
"""Keys of a group that are no options: torch's own, and the one by which people label a group."""

SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "lr_scale")
"""Keys that schedulers keep in a group: torch's, and timm's `lr_scale`."""

OURS = (COUNT, foreign.VERSION)
"""Keys that we keep in a group, since every way of saving keeps groups."""

MOST_PLANS = 8
"""How many sets of parameters with gradients are remembered, where these alternate (GANs, experts)."""

NUMBERS = ("lr", "betas", "eps", "weight_decay")
"""Options that may change between steps without a new plan."""


Places = dict[int, tuple[int, int]]
"""By a parameter's id: its group and its position there."""


@dataclass
class Ahead:
    """A step that some parameters have taken before the others."""

    drive: Drive
    places: Places
    plans: dict[Tensor, Plan] = field(default_factory=dict)
    """Those of the parameters that have taken it."""

    def check(self, param: Tensor, name: Callable[[tuple[int, int]], str]) -> None:
        """Refuse what cannot take this step."""
        if id(param) not in self.places:
            raise ValueError(f"a tensor of shape {tuple(param.shape)} is no parameter of this optimizer")
        if param in self.plans:
            raise RuntimeError(
                f"{name(self.places[id(param)])} has taken this step already, and now has another gradient: call "
                "optimizer.step() after each backward(). Gradients of several of them, or of reentrant checkpoints "
                "that share the parameter, cannot be added up where each is stepped as soon as it is there"
            )


class KernelOptimizer(Optimizer, Generic[Options]):
    """A `torch.optim.Optimizer` whose mathematics lie in `bighorn.kernels`."""

    ALGORITHM: ClassVar[str]
    """Its name, as in its options and in checkpoints of others."""

    OPTIONS: ClassVar[dict[str, Check]]
    """Every option that a group can have, and what it may be."""

    GROUP_ONLY: ClassVar[dict[str, Any]]
    """Those of them that are no argument of the constructor, and what they are where a group does not say."""

    takes_grad_scale: ClassVar[bool] = True
    """`step` unscales, and skips an overflow, if it finds `grad_scale` and `found_inf`. LossScaler sees to it.

    `_step_supports_amp_scaling` would tell torch's GradScaler the same, but where it is True Lightning refuses to clip.
    """

    PASSED_ON: ClassVar[tuple[str, ...]]
    """Those of them that kernels are told as they stand in the group."""

    _settings: Settings
    _last: tuple[Plan, ...] = ()
    """The plans of the last step, one for each part of it."""
    _plans: dict[tuple[int, ...], Plan]
    _ahead: Ahead | None = None
    """The step that `step_ahead` has begun and `step` has not ended."""
    _skipped: Tensor | None = None
    _resolved: dict[int, tuple[object, ...]]
    _drivers: list[Drivers]
    _order: order.Order

    @abstractmethod
    def _kernel_options(self, group: dict[str, Any], variant: Variant) -> Options:
        """What the kernels are told, for one variant of a group."""

    def _shared_options(self, group: dict[str, Any], variant: Variant) -> dict[str, Any]:
        """What kernels of every algorithm are told."""
        lr = group["lr"]
        return {
            # Where the host has the value anyway it is a number; elsewhere a tensor, so that nobody waits for it.
            "lr": float(lr) if not isinstance(lr, Tensor) or lr.device.type == "cpu" else lr.reshape(()),
            "weight_decay": group["weight_decay"] if variant.decays else 0.0,
            "centre": variant.centres,
            **{name: group[name] for name in self.PASSED_ON},
        }

    @abstractmethod
    def _moments(self, group: dict[str, Any], param: Tensor) -> Spec:
        """The state tensors of the algorithm for a parameter (a real one), besides `step`."""

    def _state_spec(self, group: dict[str, Any], param: Tensor) -> Spec:
        """The state tensors of a parameter, besides `step`."""
        whole = whole_view(param)
        return {**self._moments(group, whole), **weight_spec(whole, group["weight_rounding"])}

    def _why_unfit(self, group: dict[str, Any], param: Tensor) -> str | None:
        """Why a parameter cannot be optimized with a group's options, with the remedy, or None."""
        return why_unfit(param, group["state_dtype"], group["weight_rounding"])

    def _refuse_unfit(self, group: dict[str, Any], param: Tensor, what: str) -> None:
        reason = self._why_unfit(group, param)
        if reason is not None:
            raise ValueError(f"{what} cannot be optimized as asked for: {reason}")

    @abstractmethod
    def _shape_of(self, group: dict[str, Any], param: Tensor) -> tuple[bool, int]:
        """Whether a parameter (a real one) is factored, and how many leading dims must be the outermost in memory."""

    def __init__(self, params: ParamsT, arguments: Mapping[str, Any], unknown: Mapping[str, Any]) -> None:
        arguments = {name: value for name, value in arguments.items() if name not in NO_OPTIONS}
        checks.refuse_unknown(unknown, arguments, type(self).__name__)
        self._settings = Settings.of(arguments)
        self._resolved, self._plans, self._drivers, self._order = {}, {}, [], []
        params, ordered = order.split(params)
        defaults = {name: arguments[name] for name in self.OPTIONS if name in arguments} | self.GROUP_ONLY
        checked = self._checked(defaults)
        self._default_schedules = {name: checked[name] for name in SCHEDULED if callable(checked[name])}
        checked |= {name: value_at(name, schedule, 0) for name, schedule in self._default_schedules.items()}
        super().__init__(params, checked)
        self._order = order.places(ordered, self.param_groups)

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
        KernelOptimizer.__init__(part, mine, arguments, {})
        return part

    def _as_given(self, group: dict[str, Any], drivers: Drivers) -> dict[str, Any]:
        """A group with its schedules instead of their present values; the default ones will be found again."""
        own = {name: driven.schedule for name, driven in drivers.items()}
        default = [name for name in own if own[name] is self._default_schedules.get(name)]
        return {name: value for name, value in (group | own).items() if name not in default}

    # ---- parameters and options ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: `params`, and any option of the constructor that a group can have.

        Raises:
            TypeError: An unknown key, or a value of a wrong type.
            ValueError: A value out of range, or a parameter that cannot be optimized here.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, not {type(param_group).__name__}")
        if "order_params" in param_group:
            raise ValueError("order_params belongs among the groups that the constructor is given")
        if "params" not in param_group:
            raise ValueError("a parameter group must have the key 'params'")
        group = self._settings.without_own(param_group)
        checks.refuse_unknown(group, [*LABELS, *SCHEDULERS, *OURS, *self.OPTIONS], "a parameter group")
        group.update(self._checked(group))
        group["params"] = named(group["params"], self._settings.names)
        if "param_names" not in group and not all(isinstance(param, tuple) for param in group["params"]):
            self._settings.refuse_nameless()
        stacked = group.get("stacked", self.defaults["stacked"])
        tensors = []
        for param in group["params"]:
            name, tensor = param if isinstance(param, tuple) else (None, param)
            checks.parameter(name, tensor, stacked=stacked)
            self._settings.refuse_to_add_up_twice(tensor)
            tensors.append(tensor)
        if len({id(tensor) for tensor in tensors}) < len(tensors):
            raise ValueError("params holds the same parameter twice; pass each one once (tied weights count once)")
        if len(group.get("param_names", tensors)) != len(tensors):
            raise ValueError(f"param_names has {len(group['param_names'])} names for {len(tensors)} parameters")
        lr = group.get("lr", self.defaults["lr"])
        if isinstance(lr, Tensor) and any(other["lr"] is lr for other in self.param_groups):
            group["lr"] = lr.clone()  # schedulers fill it in place, each group with its own value
        complete = {
            **self.defaults,
            **self._default_schedules,
            COUNT: max((other[COUNT] for other in self.param_groups), default=0),
            **group,
            foreign.VERSION: foreign.FORMAT,
        }
        for position, tensor in enumerate(tensors):
            self._refuse_unfit(complete, tensor, _label(len(self.param_groups), position))
        drivers: Drivers = {}
        take_over(complete, drivers)
        if self._settings.backend != "auto":
            self._check_backend(complete, tensors)
        super().add_param_group(complete)
        self._drivers.append(drivers)
        if self._order:
            self._order += [(len(self.param_groups) - 1, position) for position in range(len(tensors))]
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._last, self._plans = (), {}

    def _check_backend(self, group: dict[str, Any], params: Iterable[Tensor]) -> None:
        for param in params:
            whole = whole_view(param)
            variant = Variant(
                len(self.param_groups),
                decays=True,
                adapts=True,
                centres=False,
                factored=self._shape_of(group, whole)[0],
                blocks=self._in_blocks(group, whole),
            )
            view, options = local_view(param), self._kernel_options(group, variant)
            kernels.pick(self._settings.backend, view, options, row_shard(param, group["stacked"]))

    def _in_blocks(self, group: dict[str, Any], view: Tensor) -> bool:
        return "exp_avg_scale" in self._moments(group, view)

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: self.OPTIONS[name](name, value) for name, value in options.items() if name in self.OPTIONS}

    def _take_over_schedules(self) -> None:
        """Find the schedules that were written into groups since the last step."""
        for group, drivers in zip(self.param_groups, self._drivers, strict=True):
            if any(not isinstance(group[name], (float, int, Tensor)) for name in SCHEDULED):
                group.update(self._checked({name: group[name] for name in SCHEDULED}))
                take_over(group, drivers)

    def _refresh_options(self) -> None:
        """Validate what was written into groups since the last step; drop the plan if it cannot hold any more."""
        fresh: dict[int, tuple[dict[str, Any], tuple[object, ...]]] = {}
        for index, group in enumerate(self.param_groups):
            values = tuple(group.get(name, self.defaults[name]) for name in self.OPTIONS)
            if isinstance(values[0], Tensor) or not _same(values, self._resolved.get(index)):
                try:
                    fresh[index] = self._checked(dict(zip(self.OPTIONS, values, strict=True))), values
                except (TypeError, ValueError) as error:
                    raise type(error)(f"param_groups[{index}]: {error}") from None
        for index, (checked, values) in fresh.items():
            old = dict(zip(self.OPTIONS, self._resolved.get(index, ()), strict=False))
            if any(old.get(name) != checked[name] for name in self.OPTIONS if name not in NUMBERS):
                self._forget_plans()
            self.param_groups[index].update(checked)
            self._resolved[index] = values

    # ---- the step -----------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient. `.grad` is only read.

        Args:
            closure: Computes the loss anew, with gradients, and returns it. Default: None.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: A gradient is sparse, or a torch LRScheduler and a schedule both drive a group's lr.
            ValueError: A gradient does not fit its parameter, an option in a group is out of range, or a schedule is
                over; parameters and state are as before.
        """
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step_in_parts(None, lambda _: None)
        except BaseException:
            # GradScaler removes what it handed over only after a step that returns.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        self._step_in_parts(parts, wait)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
            [plan] = self._plans_of([Ready.of([param])], False, ahead)
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

    def _places(self) -> Places:
        return {id(param): (index, position) for index, position, param in self._parameters()}

    def _begin(self) -> Drive:
        """Settle the options of a step."""
        self._take_over_schedules()
        drive = Drive(self.param_groups, self._drivers)
        try:
            self._refresh_options()
        except BaseException:
            drive.undo()
            raise
        return drive

    def _step_in_parts(self, parts: list[list[Tensor]] | None, wait: Callable[[int], None]) -> None:
        """One step; of all parameters together where there are no parts."""
        ahead = self._ahead
        if ahead is not None and hasattr(self, "found_inf"):
            raise RuntimeError(
                "a gradient scaler has scaled the gradients that parameters were stepped with inside backward, before "
                "it could unscale them: go back to a checkpoint, and train without it (bfloat16 needs none)"
            )
        drive = ahead.drive if ahead is not None else self._begin()
        try:
            fresh = not self.state
            plans = self._current_plans(parts)
            scale, commit = self._scale_and_commit(plans, wait)
            for part in range(len(plans)) if fresh else ():
                wait(part)
            initialises = fresh and any(plan.slots for plan in plans) and self._only_initialises(plans)
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
        earlier = list(ahead.plans.values()) if ahead is not None else []
        self._last = tuple([plan for plan in earlier + plans if plan.slots]) or self._last
        self._ahead = None

    def _only_initialises(self, plans: list[Plan]) -> bool:
        """Whether this first step is the one by which torch.distributed.checkpoint makes an optimizer create its state.

        It sets lr to 0 and all gradients to zero. Counting it would make the first real step the second. The host
        waits for the gradients at most once in an optimizer's life, in a first step at lr 0.
        """
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        grads = [sharding.local(param.grad) for _, _, param in self._parameters() if param.grad is not None]
        moves = any(bool(grad.any()) for grad in grads)
        for ranks in [ranks for plan in plans for ranks in plan.meshes]:
            moves = ranks.any(moves)  # all of them step, or none
        return not moves

    def _current_plans(self, parts: list[list[Tensor]] | None) -> list[Plan]:
        """A plan for each part, fed with this step's gradients: cached ones where nothing has moved."""
        params = [param for _, _, param in self._parameters()] if self._order else self._all_params()
        ready = Ready.of(params)
        return self._plans_of([ready] if parts is None else _divided(ready, parts), parts is None)

    def _plans_of(self, divided: list[Ready], all_of_them: bool, ahead: Ahead | None = None) -> list[Plan]:
        """A plan for each of these sets of parameters; what a step ahead knows spares looking it up."""
        places = ahead.places if ahead is not None else {}
        found = [self._find_plan(part, all_of_them, places) for part in divided]
        # Nothing changes before every plan is made.
        for part, (plan, states) in zip(divided, found, strict=True):
            self.state.update(states)
            if states:
                plan.fingerprint = Fingerprint.of(*self._looks(part, all_of_them))
                if len(self._plans) >= MOST_PLANS * max(len(divided), len(places)):
                    self._plans.clear()
                self._plans[part.which()] = plan
        plans = [plan for plan, _ in found]
        for plan in plans:
            plan.prepare()
        return plans

    def _all_params(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable([group["params"] for group in self.param_groups]))

    def _looks(
        self, ready: Ready, all_of_them: bool
    ) -> tuple[list[object], list[Tensor], list[Tensor], list[dict[str, Any]]]:
        """What a fingerprint is taken of. All states are there without looking any up, since each takes its time."""
        states = list(self.state.values() if all_of_them else [self.state[p] for p in ready.params if p in self.state])
        (params, grads), layouts = ready, None
        if sharding.any_distributed(params) or sharding.any_distributed(grads):
            layouts = list(map(sharding.layout_of, grads))
            params, grads = list(map(sharding.local, params)), list(map(sharding.local, grads))
            states = [{name: sharding.local(value) for name, value in state.items()} for state in states]
        return [[len(group["params"]) for group in self.param_groups], layouts], params, grads, states

    def _find_plan(self, ready: Ready, all_of_them: bool, places: Places) -> tuple[Plan, dict[Tensor, Any]]:
        """The cached plan of these, and nothing; or a new one, and the states that belong to it."""
        plan = self._plans.get(ready.which())
        if (
            plan is not None
            and plan.fingerprint is not None
            and plan.fingerprint.holds(*self._looks(ready, all_of_them))
        ):
            plan.feed(ready.grads, self._options_of({slot.variant for slot in plan.slots}))
            return plan, {}
        for grad in ready.grads:
            if grad.layout is not torch.strided:
                _refuse_layout(grad)
        places = places or self._places()
        parts = [self._part(*places[id(param)], param) for param in ready.params]
        options = self._options_of({part.variant for part in parts})
        plan, states = build(parts, ready.grads, options, self._complete, self._settings.backend)
        return plan, {part.param: state for part, state in zip(parts, states, strict=True)}

    def _parameters(self) -> Iterator[tuple[int, int, Tensor]]:
        """Every parameter with its group and its position there, in the order in which they are visited."""
        if self._order:
            return ((index, position, self.param_groups[index]["params"][position]) for index, position in self._order)
        return (
            (index, position, param)
            for index, group in enumerate(self.param_groups)
            for position, param in enumerate(group["params"])
        )

    def _part(self, index: int, position: int, param: Tensor) -> Part:
        group = self.param_groups[index]
        if len(group.get("param_names", group["params"])) != len(group["params"]):
            raise ValueError(
                f"param_groups[{index}] has {len(group['param_names'])} names for {len(group['params'])} parameters, "
                "which were replaced: DeepSpeed's ZeRO does so with one flat tensor, whose norms are no layer's. Do "
                "without ZeRO, or use bighorn.shard_update"
            )
        name = group["param_names"][position] if "param_names" in group else None
        centre_from = {False: math.inf, True: 2, "conv": 3}[group["grad_centralization"]]
        centres = param.dim() - group["stacked"] >= centre_from
        whole, label = whole_view(param), name or _label(index, position)
        self._refuse_unfit(group, param, label)
        factored, leading = self._shape_of(group, whole)
        variant = Variant(
            group=index,
            decays=not excludes(self._settings.exclude_from_weight_decay, name, param),
            adapts=not excludes(self._settings.exclude_from_layer_adaptation, name, param),
            centres=centres,
            factored=factored,
            blocks=self._in_blocks(group, whole),
        )
        # Blocks and random bits run in logical order.
        in_order = variant.blocks or group["weight_rounding"] == "stochastic"
        leading = whole.dim() if in_order else max(leading, group["stacked"] + centres)
        return Part(param, label, variant, group["stacked"], leading, sharding.layout_of(param))

    def _options_of(self, variants: set[Variant]) -> dict[Variant, Options]:
        return {variant: self._kernel_options(self.param_groups[variant.group], variant) for variant in variants}

    def _complete(self, part: Part, dense: Tensor) -> tuple[dict[str, Any], list[str]]:
        spec = self._state_spec(self.param_groups[part.variant.group], part.param)
        return complete(part.param, dense, spec, self.state.get(part.param, {}), part.label), list(spec)

    def _scale_and_commit(self, plans: list[Plan], wait: Callable[[int], None]) -> tuple[Tensor | float, Tensor | None]:
        """What gradients are multiplied with, and whether the step is written (None: it is), without a host wait."""
        settings, grad_scale = self._settings, getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        scale: Tensor | float = 1.0 if grad_scale is None else grad_scale.double().reciprocal().reshape(())
        commit = None if found_inf is None else (found_inf == 0).reshape(())
        if settings.max_grad_norm is not None or settings.skip_nonfinite:
            total = self._square_sum(plans, wait)
            norm = total.sqrt() * scale
            if settings.skip_nonfinite:
                commit = norm.isfinite() if commit is None else commit & norm.isfinite()
            if settings.max_grad_norm is not None:
                clip = settings.max_grad_norm / norm
                scale = scale * torch.where(norm > settings.max_grad_norm, clip, torch.ones_like(clip))
        if commit is not None:
            skipped = (~commit).long()
            self._skipped = skipped if self._skipped is None else self._skipped + skipped
        return scale, commit

    def _square_sum(self, plans: list[Plan], wait: Callable[[int], None]) -> Tensor:
        """The sum of all gradients' squares; with a process group, over all its ranks, those without gradients too."""
        sums: list[Tensor] = []
        for part, plan in enumerate(plans):
            wait(part)
            sums += plan.square_sums()
        if sums:
            total = torch.stack([part_sum.to(sums[0].device) for part_sum in sums]).sum()
        else:
            devices = [param.device for group in self.param_groups for param in group["params"]]
            total = torch.zeros((), dtype=torch.float64, device=devices[0] if devices else "cpu")
        if self._settings.process_group is not None:
            torch.distributed.all_reduce(total, group=self._settings.process_group)
        return total

    # ---- what it says of itself -----------------------------------------------------------------------------

    def _figures(self) -> tuple[tuple[str, ...], Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Names, three figures and the learning rate for each, and how many steps were skipped: telemetry's fields."""
        figures = torch.zeros(0, 4, dtype=torch.float32, device="cpu")
        if self._last:
            pieces = [plan.figures() for plan in self._last]
            figures = torch.cat([piece.to(pieces[0].device) for piece in pieces])
        skipped = torch.zeros((), dtype=torch.int64, device="cpu") if self._skipped is None else self._skipped.clone()
        first, second, third, lr = figures.unbind(dim=1)
        labels = tuple([label for plan in self._last for label in plan.labels])
        return labels, first, second, third, lr, skipped

    @classmethod
    def state_bytes(cls, params: nn.Module | ParamsT, **options: Any) -> dict[str, int]:
        """How many bytes of state each parameter will have, from shapes alone: nothing is allocated.

        Args:
            params: A module, or parameters as the constructor takes them; they may lie on the meta device.
            **options: Of the constructor; a learning rate is not needed.

        Returns:
            Bytes by the parameter's name, or by its place in `param_groups`; their sum is what the first step allocates
            for good.

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
            options.setdefault("lr", 0.0)
        optimizer = cls(params, **options)
        sizes = {}
        for index, position, param in optimizer._parameters():
            spec = optimizer._state_spec(optimizer.param_groups[index], param)
            here = local_view(param)
            sizes[optimizer._part(index, position, param).label] = STEP_BYTES + sum(
                kept.like(here).nbytes for kept in spec.values()
            )
        return sizes

    def explain(self) -> str:
        """Which backend serves which tensors, and why: one line for each kind of tensor.

        Raises:
            ValueError: As `step` would, where the backend that is asked for does not serve a tensor.
        """
        self._take_over_schedules()
        self._refresh_options()
        kinds: dict[tuple[int, str, str, str, str], list[Tensor]] = {}
        for index, position, param in self._parameters():
            part = self._part(index, position, param)
            view = local_view(param)
            options = self._kernel_options(self.param_groups[index], part.variant)
            name, why = kernels.pick(self._settings.backend, view, options, row_shard(param, part.stacked))
            kinds.setdefault((index, name, str(view.device), str(view.dtype), why), []).append(view)
        lines = [
            f"group {index}: {name:<9} {len(tensors)} tensors, {sum(t.numel() for t in tensors):,} elements of "
            f"{dtype.removeprefix('torch.')} on {device} ({why})"
            for (index, name, device, dtype, why), tensors in kinds.items()
        ]
        return "\n".join(lines)

    # ---- state in and out -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Names are in the groups by now; a module here would be copied with the optimizer.
        own = {name: self.__dict__[name] for name in ("_drivers", "_default_schedules", "_order")}
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
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict must be what optimizer.state_dict() returned, with 'state' and 'param_groups'")
        max_grad_norm = self._settings.max_grad_norm
        state_dict = foreign.converted(state_dict, self.ALGORITHM, self.param_groups, max_grad_norm)
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: hold(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reached from load_state_dict, deepcopy and unpickling: check everything, take it, forget the plan."""
        defaults = state["defaults"] if "defaults" in state else self.defaults  # noqa: SIM401 - not there while unpickling
        current = self.__dict__.get("param_groups", state["param_groups"])
        groups = [
            self._loaded_group(i, group, {**defaults, **current[i]}) for i, group in enumerate(state["param_groups"])
        ]
        loaded: dict[Any, Any] = {param: release(value) for param, value in state["state"].items()}
        for index, group in enumerate(groups):
            steps = 0.0
            for position, param in enumerate(group["params"]):
                self._refuse_unfit(group, param, _label(index, position))
                if isinstance(loaded.get(param), dict) and loaded[param]:
                    spec = self._state_spec(group, param)
                    state_of = complete(param, local_view(param), spec, loaded[param], _label(index, position))
                    loaded[param], steps = state_of, max(steps, float(state_of["step"]))
            group.setdefault(COUNT, int(steps))  # other optimizers' checkpoints count for each parameter only
        fresh: defaultdict[Any, Any] = defaultdict(dict)
        fresh.update(loaded)
        super().__setstate__({**state, "state": fresh, "param_groups": groups})
        self.defaults.pop("differentiable", None)  # torch adds it here, and would add it to later groups
        for group, drivers in zip(self.param_groups, self._drivers, strict=True):
            for name, driven in drivers.items():
                driven.written = driven.left = group[name]
        self._forget_plans()
        self._resolved, self._ahead = {}, None

    def _loaded_group(self, index: int, loaded: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
        try:
            settings: Settings | None = self.__dict__.get("_settings")
            loaded = settings.without_own(loaded) if settings else loaded  # none yet while unpickling
            group = {foreign.VERSION: foreign.FORMAT, **{name: current[name] for name in self.OPTIONS}, **loaded}
            checks.refuse_unknown(group, [*LABELS, *SCHEDULERS, *OURS, *self.OPTIONS], "it")
            group[foreign.VERSION] = foreign.check_version(group[foreign.VERSION])
            if COUNT in group:
                group[COUNT] = check_count(COUNT, group[COUNT])
            return {**group, **self._checked(group)}
        except (TypeError, ValueError) as error:
            raise ValueError(f"the loaded param_groups[{index}] holds an option that cannot be used: {error}") from None


def _label(index: int, position: int) -> str:
    return f"param_groups[{index}].params[{position}]"


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


def _divided(ready: Ready, parts: list[list[Tensor]]) -> list[Ready]:
    part_of = {id(param): i for i, part in enumerate(parts) for param in part}
    divided = [Ready([], []) for _ in parts]
    for param, grad in zip(*ready, strict=True):
        part = divided[part_of[id(param)]]
        part.params.append(param)
        part.grads.append(grad)
    return divided


def _refuse_layout(grad: Tensor) -> None:
    raise RuntimeError(
        f"a gradient has layout {grad.layout}, but only dense gradients are supported: build the embedding with "
        "sparse=False, or give its parameters to torch.optim.SparseAdam"
    )


def _same(values: tuple[object, ...], old: tuple[object, ...] | None) -> bool:
    """Whether option values are what they were; arrays and the like, which do not compare, are not."""
    try:
        return values == old
    except (ValueError, RuntimeError):
        return False
