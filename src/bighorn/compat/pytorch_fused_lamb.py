"""The compatibility layer of LAMBrrr, the package pytorch_fused_lamb."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

import bighorn
from bighorn._arguments import knows_its_keywords, truth

__all__ = ["Lamb", "lamb"]


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
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            second_moment=_second_moment(amsgrad),
            maximize=truth("maximize", maximize),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own, as `bighorn.Lamb.add_param_group`.

        Args:
            param_group: `params`, and any option of a group of `bighorn.Lamb`, or `amsgrad`.
        """
        if isinstance(param_group, dict) and "amsgrad" in param_group:
            param_group = {**param_group, "second_moment": _second_moment(param_group["amsgrad"])}
            del param_group["amsgrad"]
        super().add_param_group(param_group)


def lamb(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    has_complex: bool = False,
    *,
    amsgrad: bool,
    beta1: float,
    beta2: float,
    lr: float | Tensor,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """LAMBrrr's functional form: one step of `Lamb`, in place, with state that the caller keeps.

    Each call prepares the step anew, so an optimizer is faster.

    Args:
        params: The parameters.
        grads: The gradient of each of them.
        exp_avgs: The average of each gradient.
        exp_avg_sqs: The average of the square of each gradient.
        max_exp_avg_sqs: The maximum of that average for `amsgrad`, else an empty list.
        state_steps: The steps that each parameter has made, in tensors of one element.
        has_complex: Whether a parameter is complex, which has no effect here. Default: False.
        amsgrad: As for `Lamb`.
        beta1: The first of `betas`.
        beta2: The second of `betas`.
        lr: As for `Lamb`.
        weight_decay: As for `Lamb`.
        eps: As for `Lamb`.
        maximize: As for `Lamb`.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range, or lists that do not have one tensor for each parameter.

    Example:
        >>> import torch
        >>> from bighorn.compat.pytorch_fused_lamb import lamb
        >>> param, steps = torch.ones(2), torch.zeros(())
        >>> options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "lr": 0.5, "weight_decay": 0.0, "eps": 1e-8}
        >>> averages = [torch.zeros(2)], [torch.zeros(2)], []
        >>> lamb([param], [torch.ones(2)], *averages, [steps], **options, maximize=False)
        >>> param, steps
        (tensor([0.5000, 0.5000]), tensor(1.))
    """
    truth("has_complex", has_complex)
    states = {"step": state_steps, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    if truth("amsgrad", amsgrad):
        states["max_exp_avg_sq"] = max_exp_avg_sqs
    for name, tensors in {"grad": grads, **states}.items():
        if len(tensors) != len(params):
            raise ValueError(f"there are {len(tensors)} tensors of {name} for {len(params)} params: give one for each")
    if not params:
        return
    targets = [param.detach() for param in params]  # so that the parameters keep their .grad
    optimizer = Lamb(targets, lr, (beta1, beta2), eps, weight_decay, amsgrad, maximize=maximize)
    for i, target in enumerate(targets):
        target.grad = grads[i]
        optimizer.state[target] = {name: tensors[i] for name, tensors in states.items()}
    optimizer.step()
    for i, target in enumerate(targets):
        for name, tensors in states.items():
            after = optimizer.state[target][name]
            if after.data_ptr() != tensors[i].data_ptr():
                tensors[i].copy_(after)


def _second_moment(amsgrad: object) -> Literal["adam", "amsgrad"]:
    return "amsgrad" if truth("amsgrad", amsgrad) else "adam"
