"""What an algorithm says of itself: its options, what kernels are told, what it keeps. Pure functions of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple

from torch import Tensor

from bighorn.arguments import Check, choice, flag, learning_rate, schedulable, weight_decay
from bighorn.kernels.options import Options, table
from bighorn.optim.state import StateSpec, unsupported_reason, weight_spec, whole_view
from bighorn.schedules import Values

Group = dict[str, Any]
"""A parameter group, with every option that it can have."""


SHARED: Mapping[str, Check] = {
    "lr": schedulable(learning_rate, Values.of),
    "weight_decay": schedulable(weight_decay, Values.of),
    "stacked": flag,
    "grad_centralization": choice(True, False, "conv"),
}
"""Options that the groups of every optimizer have, and kernels do not get as they are."""


class Variant(NamedTuple):
    """Which options hold for a bucket: its group's, less what exclusions and shapes take away."""

    group: int
    decays: bool
    adapts: bool
    centres: bool
    factored: bool
    blocks: bool
    """Moments are kept in blocks."""


class Algorithm(ABC, Generic[Options]):
    """What `KernelOptimizer` has to know of an algorithm."""

    name: ClassVar[str]
    """As kernels, checkpoints of others and messages call it."""

    kernel_options_type: ClassVar[type]
    """The options of kernels: each field with a check is an option of a group, and kernels get it as it is there."""

    group_options: ClassVar[Mapping[str, Check]]
    """The checks of the other options of a group; `SHARED` is among them."""

    group_only: ClassVar[Mapping[str, Any]] = {"stacked": False, "grad_centralization": False}
    """The options of a group that are not arguments of the constructor, with their defaults."""

    options: ClassVar[Mapping[str, Check]]
    """The checks of all options of a group."""

    passed_on: ClassVar[tuple[str, ...]]
    """The options that kernels get as they are in the group."""

    def __init_subclass__(cls) -> None:
        checks = {name: option.check for name, option in table(cls.kernel_options_type).items() if option.check}
        cls.options, cls.passed_on = {**cls.group_options, **checks}, tuple(checks)

    @abstractmethod
    def kernel_options(self, group: Group, variant: Variant) -> Options:
        """What the kernels are told, for one variant of a group."""

    @abstractmethod
    def moments(self, group: Group, param: Tensor) -> StateSpec:
        """The state tensors of the algorithm for a parameter (a real one), besides `step`."""

    @abstractmethod
    def shape_of(self, group: Group, param: Tensor) -> tuple[bool, int]:
        """Whether a parameter (a real one) is factored, and how many leading dims must be the outermost in memory."""

    def unsupported_reason(self, group: Group, param: Tensor) -> str | None:
        """Why a parameter cannot be optimized with a group's options, with the remedy, or None."""
        return unsupported_reason(param, group["state_dtype"], group["weight_rounding"])

    def shared_options(self, group: Group, variant: Variant) -> dict[str, Any]:
        """What kernels of every algorithm are told."""
        lr = group["lr"]
        return {
            # Where the host has the value anyway it is a number; elsewhere a tensor, so that nobody waits for it.
            "lr": float(lr) if not isinstance(lr, Tensor) or lr.device.type == "cpu" else lr.reshape(()),
            "weight_decay": group["weight_decay"] if variant.decays else 0.0,
            "centre": variant.centres,
            **{name: group[name] for name in self.passed_on},
        }

    def state_spec(self, group: Group, param: Tensor) -> StateSpec:
        """The state tensors of a parameter, besides `step`."""
        whole = whole_view(param)
        return {**self.moments(group, whole), **weight_spec(whole, group["weight_rounding"])}

    def in_blocks(self, group: Group, param: Tensor) -> bool:
        """Whether moments of a parameter (a real one) are kept in blocks."""
        return "exp_avg_scale" in self.moments(group, param)

    def refuse_unfit(self, group: Group, param: Tensor, what: str) -> None:
        """Raise a ValueError for a parameter that cannot be optimized with a group's options."""
        if (reason := self.unsupported_reason(group, param)) is not None:
            raise ValueError(f"{what} cannot be optimized as asked for: {reason}")
