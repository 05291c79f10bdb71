"""The compatibility layer of MindFormers, mindformers.core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

import bighorn
from bighorn._arguments import between, came_beta1, came_beta3, flag, knows_its_keywords, number, positive
from bighorn.compat._mindspore import MindSporeOptimizer, check_decay, check_params, check_rate, floating
from bighorn.schedules import RelativeStep

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Came"]


@knows_its_keywords
class Came(MindSporeOptimizer, bighorn.Came):
    """MindFormers' Came, as documented there: published factoring, and b2 = 1 - t ** -decay_rate at step t.

    Args:
        params: Parameters or (name, Parameter) pairs; or groups, dicts with `params` and any of `lr`, `weight_decay`
            and `grad_centralization`, and one more with `order_params`, as for `bighorn.compat.mindspore.Lamb`.
        learning_rate: A number, a tensor of one element, an iterable or a 1-D tensor, whose entry t - 1 holds at step
            t, or a schedule. Required unless relative_step is True. Default: None.
        eps: Added to the squared gradient; the least root mean square of a parameter in `scale_parameter`; added to the
            instability. Floats above 0. Default: (1e-30, 1e-3, 1e-16).
        clip_threshold: The update is scaled down to this root mean square, above 0. Default: 1.0.
        decay_rate: A float in [0, 1]. Default: 0.8.
        beta1: Decay of the momentum, a float in (0, 1). Default: 0.9.
        beta3: Decay of the averages of the instability, a float in [0, 1). Default: 0.99.
        weight_decay: A float in [0, 1], or a schedule. Default: 0.0.
        scale_parameter: Whether to multiply the learning rate by the root mean square of the parameter. Default: False.
        relative_step: Whether the learning rate is min(1e-2, 1 / sqrt(t)) at step t. Default: False.
        warmup_init: With relative_step, whether it is min(1e-6 t, 1 / sqrt(t)). Default: False.
        compression: Whether to keep the momentum in float16. Default: False.
        loss_scale: The divisor of gradients, above 0; do not use it together with a scaler, which divides them too.
            Default: 1.

    Raises:
        TypeError: A value of a wrong type, or an element of `params` that is neither Parameter nor dict.
        ValueError: A value out of range, an unknown key of a group, learning_rate together with relative_step or
            neither of them, or warmup_init without relative_step.

    Example:
        >>> import torch
        >>> from bighorn.compat.mindformers import Came
        >>> model = torch.nn.Linear(4, 2)
        >>> optim = Came(model.named_parameters(), learning_rate=0.1, loss_scale=1024)
        >>> loss = model(torch.ones(3, 4)).square().sum()
        >>> optim(torch.autograd.grad(1024 * loss, optim.parameters))
        tensor(True)
    """

    MOST_DECAY = 1.0

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[tuple[str, Parameter]] | Iterable[dict[str, Any]],
        learning_rate: float | Tensor | Iterable[float] | Callable[[int], Any] | None = None,
        eps: Sequence[float] = (1e-30, 1e-3, 1e-16),
        clip_threshold: float = 1.0,
        decay_rate: float = 0.8,
        beta1: float = 0.9,
        beta3: float = 0.99,
        weight_decay: float | Callable[[int], Any] = 0.0,
        scale_parameter: bool = False,
        relative_step: bool = False,
        warmup_init: bool = False,
        compression: bool = False,
        loss_scale: float = 1,
    ) -> None:
        self.loss_scale = number("loss_scale", loss_scale, above=True)
        if not isinstance(eps, (tuple, list)):
            raise TypeError(f"eps must be three floats in a tuple, not {eps!r} ({type(eps).__name__})")
        if len(eps) != 3:
            raise ValueError(f"eps={eps!r} must be three floats: for squared gradient, parameter scale, instability")
        eps1, eps2, eps3 = (floating(f"eps[{i}]", value, positive) for i, value in enumerate(eps))
        params = check_params(params)
        learning_rate = _learning_rate(learning_rate, relative_step, warmup_init)
        if learning_rate is None and not all(isinstance(group, dict) for group in params):
            raise ValueError("learning_rate is missing: give one, or set relative_step=True")
        beta1, beta3 = floating("beta1", beta1, came_beta1), floating("beta3", beta3, came_beta3)
        if not callable(weight_decay):
            weight_decay = floating("weight_decay", weight_decay, between(0, 1))
        super().__init__(
            params,
            learning_rate,
            (beta1, 0.999, beta3),  # decay_rate replaces the second
            (eps1, eps3),
            check_decay("weight_decay", weight_decay),
            clip_threshold=clip_threshold,
            factor="last_two",
            decay_rate=floating("decay_rate", decay_rate, between(0, 1)),
            scale_parameter=scale_parameter,
            scale_eps=eps2,
            state_dtype=torch.float16 if flag("compression", compression) else None,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; `lr` is not one of them with relative_step.

        Args:
            param_group: `params`, and any of `lr`, `weight_decay` and `grad_centralization`.

        Raises:
            RuntimeError: A parameter is in another group already; this error is a ValueError too.
            TypeError: A value of a wrong type.
            ValueError: An unknown key, a value out of range, or an `lr` with more or fewer values than another one.
        """
        relative_step = isinstance(self._default_schedules.get("lr"), RelativeStep)
        if relative_step and isinstance(param_group, dict) and "lr" in param_group:
            raise ValueError(f"relative_step=True computes the learning rate: leave lr={param_group['lr']!r} out")
        super().add_param_group(param_group)

    def on_ranks(self, groups: list[dict[str, Any]], process_group: Any) -> Self:
        """Return the base class's optimizer for this rank's share of the parameters, with the same `loss_scale`."""
        part = super().on_ranks(groups, process_group)
        part.loss_scale = self.loss_scale
        return part

    def whole_step_reason(self) -> str | None:
        """The reason why every gradient is needed before the first parameter is written, or None."""
        if self.loss_scale != 1:
            return f"loss_scale={self.loss_scale:g} divides the gradients of a whole step; leave it at 1"
        return super().whole_step_reason()

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        """Step with these gradients. Gradients in `.grad` are neither used nor changed.

        Args:
            gradients: One gradient for each of `parameters`, in the same order; None for a parameter that is not
                stepped.

        Returns:
            A tensor that is True.

        Raises:
            TypeError: The gradients are not a tuple of tensors.
            ValueError: The gradients do not fit the parameters, or as for `step`.
        """
        self._step_with(gradients)
        return torch.tensor(True)

    # torch's scalers set this attribute, by which a step divides gradients, during a call; otherwise it does not exist.

    @property
    def grad_scale(self) -> Tensor:
        """The divisor of gradients in `step`: `loss_scale`, or the scale that a scaler has set for this step."""
        if self.loss_scale != 1:
            return torch.tensor(self.loss_scale, dtype=torch.float64, device="cpu")
        if "grad_scale" in self.__dict__:
            handed_over: Tensor = self.__dict__["grad_scale"]
            return handed_over
        raise AttributeError("no scaler has handed its scale over")

    @grad_scale.setter
    def grad_scale(self, scale: Tensor) -> None:
        if self.loss_scale != 1:
            raise RuntimeError(
                f"loss_scale={self.loss_scale:g} divides the gradients, and so does the scaler that steps this "
                "optimizer: leave loss_scale at 1 with it, or scale the loss by hand"
            )
        self.__dict__["grad_scale"] = scale

    @grad_scale.deleter
    def grad_scale(self) -> None:
        del self.__dict__["grad_scale"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "loss_scale": self.loss_scale}


def _learning_rate(learning_rate: Any, relative_step: object, warmup_init: object) -> Any:
    """Return the learning rate, or the schedule for `relative_step`."""
    warmup_init = flag("warmup_init", warmup_init)
    if not flag("relative_step", relative_step):
        if warmup_init:
            raise ValueError("warmup_init=True warms up the learning rate of relative_step: set relative_step=True too")
        return None if learning_rate is None else check_rate("learning_rate", learning_rate)
    if learning_rate is not None:
        raise ValueError(f"relative_step=True computes the learning rate: leave learning_rate={learning_rate!r} out")
    return RelativeStep(warmup_init)
