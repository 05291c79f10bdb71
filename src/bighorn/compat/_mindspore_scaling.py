"""MindSpore's loss scale managers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from bighorn import FixedScale, LossScaler, WindowScale
from bighorn.compat._loss_scale import LossScaleManager, translated


class FixedLossScaleManager(LossScaleManager):
    """MindSpore's FixedLossScaleManager, over `bighorn.FixedScale`: the scale is constant.

    Args:
        loss_scale: The scale, at least 1. Default: 128.0.
        drop_overflow_update: Whether a step whose gradients are not finite is skipped. Default: True.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: `loss_scale` is below 1.
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        if not isinstance(drop_overflow_update, bool):
            raise TypeError(f"drop_overflow_update must be True or False, not {drop_overflow_update!r}")
        super().__init__(translated(FixedScale, init_scale=("loss_scale", loss_scale)))
        self._drop_overflow_update = drop_overflow_update

    def get_drop_overflow_update(self) -> bool:
        """Whether a step whose gradients are not finite is skipped."""
        return self._drop_overflow_update

    def update_loss_scale(self, overflow: bool) -> None:
        """Do nothing, since the scale is constant.

        Args:
            overflow: Whether a gradient of the step was not finite.
        """
        self._move(overflow=overflow)

    def get_update_cell(self) -> None:
        """Return None if `drop_overflow_update` is False, as in MindSpore.

        Raises:
            NotImplementedError: `drop_overflow_update` is True.
        """
        if self._drop_overflow_update:
            _refuse_cell()

    def loss_scaler(self, **options: Any) -> LossScaler:
        """Return a LossScaler with the scale and the skipping of this manager, as `LossScaleManager.loss_scaler`."""
        return super().loss_scaler(**{"skip_on_overflow": self._drop_overflow_update, **options})


class DynamicLossScaleManager(LossScaleManager):
    """MindSpore's DynamicLossScaleManager, over `bighorn.WindowScale`: the scale shrinks at every overflow.

    Args:
        init_loss_scale: The initial scale, at least 1. Default: 16777216.
        scale_factor: The factor by which the scale grows, and the divisor by which it shrinks, above 1. Default: 2.
        scale_window: The number of consecutive steps without an overflow after which the scale grows. Default: 2000.

    Raises:
        TypeError: A value is not a number, or `scale_window` is not an integer.
        ValueError: A value is out of range.
    """

    MOST_OVERFLOWS = 1000
    """MindSpore's own limit of consecutive overflows."""

    def __init__(self, init_loss_scale: float = 2**24, scale_factor: float = 2, scale_window: int = 2000) -> None:
        policy = translated(
            WindowScale,
            init_scale=("init_loss_scale", init_loss_scale),
            growth_factor=("scale_factor", scale_factor),
            growth_interval=("scale_window", scale_window),
        )
        super().__init__(replace(policy, backoff_factor=1 / scale_factor))
        self._overflows = 0

    def get_drop_overflow_update(self) -> bool:
        """Return True: a step whose gradients are not finite is skipped."""
        return True

    def update_loss_scale(self, overflow: bool) -> None:
        """Update the scale.

        Args:
            overflow: Whether a gradient of the step was not finite.

        Raises:
            RuntimeError: More than 1000 consecutive steps overflowed.
        """
        overflows = self._overflows + 1 if overflow else 0
        if overflows > self.MOST_OVERFLOWS:
            raise RuntimeError(
                f"{overflows} steps in a row overflowed, more than {self.MOST_OVERFLOWS}; the scale is "
                f"{self.get_loss_scale():g}: the model itself diverges"
            )
        self._move(overflow=overflow)
        self._overflows = overflows

    def get_update_cell(self) -> NoReturn:
        """Raise, since update cells are not supported.

        Raises:
            NotImplementedError: Always.
        """
        _refuse_cell()

    def loss_scaler(self, **options: Any) -> LossScaler:
        """Return a LossScaler with the policy of this manager, which raises after 1000 overflows in a row."""
        return super().loss_scaler(**{"max_consecutive_overflows": self.MOST_OVERFLOWS, **options})


def _refuse_cell() -> NoReturn:
    raise NotImplementedError(
        "a MindSpore cell has no counterpart here: call update_loss_scale(overflow) after each step, or let "
        "loss_scaler() scale and update"
    )
