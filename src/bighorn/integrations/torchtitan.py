"""torchtitan's container of optimizers for any optimizer by its dotted path."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer as Container

__all__ = ["OptimizersContainer"]


class OptimizersContainer(Container):  # type: ignore[misc]
    """torchtitan's container, with dotted paths such as `bighorn.Lamb` as `optimizer_name`.

    torchtitan's own accepts a few names, and passes `fused` and `foreach` to every optimizer. This one passes neither,
    so `implementation` has no effect.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Container.Config):  # type: ignore[misc]
        """The configuration of torchtitan's container, which builds this one."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        factory: Callable[..., Optimizer] = (
            pkgutil.resolve_name(name) if "." in name else Container._resolve_optimizer_factory(name)
        )
        return factory

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        del config
        return {}
