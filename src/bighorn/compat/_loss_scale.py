"""The common part of the loss scale managers of other systems: a policy and its present state."""

from __future__ import annotations

import re
from numbers import Real
from typing import Any, TypeVar

import torch

from bighorn import ExponentialScale, FixedScale, LossScaler, WindowScale

P = TypeVar("P", FixedScale, WindowScale, ExponentialScale)


class LossScaleManager:
    """A loss scale that is updated by hand, or by the scaler that is made from it."""

    def __init__(self, policy: FixedScale | WindowScale | ExponentialScale) -> None:
        self.policy = policy
        self._state = policy.start()
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


def translated(policy: type[P], **arguments: tuple[str, Any]) -> P:
    """Return a policy from (name in the other system, value) by our names; errors contain the other names."""
    name, value = arguments["init_scale"]
    if isinstance(value, Real) and value < 1:
        raise ValueError(f"{name}={value!r} is out of range: a loss scale must be at least 1")
    try:
        return policy(**{ours: value for ours, (_, value) in arguments.items()})
    except (TypeError, ValueError) as error:
        ours, rest = re.findall(r"^(\w+)(.*)", str(error))[0]
        raise type(error)(arguments[ours][0] + rest) from None
