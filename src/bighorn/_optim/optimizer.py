"""The base class of all optimizers: its parameters and options, the ways to take a step, and checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from bighorn import _arguments as checks
from bighorn._foreign_options import Foreign
from bighorn._names import listed
from bighorn._optim import flat_tensors, param_groups
from bighorn._optim.agreement import described
from bighorn._optim.algorithm import Algorithm, Group
from bighorn._optim.checkpointing import check_structure, converted, in_model_order, loaded_states, wrap
from bighorn._optim.copied_defaults import remember, without_copied
from bighorn._optim.entries import entries_of, parameters
from bighorn._optim.entry import Entry
from bighorn._optim.group_records import GroupRecord, GroupRecords
from bighorn._optim.presets import ELSEWHERE
from bighorn._optim.reports import Reports
from bighorn._optim.scheduled import SCHEDULED, ScheduledOptions, value_at
from bighorn._optim.settings import Settings
from bighorn._optim.step import WHOLE, Parts, Steps
from bighorn._optim.step_param import Released, can_step
from bighorn._optim.step_plan import PartCall

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")

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
    """A `torch.optim.Optimizer` whose mathematics is in `bighorn._kernels`."""

    algorithm: ClassVar[Algorithm[Any]]
    """The algorithm that the optimizer computes."""

    takes_grad_scale: ClassVar[bool] = True
    """Whether `step` unscales, and skips an overflow, if `grad_scale` and `found_inf` are set, which LossScaler does.

    `_step_supports_amp_scaling` would have the same effect with torch's GradScaler, but if it is True, Lightning
    refuses to clip.
    """

    _settings: Settings
    _default_schedules: dict[str, Any]
    _records: GroupRecords
    _steps: Steps
    _prefix: str | None = None
    """The prefix of wrappers that groups remove from every parameter's name; None if parameters have no names."""
    _is_share: bool = False
    """Whether the optimizer holds one rank's share of a model, as `on_ranks` returns it."""

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
        if asked := checks.asked_for(unknown, ELSEWHERE):
            checks.refuse_unknown(asked, arguments, type(self).__name__, {**_options_of_others(), **ELSEWHERE})
        params = param_groups.in_lists(listed(params))
        self._settings = Settings.of(arguments, params)
        self._is_share = partial
        if not params:
            raise ValueError("params is empty: pass model.named_parameters() of a model that has some, each time anew")
        checked = checks.checked(self.algorithm.options, {**arguments, **self.algorithm.group_only})
        self._prefix = param_groups.prefix_of(params, self._settings)
        self._default_schedules = {name: checked[name] for name in SCHEDULED if callable(checked.get(name))}
        checked |= {name: value_at(name, schedule, 0) for name, schedule in self._default_schedules.items()}
        self._start_anew([])
        super().__init__(params, checked)
        if not partial:
            names = [name for group in self.param_groups for name in group.get("param_names", ())]
            names += [param.name for held in self._records.flat if held is not None for param in held.params]
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
        if self._records.has_flat:
            raise ValueError("optimizer holds flat tensors, whose state is on several ranks already: use it as it is")
        arguments = {**self.defaults, **self._default_schedules, **vars(self._settings), "names": None}
        arguments["grad_norm_group"] = process_group if self._settings.needs_all_grads else None
        part = type(self).__new__(type(self))
        schedules = [record.scheduled for record in self._records.each]
        given = [self._as_given(group, scheduled) for group, scheduled in zip(groups, schedules, strict=True)]
        KernelOptimizer.__init__(part, given, arguments, {}, partial=True)
        return part

    def _as_given(self, group: dict[str, Any], scheduled: ScheduledOptions) -> dict[str, Any]:
        """Return a group with its schedules instead of their present values, and without those that are the default."""
        schedules = {name: option.schedule for name, option in scheduled.items()}
        default = [name for name in schedules if schedules[name] is self._default_schedules.get(name)]
        return {name: value for name, value in (group | schedules).items() if name not in default}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: `params`, and any option of the constructor that a group can have.

        Raises:
            TypeError: An unknown key, or a value of a wrong type.
            ValueError: A value out of range, an option of the whole optimizer, or a parameter that cannot be optimized
                here.
        """
        record = self._records.joining(param_group, len(self.param_groups), self.param_groups, self.defaults)
        super().add_param_group(record.group)
        self._records.add(record)
        self._steps.forget()

    # ---- the step -----------------------------------------------------------------------------------------

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient. `.grad` is not changed.

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
            self._take_step()
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
        if self._records.has_flat:
            raise ValueError(f"no step can be taken in parts: {flat_tensors.WHOLE_STEP}")
        self._take_step(Parts(parts, wait, stepped, square_sum))

    def _take_step(self, parts: Parts | None = None) -> None:
        self._steps.alone(partial(self._steps.take, self, parts or WHOLE), waits=False)

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
        self._steps.alone(partial(self._step_param, param, group), waits=True)

    def _step_param(self, param: Tensor, group: dict[str, Any] | None) -> None:
        if group is not None and not can_step(self, self._released, param, group):
            return
        if (reason := self.whole_step_reason()) is not None:
            raise ValueError(f"no parameter can be stepped ahead of the others: {reason}")
        self._steps.take_alone(self, param, handed_in=group is not None)

    @property
    def _released(self) -> Released | None:
        """The parameters that `step_param` has stepped, before `step` ends their step."""
        return None if self._steps.begun is None else self._steps.begun.released

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
        """Reset the gradients of all parameters.

        If hooks called `step_param(param, group)`, this ends their step as `step()` would.

        Args:
            set_to_none: Whether gradients become None in place of zeros. Default: True.
        """
        if (released := self._released) is not None and released.handed_in:
            released.end(self)
        super().zero_grad(set_to_none)

    def whole_step_reason(self) -> str | None:
        """Return why a step needs every gradient before it writes the first parameter, or None."""
        if (option := self._settings.all_grads_option) is not None:
            return f"{option} looks at all gradients first; leave it out"
        return flat_tensors.WHOLE_STEP if self._records.has_flat else None

    # ---- the groups -----------------------------------------------------------------------------------------

    def _start_anew(self, records: Sequence[GroupRecord]) -> None:
        """Keep these records, with no plans and no step that has begun."""
        self._records = GroupRecords(self.algorithm, self._settings, self._default_schedules, self._prefix)
        self._records.keep(records)
        self._steps = Steps(self.algorithm, self._settings, self._records)

    def _present_records(self) -> list[GroupRecord]:
        return self._records.of(self.param_groups)

    def _entries(self, groups: list[Group]) -> Iterator[Entry]:
        flat = [record.flat for record in self._present_records()]
        return entries_of(parameters(groups), groups, flat, self.algorithm, self._settings)

    def agreement(self, params: set[Tensor]) -> list[str]:
        """Return lines about the options and some parameters. Ranks that take the same steps have the same lines.

        Args:
            params: The parameters that all ranks hold.
        """
        entries = (entry for entry in self._entries(self.param_groups) if entry.param in params)
        return described(entries, self.param_groups, self.algorithm.options, self._settings)

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # The groups hold the names; a module here would be copied with the optimizer.
        attributes = {name: self.__dict__[name] for name in ("_default_schedules", "_prefix")}
        each = [(record.scheduled, record.flat) for record in self._present_records()]
        return {**super().__getstate__(), **attributes, "_each": each, "_settings": replace(self._settings, names=None)}

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
        if self._steps.running:
            raise RuntimeError("load_state_dict() was called while a step is running: call it before or after the step")
        self._steps.adopt(self)
        check_structure(state_dict)
        max_grad_norm = self._settings.max_grad_norm
        state_dict = converted(state_dict, self.algorithm, self.param_groups, max_grad_norm)
        state_dict = in_model_order(state_dict, self.param_groups)
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: wrap(loaded, self.param_groups))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check and set a state, and drop the plans; load_state_dict, deepcopy and unpickling call this."""
        attributes, copied = self.__dict__, state.pop("_each", None)  # empty while unpickling; None in load_state_dict
        old = self._records.of(self.param_groups) if copied is None else [GroupRecord({}, *each) for each in copied]
        defaults = state["defaults"] if "defaults" in state else self.defaults  # noqa: SIM401 - may not exist yet
        current = attributes.get("param_groups", state["param_groups"])
        groups = [
            param_groups.loaded(i, group, {**defaults, **current[i]}, self.algorithm, attributes.get("_settings"))
            for i, group in enumerate(state["param_groups"])
        ]
        states = loaded_states(groups, [record.flat for record in old], state["state"], self.algorithm)
        super().__setstate__({**state, "state": states, "param_groups": groups})
        self.defaults.pop("differentiable", None)  # torch adds this key here, and would add it to later groups
        for record, group in zip(old, groups, strict=True):
            record.load(group, self.algorithm)
        self._start_anew(old)


def _options_of_others() -> dict[str, Foreign]:
    """The options of all optimizers here: the classes that have each, and the remedy for one of another class."""
    classes: dict[str, list[str]] = {}
    for kind in KernelOptimizer.__subclasses__():
        for name in inspect.signature(kind).parameters:
            classes.setdefault(name, []).append(kind.__name__)
    return {
        name: Foreign(" and ".join(kinds), f"leave it out, or use {' or '.join(kinds)}")
        for name, kinds in classes.items()
    }
