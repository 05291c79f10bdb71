"""The common part of the optimizers of MindSpore and MindFormers: their groups, and calls with gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from bighorn.arguments import about
from bighorn.compat import _checks


class MindSporeOptimizer(Optimizer):
    """A base class to be listed before one of our optimizers."""

    MOST_DECAY: ClassVar[float] = math.inf
    """The largest weight decay of a group."""

    if TYPE_CHECKING:  # our optimizer has them
        _scheduled: list[dict[str, Any]]

        def in_order(self) -> list[Tensor]: ...

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All parameters, in the order of the gradients of a call: that of `order_params`, if given."""
        return tuple(self.in_order())

    def get_lr(self) -> float | tuple[float, ...]:
        """Return the learning rate of the next step: one number, or one for each of `parameters` if groups differ."""
        rates = {}
        for group, scheduled in zip(self.param_groups, self._scheduled, strict=True):
            rate = group["lr"]
            if "lr" in scheduled and not scheduled["lr"].overwritten(rate):
                rate = scheduled["lr"].schedule(group["schedule_step"])
            rates.update({id(param): float(rate) for param in group["params"]})
        each = tuple(rates[id(param)] for param in self.parameters)
        return each if len(set(each)) > 1 else each[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: A group, as in `params` of the constructor.
        """
        with about(f"group {len(self.param_groups)}"):
            super().add_param_group(_checks.mindspore_group(param_group, self.MOST_DECAY))

    def _step_with(self, gradients: object) -> int:
        """Step with these gradients instead of those in `.grad`, and return the number of parameters."""
        params = self.parameters
        with _lent(params, _checked(params, gradients)):
            self.step()
        return len(params)


@contextmanager
def _lent(params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """Set each parameter's `.grad` to the gradient of the same index, and restore it on exit."""
    before = [(param.grad, getattr(param, "grad_dtype", param.dtype)) for param in params]
    try:
        for param, gradient in zip(params, gradients, strict=True):
            _put(param, gradient, param.dtype if gradient is None else gradient.dtype)
        yield
    finally:
        for param, (gradient, dtype) in zip(params, before, strict=True):
            _put(param, gradient, dtype)


def _put(param: Tensor, gradient: Tensor | None, dtype: object) -> None:
    """Set `.grad`. Since torch 2.10, a gradient of another dtype than the parameter's has to be allowed first."""
    param.grad = None
    if getattr(param, "grad_dtype", dtype) != dtype:
        param.grad_dtype = dtype  # type: ignore[assignment]
    param.grad = gradient


def _checked(params: Sequence[Tensor], gradients: object) -> Sequence[Tensor | None]:
    """Return the gradients, if each parameter has one (or None) that fits."""
    if not isinstance(gradients, (tuple, list)):
        raise TypeError(f"gradients must be a tuple of tensors, not {type(gradients).__name__}")
    if len(gradients) != len(params):
        raise ValueError(f"there are {len(gradients)} gradients for {len(params)} parameters: give one for each")
    for i, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
        if gradient is None:
            continue
        if not isinstance(gradient, Tensor):
            raise TypeError(f"gradients[{i}] must be a tensor or None, not {type(gradient).__name__}")
        if gradient.shape != param.shape or gradient.device != param.device:
            raise ValueError(
                f"gradients[{i}] has shape {tuple(gradient.shape)} on {gradient.device}, its parameter "
                f"{tuple(param.shape)} on {param.device}: give them in the order of optimizer.parameters"
            )
    return gradients
