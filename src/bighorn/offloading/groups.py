"""The options of groups that exist twice: over the model's parameters, and over the host's."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class SharedOptions:
    """The same options in two lists of groups: programs write into the first, the optimizer reads the second.

    Args:
        groups: The groups with the model's parameters.
        optimizer: The optimizer, whose groups have the host's.
    """

    def __init__(self, groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
        self._groups, self._optimizer = groups, optimizer
        self._seen = [dict(group) for group in groups]

    def exchange(self) -> None:
        """Give the optimizer the options that a program has written, and show those that the optimizer has changed.

        A tensor is always given, since a program may write into it; its values are those of the program.
        """
        for index, (ours, its) in enumerate(zip(self._groups, self._optimizer.param_groups, strict=True)):
            seen = self._seen[index]
            for name in seen.keys() - ours.keys():
                its.pop(name, None)
            for name, value in ours.items():
                if name != "params" and (isinstance(value, Tensor) or name not in seen or value is not seen[name]):
                    its[name] = value.cpu() if isinstance(value, Tensor) else value
            self._show(index)

    def read(self) -> None:
        """Show the optimizer's options, after a checkpoint was loaded."""
        for index, (ours, its) in enumerate(zip(self._groups, self._optimizer.param_groups, strict=True)):
            for name in ours.keys() - its.keys():
                del ours[name]
            for name in [name for name, value in ours.items() if isinstance(value, Tensor)]:
                del ours[name]
            self._show(index)

    def _show(self, index: int) -> None:
        ours, its = self._groups[index], self._optimizer.param_groups[index]
        for name, value in its.items():
            if name != "params" and not isinstance(ours.get(name), Tensor):
                ours[name] = value
        self._seen[index] = dict(ours)
