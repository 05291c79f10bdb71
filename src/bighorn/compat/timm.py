"""The compatibility layer of timm, timm.optim."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

import bighorn
from bighorn._arguments import knows_its_keywords, truth

__all__ = ["Lamb"]


@knows_its_keywords
class Lamb(bighorn.Lamb):
    """timm's Lamb: LAMB with a clip, and no trust ratio where there is no weight decay.

    Args:
        params: Tensors, (name, tensor) pairs, or groups, as `bighorn.Lamb` takes them.
        lr: Learning rate, in any form that `bighorn.Lamb` takes. Default: 1e-3.
        bias_correction: Whether to correct the averages for their start at 0. Default: True.
        betas: Decay of the averages of the gradient and of its square, each in [0, 1). Default: (0.9, 0.999).
        eps: Added to the root of the second moment, at least 0. Default: 1e-6.
        weight_decay: The weight decay, at least 0, in any form that `bighorn.Lamb` takes. Default: 0.01.
        grad_averaging: Whether the first average weighs new gradients by 1 - beta1, not by 1. Default: True.
        max_grad_norm: The 2-norm to which the gradients of all groups are clipped, or None. Default: 1.0.
        trust_clip: Whether the trust ratio is at most 1: LAMBC. Default: False.
        always_adapt: Whether parameters without weight decay have a trust ratio, too. Default: False.
        caution: Whether only elements move whose update agrees in sign with the gradient. Default: False.
        decoupled_decay: Whether weights decay by lr * weight_decay, outside of the update. Default: False.
        corrected_weight_decay: Whether decoupled decay is also multiplied by lr / the constructor's lr. Default: False.
        foreach: Any of timm's values; it has no effect. Default: None.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> import torch
        >>> from bighorn.compat.timm import Lamb
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Lamb(model.parameters(), lr=5e-3, trust_clip=True)
        >>> model(torch.ones(3, 4)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | Iterable[float] | Callable[[int], Any] = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float | Iterable[float] | Callable[[int], Any] = 0.01,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        trust_clip: bool = False,
        always_adapt: bool = False,
        caution: bool = False,
        decoupled_decay: bool = False,
        corrected_weight_decay: bool = False,
        foreach: bool | None = None,  # noqa: ARG002 - timm's signature
    ) -> None:
        decoupled = truth("decoupled_decay", decoupled_decay)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=truth("bias_correction", bias_correction),
            grad_averaging=truth("grad_averaging", grad_averaging),
            max_grad_norm=max_grad_norm,
            trust_ratio_bounds=(0.0, 1.0) if truth("trust_clip", trust_clip) else None,
            always_adapt=truth("always_adapt", always_adapt),
            cautious=truth("caution", caution),
            decay_mode="decoupled" if decoupled else "ratio",
            corrected_weight_decay=truth("corrected_weight_decay", corrected_weight_decay) and decoupled,
        )
