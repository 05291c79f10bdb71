"""The compatibility layer of Ascend's torch_npu."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import ParamsT

from bighorn import Lamb
from bighorn._arguments import knows_its_keywords, number, truth

__all__ = ["NpuFusedLamb"]


@knows_its_keywords
class NpuFusedLamb(Lamb):
    """torch_npu's NpuFusedLamb, on any device: LAMB without bias correction, with the weight norm clamped to 10.

    This is version 3 of the paper with the bounds of its experiments. Parameters may move to other memory, devices and
    dtypes between steps; a `Parameter` that replaces another in a module is not in any optimizer.

    Args:
        params: Tensors, (name, tensor) pairs, or groups, as `bighorn.Lamb` takes them.
        lr: Learning rate, in any form that `bighorn.Lamb` takes. Default: 1e-3.
        betas: Decay of the averages of the gradient and of its square, each in [0, 1). Default: (0.9, 0.999).
        eps: Added to the root of the second moment, at least 0. Default: 1e-6.
        weight_decay: The weight decay, at least 0, in any form that `bighorn.Lamb` takes. Default: 0.
        adam: Whether to fix the trust ratio to 1: Adam, with decay as in LAMB and no bias correction. Default: False.
        use_global_grad_norm: Whether to scale gradients down to the 2-norm 1, taken over all groups. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range.

    Example:
        >>> import torch
        >>> from bighorn.compat.torch_npu import NpuFusedLamb
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = NpuFusedLamb(model.parameters(), lr=0.01, use_global_grad_norm=True)
        >>> model(torch.ones(3, 4)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | Iterable[float] | Callable[[int], Any] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float | Iterable[float] | Callable[[int], Any] = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            adam=truth("adam", adam),
            bias_correction=False,
            weight_norm_bounds=(0, 10),
            max_grad_norm=1.0 if truth("use_global_grad_norm", use_global_grad_norm) else None,
        )

    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients of all groups down to a norm, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            max_norm: The largest norm, at least 0.
            norm_type: The order of the norm, which may be infinite. Default: 2.

        Returns:
            The norm before, of shape [].

        Raises:
            TypeError: `max_norm` is not a number.
            ValueError: `max_norm` is negative, or not finite.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        return clip_grad_norm_(params, number("max_norm", max_norm), norm_type)
