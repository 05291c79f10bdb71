"""The forward pass that waits for new weights, module by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def users(model: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """The modules of a model, each with the parameters that its `forward` is taken to use.

    An outermost element of a ModuleList, ModuleDict or Sequential uses all parameters inside it, as a module of torch
    such as MultiheadAttention uses those of its children. All other modules use their own parameters, and the model
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


def before_use(model: nn.Module, wait: Callable[[list[Tensor]], None]) -> list[Callable[[], None]]:
    """Call a function before a module uses parameters, in its forward or in its `state_dict()`; return the undoing."""
    handles: list[Any] = []
    for module, params in users(model):
        handles.append(module.register_forward_pre_hook(lambda *_, params=params: wait(params), prepend=True))
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            handle = module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda *_, own=own: wait(own)
            )
            handles.append(handle)
    return [handle.remove for handle in handles]
