"""npu_bridge's loss scale managers."""

from __future__ import annotations

from bighorn import ExponentialScale, FixedScale
from bighorn.compat._loss_scale import LossScaleManager, translated


class FixedLossScaleManager(LossScaleManager):
    """npu_bridge's FixedLossScaleManager, over `bighorn.FixedScale`: the scale is constant.

    Args:
        loss_scale: The scale, at least 1.

    Raises:
        TypeError: `loss_scale` is not a number.
        ValueError: `loss_scale` is below 1.
    """

    def __init__(self, loss_scale: float) -> None:
        super().__init__(translated(FixedScale, init_scale=("loss_scale", loss_scale)))

    def update_loss_scale(self, finite_grads: bool) -> None:
        """Do nothing, since the scale is constant.

        Args:
            finite_grads: Whether all gradients of the step were finite.
        """
        self._move(overflow=not finite_grads)


class ExponentialUpdateLossScaleManager(LossScaleManager):
    """npu_bridge's ExponentialUpdateLossScaleManager, over `bighorn.ExponentialScale`.

    Args:
        init_loss_scale: The initial scale, at least 1. The scale never falls below 1, and never overflows float32.
        incr_every_n_steps: The number of consecutive finite steps after which the scale grows.
        decr_every_n_nan_or_inf: The number of steps that were not finite after which the scale shrinks. Default: 2.
        incr_ratio: The factor by which the scale grows, above 1. Default: 2.
        decr_ratio: The factor by which the scale shrinks, between 0 and 1. Default: 0.8.

    Raises:
        TypeError: A value is not a number, or a number of steps is not an integer.
        ValueError: A value is out of range.

    Example:
        >>> from bighorn.compat.npu_bridge import ExponentialUpdateLossScaleManager
        >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=1000, decr_ratio=0.5)
        >>> for finite in (False, True, False):
        ...     manager.update_loss_scale(finite)
        >>> manager.get_loss_scale()
        512.0
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        policy = translated(
            ExponentialScale,
            init_scale=("init_loss_scale", init_loss_scale),
            growth_factor=("incr_ratio", incr_ratio),
            backoff_factor=("decr_ratio", decr_ratio),
            growth_interval=("incr_every_n_steps", incr_every_n_steps),
            backoff_interval=("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf),
        )
        super().__init__(policy)

    def update_loss_scale(self, finite_grads: bool) -> None:
        """Update the scale.

        Args:
            finite_grads: Whether all gradients of the step were finite.
        """
        self._move(overflow=not finite_grads)
