"""The forward pass that waits for new weights, module by module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def users(model: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """The modules of a model, each with the parameters that its `forward` is taken to use.

    An outermost element of a ModuleList, ModuleDict or Sequential uses all parameters inside it, as a module of torch
    such as MultiheadAttention uses its children's parameters. All other modules use their own parameters, and the model
    uses all that are in no element.
    """
    outside: dict[Tensor, None] = {}
    found: list[tuple[nn.Module, list[Tensor]]] = []

    def visit(module: nn.Module) -> None:
        own: list[Tensor] = list(module.parameters(recurse=False))
        outside.update(dict.fromkeys(own))
        if own and module is not model:
            found.append((module, list(own)))
        for child in module.children():
            if isinstance(module, CONTAINERS):
                found.append((child, list(child.parameters())))
            else:
                visit(child)

    visit(model)
    yield model, list(outside)
    yield from found


class BeforeUse:
    """A hook that calls a method before a module uses parameters. A copy of it, in a copy of the model, does nothing.

    Args:
        wait: A weak reference to the method, so that the hook does not keep its object. Default: None.
        params: The parameters. Default: ().
    """

    def __init__(
        self, wait: weakref.WeakMethod[Callable[[list[Tensor]], None]] | None = None, params: Any = ()
    ) -> None:
        self._wait, self._params = wait, params

    def __call__(self, *_: object) -> None:
        """Call the method."""
        if self._wait is not None and (wait := self._wait()) is not None:
            wait(self._params)

    def __reduce__(self) -> tuple[type[BeforeUse], tuple[()]]:
        """Return what copy and pickle make instead."""
        return BeforeUse, ()


def before_use(model: nn.Module, wait: weakref.WeakMethod[Callable[[list[Tensor]], None]]) -> list[RemovableHandle]:
    """Call a method before a module uses parameters, in its forward or in its `state_dict()`; return the hooks."""
    handles: list[RemovableHandle] = []
    for module, params in users(model):
        handles.append(module.register_forward_pre_hook(BeforeUse(wait, params), prepend=True))
    for module in model.modules():
        if own := list(module.parameters(recurse=False)):
            handles.append(module.register_state_dict_pre_hook(BeforeUse(wait, own)))  # type: ignore[no-untyped-call]
    return handles
