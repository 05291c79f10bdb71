"""What the optimizers of MindSpore and MindFormers share: their groups, and being called with gradients."""

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
    """To be inherited before one of ours."""

    MOST_DECAY: ClassVar[float] = math.inf
    """The largest weight decay of a group."""

    if TYPE_CHECKING:  # ours has it

        def in_order(self) -> list[Tensor]: ...

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All parameters, in the order in which a call wants their gradients: that of `order_params`, if given."""
        return tuple(self.in_order())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: As in `params` of the constructor.
        """
        with about(f"group {len(self.param_groups)}"):
            super().add_param_group(_checks.mindspore_group(param_group, self.MOST_DECAY))

    def _step_with(self, gradients: object) -> int:
        """Step with these gradients instead of those in `.grad`; returns how many parameters there are."""
        params = self.parameters
        with _lent(params, _checked(params, gradients)):
            self.step()
        return len(params)


@contextmanager
def _lent(params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """For a while each parameter's `.grad` is the gradient in its place; then it is what it was."""
    before = [(param.grad, getattr(param, "grad_dtype", param.dtype)) for param in params]
    try:
        for param, gradient in zip(params, gradients, strict=True):
            _put(param, gradient, param.dtype if gradient is None else gradient.dtype)
        yield
    finally:
        for param, (gradient, dtype) in zip(params, before, strict=True):
            _put(param, gradient, dtype)


def _put(param: Tensor, gradient: Tensor | None, dtype: object) -> None:
    """Set `.grad`. From torch 2.10 on a gradient of another dtype than the parameter's has to be allowed first."""
    param.grad = None
    if getattr(param, "grad_dtype", dtype) != dtype:
        param.grad_dtype = dtype  # type: ignore[assignment]
    param.grad = gradient


def _checked(params: Sequence[Tensor], gradients: object) -> Sequence[Tensor | None]:
    """The gradients, if there is one for each parameter (or None) and it fits."""
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
