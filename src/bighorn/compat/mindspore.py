"""The compatibility layer of MindSpore: mindspore.nn, and the loss scale managers of mindspore.amp."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Parameter

import bighorn
from bighorn import FixedScale, LossScaler, WindowScale, schedules
from bighorn._arguments import Check, flag, integer, knows_its_keywords, number, positive
from bighorn.compat._loss_scale import LossScaleManager
from bighorn.compat._mindspore import MindSporeOptimizer, check_decay, check_params, check_rate, floating

__all__ = [
    "CosineDecayLR",
    "DynamicLossScaleManager",
    "ExponentialDecayLR",
    "FixedLossScaleManager",
    "InverseDecayLR",
    "Lamb",
    "LearningRateSchedule",
    "NaturalExpDecayLR",
    "PolynomialDecayLR",
    "WarmUpLR",
]

_fraction = partial(number, high=1, above=True, below=True)


@knows_its_keywords
class Lamb(MindSporeOptimizer, bighorn.Lamb):
    """MindSpore's Lamb: version 5 of the paper, with MindSpore's groups and errors, and a call with gradients.

    Without groups, weight decay skips parameters whose name contains `beta` or `gamma`. Parameters of torch have no
    names: pass (name, Parameter) pairs, as from `model.named_parameters()`. Parameters without names are decayed, with
    a warning.

    Args:
        params: Parameters or (name, Parameter) pairs; or groups, dicts with `params` and any of `lr`, `weight_decay`
            and `grad_centralization` (True: gradients of 3 or more dims, as of convolutions, lose their mean over dims
            1..). One more dict may have `order_params`: every parameter, in the order in which a call takes gradients.
        learning_rate: A number, a tensor of one element, an iterable or a 1-D tensor, whose entry t - 1 holds at step
            t, or a schedule, called with the step (0 for the first).
        beta1: Decay of the average of the gradient, a float in (0, 1). Default: 0.9.
        beta2: Decay of the average of its square, a float in (0, 1). Default: 0.999.
        eps: Added to the root of the second moment, a float above 0. Default: 1e-6.
        weight_decay: A number, at least 0, or a schedule. Default: 0.0.

    Raises:
        TypeError: A value of a wrong type, or an element of `params` that is neither Parameter nor dict.
        ValueError: A value out of range, such an element (the error is both), an unknown key of a group, or an
            `order_params` that does not name every parameter once.

    Example:
        >>> import torch
        >>> from bighorn.compat.mindspore import Lamb, PolynomialDecayLR
        >>> model = torch.nn.Linear(4, 2)
        >>> schedule = PolynomialDecayLR(learning_rate=0.1, end_learning_rate=0.01, decay_steps=4, power=0.5)
        >>> optim = Lamb(model.named_parameters(), learning_rate=schedule, weight_decay=0.01)
        >>> loss = model(torch.ones(3, 4)).square().sum()
        >>> optim(torch.autograd.grad(loss, optim.parameters))
        (True, True)
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[tuple[str, Parameter]] | Iterable[dict[str, Any]],
        learning_rate: float | Tensor | Iterable[float] | Callable[[int], Any],
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float | Callable[[int], Any] = 0.0,
    ) -> None:
        betas = floating("beta1", beta1, _fraction), floating("beta2", beta2, _fraction)
        eps = floating("eps", eps, positive)
        learning_rate = check_rate("learning_rate", learning_rate)
        weight_decay = check_decay("weight_decay", weight_decay)
        listed = check_params(params)
        named = any(isinstance(item, tuple) for item in listed)
        if not named and not isinstance(listed[0] if listed else {}, dict) and weight_decay != 0:
            warnings.warn(
                "params have no names, so weight_decay spares none of them, not even what MindSpore would by 'beta' or "
                "'gamma' in its name: pass model.named_parameters()",
                stacklevel=3,
            )
        exclude = _is_norm if named else None
        super().__init__(listed, learning_rate, betas, eps, weight_decay, exclude_from_weight_decay=exclude)

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[bool, ...]:
        """Step with these gradients. Gradients in `.grad` are neither used nor changed.

        Args:
            gradients: One gradient for each of `parameters`, in the same order; None for a parameter that is not
                stepped.

        Returns:
            True for each parameter.

        Raises:
            TypeError: The gradients are not a tuple of tensors.
            ValueError: The gradients do not fit the parameters, or as for `step`.
        """
        return (True,) * self._step_with(gradients)


def _is_norm(name: str, param: Tensor) -> bool:
    del param
    return "beta" in name or "gamma" in name


# ---- schedules --------------------------------------------------------------------------------------------


class LearningRateSchedule(schedules.Schedule):
    """The base of the schedules with MindSpore's names and arguments."""

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "learning_rate": partial(floating, check=positive),
        "end_learning_rate": partial(floating, check=number),
        "max_lr": partial(floating, check=positive),
        "min_lr": partial(floating, check=number),
        "decay_rate": partial(floating, check=positive),
        "power": partial(floating, check=positive),
        "decay_steps": partial(integer, least=1),
        "warmup_steps": partial(integer, least=1),
        "is_stair": flag,
        "update_decay_steps": flag,
    }


@knows_its_keywords
@dataclass(frozen=True)
class PolynomialDecayLR(LearningRateSchedule):
    """MindSpore's PolynomialDecayLR, as `bighorn.schedules.Polynomial`; it is called with the step, counted from 0.

    Args:
        learning_rate: The value at step 0, a float above 0.
        end_learning_rate: The value at the end, a float, at least 0.
        decay_steps: The first step that gets `end_learning_rate`, an int, at least 1.
        power: The exponent, a float above 0.
        update_decay_steps: Whether, after each `decay_steps` steps, the value jumps up and falls again. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> schedule = PolynomialDecayLR(learning_rate=0.1, end_learning_rate=0.01, decay_steps=4, power=0.5)
        >>> round(schedule(2), 6)
        0.07364
    """

    learning_rate: float
    end_learning_rate: float
    decay_steps: int
    power: float
    update_decay_steps: bool = False

    def _at(self, step: int) -> float:
        return schedules.Polynomial(
            self.learning_rate, self.decay_steps, self.end_learning_rate, self.power, self.update_decay_steps
        )(step)


@knows_its_keywords
@dataclass(frozen=True)
class WarmUpLR(LearningRateSchedule):
    """MindSpore's WarmUpLR, as `bighorn.schedules.WarmUp`: from 0 at the first step.

    Args:
        learning_rate: The value after the warm-up, a float above 0.
        warmup_steps: The first step that gets `learning_rate`, an int, at least 1.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> WarmUpLR(learning_rate=0.1, warmup_steps=2).as_list(4)
        [0.0, 0.05, 0.1, 0.1]
    """

    learning_rate: float
    warmup_steps: int

    def _at(self, step: int) -> float:
        return schedules.WarmUp(self.learning_rate, self.warmup_steps)(step)


@knows_its_keywords
@dataclass(frozen=True)
class CosineDecayLR(LearningRateSchedule):
    """MindSpore's CosineDecayLR, as `bighorn.schedules.Cosine`.

    Args:
        min_lr: The value at the end, a float, at least 0.
        max_lr: The value at step 0, a float above `min_lr`.
        decay_steps: The first step that gets `min_lr`, an int, at least 1.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> [round(lr, 3) for lr in CosineDecayLR(min_lr=0.01, max_lr=0.1, decay_steps=4).as_list(6)]
        [0.1, 0.087, 0.055, 0.023, 0.01, 0.01]
    """

    min_lr: float
    max_lr: float
    decay_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr >= self.max_lr:
            raise ValueError(f"min_lr={self.min_lr!r} must be below max_lr={self.max_lr!r}; min_lr is the first")

    def _at(self, step: int) -> float:
        return schedules.Cosine(self.max_lr, self.decay_steps, self.min_lr)(step)


@knows_its_keywords
@dataclass(frozen=True)
class ExponentialDecayLR(LearningRateSchedule):
    """MindSpore's ExponentialDecayLR, as `bighorn.schedules.Exponential`.

    Args:
        learning_rate: The value at step 0, a float above 0.
        decay_rate: The factor of `decay_steps` steps, a float above 0.
        decay_steps: The number of steps of one decay, an int, at least 1.
        is_stair: Whether the value falls once in `decay_steps` steps and not at each. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> round(ExponentialDecayLR(learning_rate=0.1, decay_rate=0.9, decay_steps=4)(2), 8)
        0.09486833
    """

    learning_rate: float
    decay_rate: float
    decay_steps: int
    is_stair: bool = False

    def _at(self, step: int) -> float:
        return schedules.Exponential(self.learning_rate, self.decay_rate, self.decay_steps, self.is_stair)(step)


@knows_its_keywords
@dataclass(frozen=True)
class NaturalExpDecayLR(LearningRateSchedule):
    """MindSpore's NaturalExpDecayLR, as `bighorn.schedules.NaturalExp`: it falls by e^-decay_rate at each step.

    MindSpore's documentation divides the step by `decay_steps`; its code does not, and this class follows the code.

    Args:
        learning_rate: The value at step 0, a float above 0.
        decay_rate: The decay per step, a float above 0.
        decay_steps: The length of a stair, an int, at least 1.
        is_stair: Whether the value falls once in `decay_steps` steps and not at each. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> NaturalExpDecayLR(0.1, 0.9, 4, True)(2)
        0.1
    """

    learning_rate: float
    decay_rate: float
    decay_steps: int
    is_stair: bool = False

    def _at(self, step: int) -> float:
        return schedules.NaturalExp(self.learning_rate, self.decay_rate, self.decay_steps if self.is_stair else 1)(step)


@knows_its_keywords
@dataclass(frozen=True)
class InverseDecayLR(LearningRateSchedule):
    """MindSpore's InverseDecayLR, as `bighorn.schedules.Inverse`.

    Args:
        learning_rate: The value at step 0, a float above 0.
        decay_rate: The amount that `decay_steps` steps add to the divisor, a float above 0.
        decay_steps: The number of steps of one decay, an int, at least 1.
        is_stair: Whether the value falls once in `decay_steps` steps and not at each. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> InverseDecayLR(learning_rate=0.1, decay_rate=2.0, decay_steps=2).as_list(3)
        [0.1, 0.05, 0.03333333333333333]
    """

    learning_rate: float
    decay_rate: float
    decay_steps: int
    is_stair: bool = False

    def _at(self, step: int) -> float:
        return schedules.Inverse(self.learning_rate, self.decay_rate, self.decay_steps, self.is_stair)(step)


# ---- loss scale managers ----------------------------------------------------------------------------------


class _Manager(LossScaleManager):
    """A loss scale manager that may drop the update of a step that overflowed."""

    _drop_overflow_update = True

    def get_drop_overflow_update(self) -> bool:
        """Whether a step whose gradients are not finite is skipped."""
        return self._drop_overflow_update

    def update_loss_scale(self, overflow: bool) -> None:
        """Update the scale, unless it is constant.

        Args:
            overflow: Whether a gradient of the step was not finite.
        """
        self._move(overflow=overflow)

    def get_update_cell(self) -> None:
        """Return None if no update is dropped, as in MindSpore.

        Raises:
            NotImplementedError: Updates are dropped, which takes an update cell.
        """
        if self._drop_overflow_update:
            raise NotImplementedError(
                "a MindSpore cell has no counterpart here: call update_loss_scale(overflow) after each step, or let "
                "loss_scaler() scale and update"
            )


class FixedLossScaleManager(_Manager):
    """MindSpore's FixedLossScaleManager, a constant scale (`bighorn.FixedScale`). Train with its `loss_scaler()`.

    Args:
        loss_scale: The scale, at least 1. Default: 128.0.
        drop_overflow_update: Whether a step whose gradients are not finite is skipped. Default: True.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: `loss_scale` is below 1.
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        self._drop_overflow_update = flag("drop_overflow_update", drop_overflow_update)
        super().__init__(FixedScale, init_scale=("loss_scale", loss_scale))

    def loss_scaler(self, **options: Any) -> LossScaler:
        """Return a LossScaler with the scale and the skipping of this manager, as `LossScaleManager.loss_scaler`."""
        return super().loss_scaler(**{"skip_on_overflow": self._drop_overflow_update, **options})


class DynamicLossScaleManager(_Manager):
    """MindSpore's DynamicLossScaleManager, whose scale shrinks at every overflow (`bighorn.WindowScale`).

    Train with its `loss_scaler()`.

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
        scale_factor = WindowScale.CHECKS["growth_factor"]("scale_factor", scale_factor)
        super().__init__(
            WindowScale,
            init_scale=("init_loss_scale", init_loss_scale),
            growth_factor=("scale_factor", scale_factor),
            growth_interval=("scale_window", scale_window),
            backoff_factor=("1 / scale_factor", 1 / scale_factor),
        )
        self._overflows = 0

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
        super().update_loss_scale(overflow)
        self._overflows = overflows

    def loss_scaler(self, **options: Any) -> LossScaler:
        """Return a LossScaler with the policy of this manager, which raises after 1000 overflows in a row."""
        return super().loss_scaler(**{"max_consecutive_overflows": self.MOST_OVERFLOWS, **options})
