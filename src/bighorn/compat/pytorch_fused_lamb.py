"""The compatibility layer of LAMBrrr, the package pytorch_fused_lamb."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

import bighorn
from bighorn.arguments import flag, knows_its_keywords

__all__ = ["Lamb"]


@knows_its_keywords
class Lamb(bighorn.Lamb):
    """LAMBrrr's Lamb: version 5 of the paper, with the arguments of torch's Adam.

    Args:
        params: Tensors, (name, tensor) pairs, or groups, as `bighorn.Lamb` takes them; a group may have `amsgrad` too.
        lr: Learning rate, in any form that `bighorn.Lamb` takes. Default: 1e-3.
        betas: Decay of the averages of the gradient and of its square, each in [0, 1). Default: (0.9, 0.999).
        eps: Added to the root of the second moment, at least 0. Default: 1e-8.
        weight_decay: The weight decay, at least 0, in any form that `bighorn.Lamb` takes. Default: 0.0.
        amsgrad: Whether to use the running maximum of the second moment. Default: False.
        maximize: Maximize the objective instead of minimizing it. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> import torch
        >>> from bighorn.compat.pytorch_fused_lamb import Lamb
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Lamb(model.parameters(), lr=1e-3, amsgrad=True)
        >>> model(torch.ones(3, 4)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | Iterable[float] | Callable[[int], Any] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Iterable[float] | Callable[[int], Any] = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, second_moment=_second_moment(amsgrad), maximize=maximize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own, as `bighorn.Lamb.add_param_group`.

        Args:
            param_group: `params`, and any option of a group of `bighorn.Lamb`, or `amsgrad`.
        """
        if isinstance(param_group, dict) and "amsgrad" in param_group:
            param_group = {**param_group, "second_moment": _second_moment(param_group["amsgrad"])}
            del param_group["amsgrad"]
        super().add_param_group(param_group)


def _second_moment(amsgrad: object) -> Literal["adam", "amsgrad"]:
    return "amsgrad" if flag("amsgrad", amsgrad) else "adam"
