"""Parameters that a framework has replaced: flat tensors in place of a group's parameters, and steps of some groups.

DeepSpeed's ZeRO replaces the parameters of each group by one flat tensor, and steps one group at a time: meanwhile the
optimizer has no other groups.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bighorn.distributed import zero_map
from bighorn.distributed.flat import FlatParams
from bighorn.distributed.sharding import PLAIN
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.flat_tensors import joining
from bighorn.optim.param_groups import label_of
from bighorn.optim.reports import Reports
from bighorn.optim.settings import Settings


@dataclass
class GivenParams:
    """The parameters that a group had when it was added."""

    refs: list[weakref.ref[Tensor]]
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(cls, group: Group) -> GivenParams:
        """Return the present parameters of a group."""
        return cls([weakref.ref(param) for param in group["params"]], [tuple(param.shape) for param in group["params"]])

    def replaced(self, group: Group) -> bool:
        """Whether the group has other parameters. Only the first is compared, since this runs at every step."""
        params = group["params"]
        return bool(params) and (not self.refs or self.refs[0]() is not params[0])

    def flattened(self, group: Group, known: set[int]) -> bool:
        """Whether plain tensors of one dim are in place of other shapes; `known` has ids of all given parameters."""
        params: Sequence[Tensor] = group["params"]
        flat = all(type(param) in PLAIN and param.dim() == 1 and id(param) not in known for param in params)
        return flat and [tuple(param.shape) for param in params] != self.shapes

    def params(self) -> list[Tensor | None]:
        """The parameters; None for one that exists no more."""
        return [ref() for ref in self.refs]


def adopted(
    group: Group, index: int, all_given: Sequence[GivenParams], algorithm: Algorithm[Any], settings: Settings
) -> FlatParams | None:
    """Return the parameters in the flat tensor that has replaced a group's; None if others of their kind have.

    Raises:
        ValueError: No map says what the flat tensor holds, or it cannot be optimized.
    """
    given = all_given[index]
    if not given.flattened(group, {id(param) for each in all_given for param in each.params() if param is not None}):
        return None
    what, params = f"param_groups[{index}]", given.params()
    reason = zero_map.unmapped_reason(params)
    if reason is None and len(group["params"]) > 1:
        reason = "they are several, where DeepSpeed's map is for one"
    if reason is not None:
        raise ValueError(
            f"the {len(params)} parameters of {what} were replaced by {len(group['params'])} flat, whose norms are no "
            f"layer's: {reason}"
        )
    names = [label_of(index, position, group.get("param_names")) for position in range(len(params))]
    layout = zero_map.layout_of(params, names, group["params"][0])
    return joining(layout, group, group["params"], index, algorithm, settings)


def indices_of(groups: list[Group], all_groups: list[Group]) -> tuple[int, ...] | None:
    """The indices of some groups among all; None if one of them is not among these."""
    index_of = {id(group): index for index, group in enumerate(all_groups)}
    indices = [index_of.get(id(group)) for group in groups]
    return tuple(index for index in indices if index is not None) if None not in indices else None


def refuse_partial_norm(settings: Settings, here: int, groups: int) -> None:
    """Raise if a step of some groups would use the norm of their gradients alone.

    Raises:
        ValueError: An option uses the gradients of all groups.
    """
    for name in ("max_grad_norm", "skip_nonfinite"):
        if getattr(settings, name):
            raise ValueError(
                f"{name}={getattr(settings, name)!r} uses all gradients, and this step is of {here} of {groups} "
                "groups, as DeepSpeed's ZeRO steps them: leave it out, and set gradient_clipping in DeepSpeed's "
                "configuration, whose loss scaler skips overflows as well"
            )


class WithFlatTensors(Reports):
    """An optimizer whose groups hold flat tensors, if not at once, then because a framework puts them there."""

    _flat: list[FlatParams | None]
    """The parameters in the flat tensors of each group; None for a group of parameters."""
    _given: list[GivenParams]
    """The parameters of each group when it was added, to notice that a framework has replaced them."""
    _firsts: list[int]
    """The first parameter of each group at the last step, by its `id`."""
    _groups: list[Group]
    """All groups, also while a framework has left only some of them in `param_groups`."""
    _partial: dict[tuple[int, ...], Any]
    """Optimizers that step some of the groups, by the indices of these."""

    @abstractmethod
    def _step(self, parts: list[list[Tensor]] | None) -> None:
        """Take one step."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop everything that belongs to the present state."""

    @abstractmethod
    def _forget_plans(self) -> None:
        """Drop all plans."""

    def _add_flat(self, flat: FlatParams | None, group: Group) -> None:
        """Note the parameters of a group that was added."""
        self._flat.append(flat)
        self._given.append(GivenParams.of(group))
        self._firsts, self._groups = self._first_ids(), self.param_groups

    def _note_params(self) -> None:
        """Note the parameters of all groups."""
        self._given, self._firsts = [GivenParams.of(group) for group in self.param_groups], self._first_ids()

    def _first_ids(self) -> list[int]:
        return [id(group["params"][0]) if group["params"] else 0 for group in self.param_groups]

    def _adopt_replaced(self) -> None:
        """Adopt parameters that a framework has put into the groups; flat tensors need a map of what they hold."""
        flat, given = list(self._flat), list(self._given)
        for index, group in enumerate(self.param_groups):
            if given[index].replaced(group):
                flat[index] = adopted(group, index, self._given, self.algorithm, self._settings)
                given[index] = GivenParams.of(group) if flat[index] is None else given[index]
        self._flat, self._given, self._firsts, self._agreed = flat, given, self._first_ids(), False
        self._forget_plans()

    def _groups_step(self) -> bool:
        """Take a step of the groups that `param_groups` has now; return False if it has others than were added."""
        indices = None if self.param_groups is self._groups else indices_of(self.param_groups, self._groups)
        if indices is None:
            return False
        refuse_partial_norm(self._settings, len(indices), len(self._groups))
        if indices not in self._partial:
            self._partial[indices] = self._of_groups(indices)
        part = self._partial[indices]
        part._step(None)
        for here, index in enumerate(indices):
            self._flat[index], self._given[index] = part._flat[here], part._given[here]
        self._last = tuple(plan for each in self._partial.values() for plan in each._last)
        return True

    def _of_groups(self, indices: tuple[int, ...]) -> Any:
        """Return an optimizer of some groups, which shares their options and state with this one."""
        part = type(self).__new__(type(self))
        part.__dict__.update(self.__dict__, _groups=self.param_groups, _order=[], _agreed=False)
        for name in ("_scheduled", "_flat", "_given", "_firsts"):
            setattr(part, name, [getattr(self, name)[index] for index in indices])
        part._forget()
        return part
