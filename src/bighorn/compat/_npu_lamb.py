"""npu_bridge's LAMB for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from bighorn import Lamb
from bighorn.arguments import knows_its_keywords
from bighorn.compat import _checks

NAMES = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay_rate",
    "betas[0]": "beta_1",
    "betas[1]": "beta_2",
    "eps": "epsilon",
    "pass model.named_parameters() as params, or names=model": "pass params=model.named_parameters()",
}
"""Names and texts of our errors, and their replacements here."""


@knows_its_keywords
class LAMBOptimizer(Lamb):
    """npu_bridge's LAMBOptimizer: version 5 of the paper, with weight decay excluded by name.

    Args:
        learning_rate: The learning rate, in any form that `bighorn.Lamb` takes for `lr`.
        weight_decay_rate: The weight decay, at least 0, in any form that `bighorn.Lamb` takes for `weight_decay`.
            Default: 0.0.
        beta_1: Decay of the average of the gradient, in [0, 1). Default: 0.9.
        beta_2: Decay of the average of its square, in [0, 1). Default: 0.999.
        epsilon: Added to the root of the second moment, at least 0. Default: 1e-6.
        exclude_from_weight_decay: The parameters without weight decay: regular expressions that are searched for in
            parameter names. Default: None.
        params: The parameters, which TensorFlow finds in the graph: `model.named_parameters()`, or groups of such
            pairs. Tensors without names are accepted if nothing is excluded.
        bias_correction: False: as in version 3 of the paper. Default: True.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range, or parameters without names while an exclusion is given.

    Example:
        >>> import torch
        >>> from bighorn.compat.npu_bridge import LAMBOptimizer
        >>> model = torch.nn.Linear(4, 2)
        >>> exclude = ["bias"]
        >>> optimizer = LAMBOptimizer(
        ...     0.01, weight_decay_rate=0.01, exclude_from_weight_decay=exclude, params=model.named_parameters()
        ... )
        >>> model(torch.ones(3, 4)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        learning_rate: float | Tensor | Iterable[float] | Callable[[int], Any],
        weight_decay_rate: float | Iterable[float] | Callable[[int], Any] = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Sequence[str] | None = None,
        *,
        params: ParamsT,
        bias_correction: bool | Literal["lr"] = True,
    ) -> None:
        with _checks.renamed(NAMES):
            super().__init__(
                params,
                learning_rate,
                (beta_1, beta_2),
                epsilon,
                weight_decay_rate,
                bias_correction=bias_correction,
                exclude_from_weight_decay=exclude_from_weight_decay,
            )
