"""The interface of an algorithm: its options, state tensors and kernel options, as pure functions of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple

from torch import Tensor

from bighorn._arguments import Check, choice, flag, learning_rate, schedulable, weight_decay
from bighorn._kernels.codec import BLOCK, Forms
from bighorn._kernels.options import Options, checks_of
from bighorn._kernels.rounding import LOW
from bighorn._optim.state import (
    BLOCK_DTYPES,
    StateSpec,
    unsupported_reason,
    weight_spec,
    whole_view,
)
from bighorn.schedules import Values

Group = dict[str, Any]
"""A parameter group with all of its options."""


SHARED: Mapping[str, Check] = {
    "lr": schedulable(learning_rate, Values.of),
    "weight_decay": schedulable(weight_decay, Values.of),
    "stacked": flag,
    "grad_centralization": choice(True, False, "conv"),
}
"""Options of the groups of every optimizer that kernels do not receive unchanged."""


class Variant(NamedTuple):
    """The options that hold for a bucket: its group's, without any that exclusions or shapes switch off."""

    group: int
    decays: bool
    adapts: bool
    centres: bool
    factored: bool
    blocks: bool
    """Whether moments are kept in blocks."""
    int4: bool
    """Whether one of them is kept in codes of 4 bits."""
    rounds: bool
    """Whether weights have 16 bits, on which alone `weight_rounding` acts."""


class ParamTraits(NamedTuple):
    """The properties of a parameter that follow from its shape, its dtype and the options of its group."""

    factored: bool
    leading: int
    """The number of leading dims that must be outermost in memory."""
    blocks: bool
    """Whether moments are kept in blocks."""
    int4: bool
    """Whether one of them is kept in codes of 4 bits."""
    rounds: bool
    """Whether it has 16 bits, on which alone `weight_rounding` acts."""
    spec: StateSpec
    """The state tensors, besides `step`."""


class Algorithm(ABC, Generic[Options]):
    """An algorithm: its options, its state tensors and its kernel options."""

    name: ClassVar[str]
    """The name in kernels and in the table of checkpoint formats."""

    class_name: ClassVar[str]
    """The name of the optimizer's class, for messages."""

    kernel_options_type: ClassVar[type[Any]]
    """The dataclass of kernel options. Each field with a check is an option of a group, passed on unchanged."""

    group_options: ClassVar[Mapping[str, Check]]
    """The checks of the other options of a group, including `SHARED`."""

    exchanged: ClassVar[Mapping[str, str]] = {}
    """The names of a matrix's state tensors by their names in its transpose, if both have the same step.

    Others are transposed themselves. Kernels then step a matrix in the order of its memory. Empty if steps differ.
    """

    never_zero: ClassVar[tuple[str, str] | None] = None
    """The state tensor that starts as the norm of weights that may not all be 0, and why not, with the remedy."""

    slow_layers_hint: ClassVar[str | None] = None
    """What makes a layer that started at zero slow, and the remedy; `{below}` is the ratio below which one is slow."""

    group_only: ClassVar[Mapping[str, Any]] = {"stacked": False, "grad_centralization": False}
    """The options of a group that are not arguments of the constructor, with their defaults."""

    options: ClassVar[Mapping[str, Check]]
    """The checks of all options of a group."""

    forms: ClassVar[Forms]
    """The forms of moments that can be kept in blocks, as kernels have them."""

    passed_on: ClassVar[tuple[str, ...]]
    """The options that kernels receive unchanged from the group."""

    by_name: ClassVar[dict[str, type[Algorithm[Any]]]] = {}
    """All algorithms by name: messages about unknown options and other checkpoints name their classes."""

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "name"):
            return  # a base of algorithms
        Algorithm.by_name[cls.name] = cls
        checks = checks_of(cls.kernel_options_type)
        # The options of groups come first, as in messages, and their checks take precedence.
        cls.options = {**cls.group_options, **checks, **cls.group_options}
        cls.passed_on, cls.forms = tuple(checks), cls.kernel_options_type.forms

    def kernel_options(self, group: Group, variant: Variant) -> Options:
        """The options that kernels receive for one variant of a group."""
        options: Options = self.kernel_options_type(**self.shared_options(group, variant))
        return options

    @abstractmethod
    def moments(self, group: Group, param: Tensor) -> StateSpec:
        """The state tensors of the algorithm for a parameter (as a real view), besides `step`."""

    def shape_of(self, group: Group, param: Tensor) -> tuple[bool, int]:
        """Whether a parameter (as a real view) is factored, and how many leading dims must be outermost in memory.

        An algorithm that factors no parameter needs this for the stacked dim alone.
        """
        del param
        return False, int(group["stacked"])

    def adapts(self, group: Group, param: Tensor) -> bool:
        """Whether a parameter (as a real view) that no exclusion names has what the algorithm does for layers."""
        del group, param
        return True

    def unsupported_reason(self, group: Group, param: Tensor) -> str | None:
        """The reason why a parameter cannot be optimized with a group's options, with the remedy, or None."""
        if group["stacked"] and param.dim() < 2:
            return f"it has {param.dim()} dims, but stacked=True needs 2 or more, since dim 0 stacks the layers"
        return unsupported_reason(param, group["state_dtype"])

    def unsupported_flat_reason(self, group: Group) -> str | None:
        """The reason why the parameters in flat tensors cannot be optimized with a group's options, or None."""
        if group["state_dtype"] in BLOCK_DTYPES:
            return (
                f'state_dtype="{group["state_dtype"]}" keeps blocks of rows, and flat tensors cut these: use '
                'state_dtype="bfloat16" or None'
            )
        for name in ("stacked", "grad_centralization"):
            if group[name]:
                return f"{name}={group[name]!r} needs rows, and flat tensors cut these: leave it out of the group"
        return None

    def shared_options(self, group: Group, variant: Variant) -> dict[str, Any]:
        """The options that kernels of every algorithm receive."""
        lr = group["lr"]
        return {
            # A tensor on a device stays a tensor, so that the host does not wait for its value.
            "lr": float(lr) if not isinstance(lr, Tensor) or lr.device.type == "cpu" else lr.reshape(()),
            "weight_decay": group["weight_decay"] if variant.decays else 0.0,
            "blocks": variant.blocks,
            "int4": variant.int4,
            **{name: group[name] for name in self.passed_on},
            **({} if variant.rounds else {"weight_rounding": "nearest"}),
        }

    def limits_variants(self, group: Group) -> bool:
        """Whether `kernel_options` refuses variants of a group that is to be added, by what exclusions leave them."""
        del group
        return False

    def traits_of(self, group: Group, param: Tensor) -> ParamTraits:
        """The traits of a parameter (as a real view)."""
        factored, leading = self.shape_of(group, param)
        spec = {**self.moments(group, param), **weight_spec(param, group["weight_rounding"])}
        blocks, int4 = (any(each.block == block for each in spec.values()) for block in (BLOCK, 2))
        return ParamTraits(factored, leading, blocks, int4, param.dtype in LOW, spec)

    def state_spec(self, group: Group, param: Tensor) -> StateSpec:
        """The state tensors of a parameter, besides `step`."""
        return self.traits_of(group, whole_view(param)).spec

    def refuse_unfit(self, group: Group, param: Tensor, what: str) -> None:
        """Raise a ValueError for a parameter that cannot be optimized with a group's options."""
        if (reason := self.unsupported_reason(group, param)) is not None:
            raise ValueError(f"{what} cannot be optimized as asked for: {reason}")
