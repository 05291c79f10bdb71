"""Plugins by which axolotl trains with Lamb and Came."""

from __future__ import annotations

from typing import Any, ClassVar

from axolotl.integrations.base import BasePlugin

from bighorn import Came, Lamb

__all__ = ["CamePlugin", "LambPlugin"]


class _Plugin(BasePlugin):  # type: ignore[misc]
    optimizer: ClassVar[type[Lamb] | type[Came]]

    def create_optimizer(self, cfg: Any, trainer: Any) -> Lamb | Came:
        """Return an optimizer with `learning_rate`, `weight_decay` and the dict `optim_args` of the configuration."""
        named = [(name, param) for name, param in trainer.model.named_parameters() if param.requires_grad]
        decays = set(trainer.get_decay_parameter_names(trainer.model))
        groups: list[dict[str, Any]] = [
            {"params": [pair for pair in named if pair[0] in decays], "weight_decay": float(cfg.weight_decay or 0)},
            {"params": [pair for pair in named if pair[0] not in decays], "weight_decay": 0.0},
        ]
        return self.optimizer(groups, lr=float(cfg.learning_rate), **(cfg.optim_args or {}))


class LambPlugin(_Plugin):
    """Train with `bighorn.Lamb`."""

    optimizer = Lamb


class CamePlugin(_Plugin):
    """Train with `bighorn.Came`."""

    optimizer = Came
