"""The common part of the optimizers of MindSpore and MindFormers: their checks, groups, and calls with gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import bighorn
from bighorn._arguments import Check, about, flag, hint, is_real, number
from bighorn._names import listed
from bighorn.schedules import Values

GROUP_KEYS = ("params", "lr", "weight_decay", "grad_centralization", "order_params")


class ElementError(TypeError, ValueError):
    """An element of `params` of a wrong type, which is a TypeError and a ValueError."""


class RepeatedError(RuntimeError, ValueError):
    """A parameter in two groups, which is a RuntimeError in MindSpore and a ValueError in torch."""


def floating(name: str, value: object, check: Check) -> float:
    """Return a float that a check accepts. Integers are refused, as in MindSpore."""
    if not isinstance(value, float):
        raise TypeError(f"{name} must be a float, not {value!r} ({type(value).__name__})")
    return float(check(name, value))


def check_rate(name: str, value: object) -> Any:
    """Return a learning rate in any form, or a schedule. A tensor of 2 dims is refused, as in MindSpore."""
    if isinstance(value, Tensor) and value.dim() > 1:
        raise ValueError(f"{name} as a tensor must be a scalar or a 1-D vector, not of shape {tuple(value.shape)}")
    return bighorn.Lamb.algorithm.options["lr"](name, value)


def check_decay(name: str, value: object, high: float = math.inf) -> float | Callable[[int], Any]:
    """Return a number that is not negative, or a schedule."""
    if callable(value) and not isinstance(value, type):
        return value
    if not is_real(value):
        raise TypeError(f"{name} must be a number or a schedule, not {value!r} ({type(value).__name__})")
    return number(name, value, 0, high)


def check_params(params: Any) -> list[Any]:
    """Return parameters, (name, parameter) pairs or groups in a list; each group is checked when it is added."""
    if isinstance(params, (str, Mapping, set, Parameter)) or not isinstance(params, Iterable):
        raise TypeError(f"params must be a list of parameters or of groups, not {type(params).__name__}")
    items = list(params)
    if all(isinstance(item, dict) for item in items):
        return items
    for i, item in enumerate(items):
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            item = item[1]
        if not isinstance(item, Parameter):
            raise ElementError(
                f"params[{i}] must be a torch.nn.Parameter or a (name, Parameter) pair, or all of params groups, "
                f"not {type(item).__name__}"
            )
    return items


def split_order(params: Any) -> tuple[Any, list[Tensor] | None]:
    """Return parameters or groups without the dict of `order_params`, and the tensors in the order of that dict.

    Raises:
        TypeError: There is no list of parameters, or `order_params` holds something that is not a tensor.
        ValueError: There are two such dicts, or `order_params` holds a tensor twice.
    """
    params = listed(params)
    orders = [group for group in params if isinstance(group, dict) and "order_params" in group]
    if not orders:
        return params, None
    if len(orders) > 1:
        raise ValueError(f"order_params is given {len(orders)} times: one dict among the groups orders all of them")
    ignored = [str(key) for key in orders[0] if key != "order_params"]
    if ignored:
        warnings.warn(
            f"the group with order_params has other keys too, which mean nothing there: {', '.join(ignored)}",
            stacklevel=5,
        )
    ordered = listed(orders[0]["order_params"], "order_params")
    tensors = [item[1] if isinstance(item, tuple) else item for item in ordered]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"order_params must hold the parameters of the other groups, not {tensor!r}")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError("order_params names a parameter twice: each one must be there once")
    return [group for group in params if group is not orders[0]], tensors


def order_indices(ordered: list[Tensor] | None, groups: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the indices of the ordered tensors in the groups.

    Raises:
        ValueError: The tensors are not exactly the parameters of the groups.
    """
    if ordered is None:
        return []
    found = {id(param): (i, j) for i, group in enumerate(groups) for j, param in enumerate(group["params"])}
    if {id(tensor) for tensor in ordered} != found.keys():
        strangers = sum(id(tensor) not in found for tensor in ordered)
        raise ValueError(
            f"order_params must name every parameter of the other groups and no others: of its {len(ordered)}, "
            f"{strangers} are in no group, and "
            f"{len(found) - len(ordered) + strangers} of the groups' {len(found)} are not among them"
        )
    return [found[id(tensor)] for tensor in ordered]


def _converted(group: dict[str, Any], most_decay: float = math.inf) -> dict[str, Any]:
    """Convert a group with MindSpore's keys to one of ours."""
    for key in group:
        if key not in GROUP_KEYS:
            raise ValueError(f"unknown key {key!r}{hint(key, GROUP_KEYS)}. Known: {', '.join(GROUP_KEYS)}")
    ours = dict(group)
    if "params" in group:
        ours["params"] = check_params(group["params"])
        if not ours["params"]:
            raise ValueError("params is empty: leave the group out, as MindSpore refuses it")
    if "lr" in group:
        ours["lr"] = check_rate("lr", group["lr"])
    if "weight_decay" in group:
        ours["weight_decay"] = check_decay("weight_decay", group["weight_decay"], most_decay)
    if "grad_centralization" in group:  # in MindSpore it applies to convolutions only
        ours["grad_centralization"] = "conv" if flag("grad_centralization", group["grad_centralization"]) else False
    return ours


class MindSporeOptimizer(Optimizer):
    """A base class to be listed before one of our optimizers."""

    MOST_DECAY: ClassVar[float] = math.inf
    """The largest weight decay of a group."""

    if TYPE_CHECKING:  # our optimizer has them
        _default_schedules: dict[str, Any]
        _records: Any
        _is_share: bool

    _order: Sequence[tuple[int, int]] = ()
    """The indices of the parameters of `order_params` in the groups. Steps have the order of the groups."""

    def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
        params, ordered = split_order(params)
        super().__init__(params, *arguments, **options)
        self._order = order_indices(ordered, self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_order": self._order}

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All parameters, in the order in which a call takes gradients: `order_params` if given."""
        first = [self.param_groups[index]["params"][position] for index, position in self._order]
        first_ids = set(map(id, first))
        return (*first, *(p for group in self.param_groups for p in group["params"] if id(p) not in first_ids))

    def get_lr(self) -> float | tuple[float, ...]:
        """Return the learning rate of the next step: one number, or one for each of `parameters` if groups differ."""
        rates = {}
        for record in self._records.of(self.param_groups):
            group, scheduled = record.group, record.scheduled
            rate = group["lr"]
            if "lr" in scheduled and not scheduled["lr"].overwritten(rate):
                rate = scheduled["lr"].schedule(group["schedule_step"])
            rates.update({id(param): float(rate) for param in group["params"]})
        each = tuple(rates[id(param)] for param in self.parameters)
        return each if len(set(each)) > 1 else each[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: A group, as in `params` of the constructor.

        Raises:
            RuntimeError: A parameter is in another group already; this error is a ValueError too.
            TypeError: A value of a wrong type.
            ValueError: An unknown key, a value out of range, or an `lr` with more or fewer values than another one.
        """
        with about(f"group {len(self.param_groups)}"):
            if "order_params" in param_group:
                raise ValueError("order_params belongs among the groups that the constructor is given")
            if not self._is_share:  # the groups of a rank's share are complete ones of ours
                param_group = _converted(param_group, self.MOST_DECAY)
                self._refuse_repeated(param_group.get("params", ()))
                self._refuse_other_length(param_group.get("lr"))
            super().add_param_group(param_group)

    def _refuse_repeated(self, given: Iterable[Any]) -> None:
        before = {id(param) for group in self.param_groups for param in group["params"]}
        for i, item in enumerate(given):
            if id(item[1] if isinstance(item, tuple) else item) in before:
                raise RepeatedError(f"params[{i}] is in an earlier group already: leave it in one of the two")

    def _refuse_other_length(self, lr: object) -> None:
        """Raise for a vector of learning rates of another length than one of the other groups or the default."""
        scheduled = [record.scheduled["lr"] for record in self._records.each if "lr" in record.scheduled]
        others = [self._default_schedules.get("lr"), *(each.schedule for each in scheduled)]
        for other in others:
            if isinstance(lr, Values) and isinstance(other, Values) and len(lr.values) != len(other.values):
                raise ValueError(
                    f"lr has {len(lr.values)} values, and another lr has {len(other.values)}: give all of them one for "
                    "each step of the training"
                )

    def _step_with(self, gradients: object) -> int:
        """Step with these gradients instead of `.grad`, and return the number of parameters."""
        params = self.parameters
        with _lent(params, _checked(params, gradients)):
            self.step()
        return len(params)


@contextmanager
def _lent(params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """Set each parameter's `.grad` to the gradient of the same index, and restore it on exit."""
    before = [(param.grad, getattr(param, "grad_dtype", param.dtype)) for param in params]
    try:
        for param, gradient in zip(params, gradients, strict=True):
            _put(param, gradient, param.dtype if gradient is None else gradient.dtype)
        yield
    finally:
        for param, (gradient, dtype) in zip(params, before, strict=True):
            _put(param, gradient, dtype)


def _put(param: Tensor, gradient: Tensor | None, dtype: object) -> None:
    """Set `.grad`. Since torch 2.10, a gradient of another dtype than the parameter's has to be allowed first."""
    param.grad = None
    if getattr(param, "grad_dtype", dtype) != dtype:
        param.grad_dtype = dtype  # type: ignore[assignment]
    param.grad = gradient


def _checked(params: Sequence[Tensor], gradients: object) -> Sequence[Tensor | None]:
    """Return the gradients, if each parameter has one (or None) that fits."""
    if not isinstance(gradients, (tuple, list)):
        raise TypeError(f"gradients must be a tuple of tensors, not {type(gradients).__name__}")
    if len(gradients) != len(params):
        raise ValueError(f"there are {len(gradients)} gradients for {len(params)} parameters: give one for each")
    for i, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
        if gradient is None:
            continue
        if not isinstance(gradient, Tensor):
            raise TypeError(f"gradients[{i}] must be a tensor or None, not {type(gradient).__name__}")
        if gradient.shape != param.shape or gradient.device != param.device:
            raise ValueError(
                f"gradients[{i}] has shape {tuple(gradient.shape)} on {gradient.device}, its parameter "
                f"{tuple(param.shape)} on {param.device}: give them in the order of optimizer.parameters"
            )
    return gradients
