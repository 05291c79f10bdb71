"""The common part of the loss scale managers of other systems: a policy and its present state."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bighorn import ExponentialScale, FixedScale, LossScaler, WindowScale
from bighorn._arguments import Check, number

_check_scale = partial(
    number, low=1, high=torch.finfo(torch.float32).max, span="that is at least 1 and that float32 can hold"
)


class LossScaleManager:
    """A loss scale that is updated by hand, or by the scaler that is made from it."""

    def __init__(self, policy: type[FixedScale | WindowScale | ExponentialScale], **values: tuple[str, Any]) -> None:
        """Make the policy of values by our names, each with the name that the other system has for it."""
        checks: dict[str, Check] = {**policy.CHECKS, "init_scale": _check_scale}
        self.policy = policy(**{ours: checks[ours](name, value) for ours, (name, value) in values.items()})
        self._state = self.policy.start()
        self._scaler: LossScaler | None = None

    def get_loss_scale(self) -> float:
        """Return the present scale."""
        return self._state.scale.item() if self._scaler is None else self._scaler.get_scale()

    def loss_scaler(self, **options: Any) -> LossScaler:
        """Return a LossScaler with the policy of this manager, which from now on updates its scale.

        Args:
            **options: Options of LossScaler, besides the policy.

        Raises:
            RuntimeError: The manager has a scaler already, or was updated by hand.
        """
        if self._scaler is not None or self._state != self.policy.start():
            raise RuntimeError("this manager is in use already: make one scaler of it, before the first update")
        self._scaler = LossScaler(self.policy, **options)
        return self._scaler

    def _move(self, *, overflow: bool) -> None:
        if self._scaler is not None:
            raise RuntimeError("the scaler that was made of this manager moves the scale: call its update() alone")
        after = self.policy.next(self._state, torch.tensor(bool(overflow), device="cpu"))
        self._state = after._replace(scale=after.scale.clamp(min=1))
