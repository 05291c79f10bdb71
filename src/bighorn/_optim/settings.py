"""The options of the whole optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch.distributed as dist
from torch.optim import Optimizer

from bighorn._arguments import choice, flag, max_norm
from bighorn._kernels import BACKENDS
from bighorn._kernels.options import Option, checks_of
from bighorn._names import (
    Exclusion,
    Names,
    check_exclusion,
    check_matches,
    common_prefix,
    names_of,
    needs_names,
    unwrapped,
)

EXCLUSIONS = ("exclude_from_layer_adaptation", "exclude_from_weight_decay")


def check_process_group(name: str, value: object) -> object:
    """Return None or a process group."""
    available = dist.is_available()
    if value is None or (available and isinstance(value, dist.ProcessGroup)):
        return value
    raise TypeError(f"{name} must be a torch.distributed.ProcessGroup, not {value!r}")


def check_names(_: str, value: object) -> object:
    """Return None, or a module or a mapping of names to parameters."""
    if value is not None:
        names_of(value)
    return value


@dataclass(frozen=True)
class Settings:
    """The options of the whole optimizer, which no group and no checkpoint contains.

    Options that only one optimizer has are None in the others.
    """

    backend: Annotated[str, Option(choice("auto", *BACKENDS))]
    max_grad_norm: Annotated[float | None, Option(max_norm)]
    skip_nonfinite: Annotated[bool, Option(flag)]
    exclude_from_weight_decay: Annotated[Exclusion | None, Option(check_exclusion)]
    exclude_from_layer_adaptation: Annotated[Exclusion | None, Option(check_exclusion)]
    grad_norm_group: Annotated[Any, Option(check_process_group)]
    names: Annotated[Names | None, Option(check_names)]

    @classmethod
    def of(cls, arguments: Mapping[str, Any], params: Sequence[Any]) -> Settings:
        """Return the checked settings from a constructor's arguments; options that it does not have are None."""
        settings = cls(**{name: check(name, arguments.get(name)) for name, check in CHECKS.items()})
        if settings.grad_norm_group is not None and not settings.needs_all_grads:
            raise ValueError(
                "grad_norm_group is only used by max_grad_norm and skip_nonfinite: set one of them, or leave it"
            )
        settings.refuse_rank_alone(params)
        return settings

    @property
    def needs_all_grads(self) -> bool:
        """Whether every gradient is needed before the first parameter is written."""
        return self.max_grad_norm is not None or self.skip_nonfinite

    @property
    def all_grads_option(self) -> str | None:
        """The option that needs every gradient before the first parameter is written, with its value, or None."""
        given = [name for name in ("max_grad_norm", "skip_nonfinite") if getattr(self, name)]
        return f"{given[0]}={getattr(self, given[0])!r}" if given else None

    def refuse_in_backward(self) -> None:
        """Raise for a step inside backward, as of torchtune's optimizer_in_bwd, that needs all gradients."""
        if (option := self.all_grads_option) is not None:
            raise RuntimeError(
                f"{option} looks at all gradients, but this step is inside backward, which has not computed all of "
                "them: leave it out, or step afterwards (torchtune: optimizer_in_bwd=False)"
            )

    def without_copies(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group without options that equal these, which ZeroRedundancyOptimizer writes into every group."""
        return {name: value for name, value in group.items() if not self._writes(name, value)}

    def _writes(self, name: str, value: object) -> bool:
        saved = name != "grad_norm_group" or value is None
        return name in vars(self) and saved and bool(value == vars(self)[name])

    def refuse_rank_alone(self, params: Sequence[Any]) -> None:
        """Raise if a wrapper constructs the optimizer of one rank's share, whose own gradients alone it would use.

        The share looks like a whole model, so the callers are searched for an optimizer that holds more parameters.
        """
        if self.grad_norm_group is not None or not self.needs_all_grads:
            return
        if (wrapper := _wrapper_with_more({id(tensor) for tensor in _tensors(params)})) is None:
            return
        raise ValueError(
            f"{self.all_grads_option} would use only the gradients of one rank, since {wrapper} gives each rank a "
            "part of the parameters: use bighorn.shard_update(optimizer) with an optimizer that has this option, or "
            "give the ranks as grad_norm_group=torch.distributed.group.WORLD"
        )

    def refuse_in_group(self, group: dict[str, Any], what: str) -> None:
        """Raise if one of these options was written into a group, where it would have no effect."""
        if group.get("grad_norm_group") is not None:
            raise ValueError(
                f"{what} has grad_norm_group, as ZeroRedundancyOptimizer writes it, but it cannot be saved: "
                "use bighorn.shard_update(optimizer), or give functools.partial(Lamb, grad_norm_group=...) to "
                "ZeroRedundancyOptimizer"
            )
        for name in OF_THE_WHOLE & self.without_copies(group).keys():
            raise ValueError(
                f"{what} has {name}={group[name]!r}, which belongs to the whole optimizer and changes nothing there: "
                "give it to the constructor, and remove it from the group"
            )

    def without_exclusions(self) -> Settings:
        """Return these settings for flat tensors, whose parameters have names in their layout."""
        return replace(self, exclude_from_weight_decay=None, exclude_from_layer_adaptation=None)

    def refuse_nameless(self) -> None:
        """Raise if an exclusion needs names and parameters have none."""
        for name in EXCLUSIONS:
            if needs_names(getattr(self, name)):
                raise ValueError(
                    f"{name} needs names: pass model.named_parameters() as params, or names=model (Lamb, Came, Lars)"
                )

    def check_exclusions(self, names: Sequence[str]) -> None:
        """Raise for exclusions that match no parameter name, unless a process group is set: a rank may lack it."""
        if self.grad_norm_group is not None or not names:
            return
        others = [] if self.names is None else list(names_of(self.names).values())
        prefix = common_prefix(others)
        all_names = list(dict.fromkeys([*names, *(unwrapped(name, prefix) for name in others)]))
        for option in EXCLUSIONS:
            check_matches(option, getattr(self, option), all_names)

    def refuse_apart(self, holders: Iterable[list[int] | None]) -> None:
        """Raise if parameters are on meshes with different ranks, whose norms over all gradients would differ.

        Experts on such a mesh differ from the parameters on other meshes, copies of tensor parallelism do not; only the
        process group tells.
        """
        if self.grad_norm_group is not None or not self.needs_all_grads:
            return
        meshes = sorted({tuple(ranks) for ranks in holders if ranks is not None})
        if len(meshes) > 1:
            raise ValueError(
                f"{self.all_grads_option} needs one norm on all ranks, but parameters are on meshes of ranks "
                f"{list(meshes[0])} and {list(meshes[1])}. If other ranks hold other parameters, such as experts, give "
                "grad_norm_group=torch.distributed.group.WORLD (Lamb, Came, Lars); if they hold copies, as with tensor "
                'parallelism, give the group of the ranks that hold the shards of one copy, mesh["dp"].get_group()'
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self

    def __reduce__(self) -> Any:
        if self.grad_norm_group is not None:
            raise TypeError("an optimizer with a grad_norm_group cannot be pickled: save state_dict() instead")
        return Settings, tuple(vars(self).values())


CHECKS = checks_of(Settings)
"""The checks of these options."""

OF_THE_WHOLE = frozenset(CHECKS)
"""The names of the options of the whole optimizer."""


def _tensors(params: Iterable[Any]) -> Iterator[Any]:
    """The tensors among parameters, (name, parameter) pairs and groups."""
    for item in params:
        if isinstance(item, dict):
            yield from _tensors(item.get("params", ()))
        else:
            yield item[1] if isinstance(item, tuple) and len(item) == 2 else item


def _wrapper_with_more(params: set[int]) -> str | None:
    """The class of an optimizer among the callers, such as torch's ZeroRedundancyOptimizer or FairScale's OSS.

    It holds more than these parameters, and there are several ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Optimizer):
            held = {id(tensor) for tensor in _tensors(getattr(caller, "param_groups", ()))}
            if params < held:
                return type(caller).__name__
        frame = frame.f_back
    return None
