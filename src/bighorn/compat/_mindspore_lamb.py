"""mindspore.nn.Lamb."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

import bighorn
from bighorn.arguments import knows_its_keywords
from bighorn.compat import _checks
from bighorn.compat._mindspore import MindSporeOptimizer


@knows_its_keywords
class Lamb(MindSporeOptimizer, bighorn.Lamb):
    """MindSpore's Lamb: version 5 of the paper, with MindSpore's groups and errors, and called with gradients.

    Without groups, weight decay skips parameters whose name contains `beta` or `gamma`. Parameters of torch have no
    names: pass (name, Parameter) pairs, as from `model.named_parameters()`. Parameters without names are decayed, with
    a warning.

    Args:
        params: Parameters or (name, Parameter) pairs; or groups, dicts with `params` and any of `lr`, `weight_decay`
            and `grad_centralization` (True: gradients of 3 or more dims, as of convolutions, lose their mean over dims
            1..). One more dict may have `order_params`: every parameter, in the order in which a step visits them.
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
        beta1 = _checks.floating("beta1", beta1, 0, 1, inside=True)
        beta2 = _checks.floating("beta2", beta2, 0, 1, inside=True)
        eps = _checks.floating("eps", eps, 0, inside=True)
        weight_decay = _checks.weight_decay("weight_decay", weight_decay)
        listed = _checks.parameters(params)
        named = any(isinstance(item, tuple) for item in listed)
        if not named and not isinstance(listed[0] if listed else {}, dict) and weight_decay != 0:
            warnings.warn(
                "params have no names, so weight_decay spares none of them, not even what MindSpore would by 'beta' or "
                "'gamma' in its name: pass model.named_parameters()",
                stacklevel=3,
            )
        with _checks.renamed({"lr": "learning_rate"}):
            super().__init__(
                listed,
                learning_rate,
                (beta1, beta2),
                eps,
                weight_decay,
                exclude_from_weight_decay=_is_norm if named else None,
            )

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
