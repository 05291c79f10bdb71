"""The compatibility layer of NVIDIA's apex, apex.optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bighorn import Lamb
from bighorn._arguments import knows_its_keywords, truth

__all__ = ["FusedLAMB", "FusedMixedPrecisionLamb"]


@knows_its_keywords
class FusedLAMB(Lamb):
    """apex's FusedLAMB, on any device: LAMB with a clip, and no trust ratio where there is no weight decay.

    Each group has apex's `step`, the number of `step()` calls, for schedulers that read it.

    Args:
        params: Tensors, (name, tensor) pairs, or groups, as `bighorn.Lamb` takes them.
        lr: Learning rate, in any form that `bighorn.Lamb` takes. Default: 1e-3.
        bias_correction: Whether to correct the averages for their start at 0. Default: True.
        betas: Decay of the averages of the gradient and of its square, each in [0, 1). Default: (0.9, 0.999).
        eps: Added to the root of the second moment, at least 0. Default: 1e-6.
        weight_decay: The weight decay, at least 0, in any form that `bighorn.Lamb` takes. Default: 0.01.
        amsgrad: Only False, as in apex. Default: False.
        adam_w_mode: Whether weight decay is part of the update; False adds it to the gradient. Default: True.
        grad_averaging: Whether the first average weighs new gradients by 1 - beta1, not by 1. Default: True.
        set_grad_none: Only True; call `zero_grad(set_to_none=False)` otherwise. Default: True.
        max_grad_norm: The 2-norm to which the gradients of all groups are clipped, or None. Default: 1.0.
        use_nvlamb: Whether parameters without weight decay have a trust ratio, too. Default: False.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range, `amsgrad`, or `set_grad_none=False`.

    Example:
        >>> import torch
        >>> from bighorn.compat.apex import FusedLAMB
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedLAMB(model.parameters(), lr=1e-3, use_nvlamb=True)
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
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if not truth("set_grad_none", set_grad_none):
            raise ValueError("set_grad_none=False: leave it out, and call zero_grad(set_to_none=False)")
        if truth("amsgrad", amsgrad):
            raise ValueError('amsgrad=True is refused by apex, too: use bighorn.Lamb(second_moment="amsgrad")')
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=truth("bias_correction", bias_correction),
            grad_averaging=truth("grad_averaging", grad_averaging),
            max_grad_norm=max_grad_norm,
            decay_mode="ratio" if truth("adam_w_mode", adam_w_mode) else "l2",
            always_adapt=truth("use_nvlamb", use_nvlamb),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._count_steps()

    def _take_step(self, parts: Any = None) -> None:
        super()._take_step(parts)
        self._count_steps()

    def _count_steps(self) -> None:
        # NVIDIA's PolyWarmUpScheduler reads it; without it the learning rate stays at its first value.
        for group in self.param_groups:
            group["step"] = group["schedule_step"]


@knows_its_keywords
class FusedMixedPrecisionLamb(FusedLAMB):
    """apex's FusedMixedPrecisionLamb, on any device: FusedLAMB that can keep float32 weights for 16-bit parameters.

    Args:
        params: Tensors, (name, tensor) pairs, or groups, as `bighorn.Lamb` takes them.
        lr: As for FusedLAMB. Default: 1e-3.
        step: Only 0: a checkpoint restores the count of steps. Default: 0.
        bias_correction: As for FusedLAMB. Default: True.
        betas: As for FusedLAMB. Default: (0.9, 0.999).
        eps: As for FusedLAMB. Default: 1e-6.
        weight_decay: As for FusedLAMB. Default: 0.01.
        amsgrad: Only False. Default: False.
        adam_w_mode: As for FusedLAMB. Default: True.
        grad_averaging: As for FusedLAMB. Default: True.
        max_grad_norm: As for FusedLAMB. Default: 1.0.
        use_nvlamb: As for FusedLAMB. Default: False.
        reduced_precision_dtype: The dtype of parameters that have float32 weights in the state, or None for none; the
            moments are float32 in both cases. Default: None.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range, `amsgrad`, or a `step` other than 0.

    Example:
        >>> import torch
        >>> from bighorn.compat.apex import FusedMixedPrecisionLamb
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> optimizer = FusedMixedPrecisionLamb(model.parameters(), reduced_precision_dtype=torch.bfloat16)
        >>> model(torch.ones(3, 4).bfloat16()).square().sum().backward()
        >>> optimizer.step()
    """

    _step_supports_amp_scaling = True  # as in apex: torch's GradScaler refuses float16 gradients without it

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | Iterable[float] | Callable[[int], Any] = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float | Iterable[float] | Callable[[int], Any] = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if step != 0:
            raise ValueError(f"step={step!r} must be 0: load_state_dict restores the counts of a checkpoint")
        if reduced_precision_dtype is not None:
            if not isinstance(reduced_precision_dtype, torch.dtype):
                raise TypeError(
                    f"reduced_precision_dtype must be a torch.dtype or None, not {reduced_precision_dtype!r}"
                )
            params = _with_masters(params, reduced_precision_dtype)
        options = (amsgrad, adam_w_mode, grad_averaging, True, max_grad_norm, use_nvlamb)
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, *options)


def _with_masters(params: ParamsT, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return groups of one dtype each; groups whose parameters have this dtype keep float32 weights."""
    given: list[Any] = list(params)
    groups = []
    for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        first = members[0][1] if members and isinstance(members[0], tuple) else members[0] if members else None
        masters = {"weight_rounding": "master"} if getattr(first, "dtype", None) == dtype else {}
        groups.append({**group, "params": members, **masters})
    return groups
