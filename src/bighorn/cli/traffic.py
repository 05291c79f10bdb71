"""The bytes of device memory that a step of an optimizer reads and writes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bighorn import Came, Lamb


def bytes_once(optimizer: Optimizer, state: int) -> int:
    """Return the lower bound of a step's bytes: weights and state read and written once, gradients read once.

    Args:
        optimizer: An optimizer, each of whose parameters has a gradient of the parameter's dtype.
        state: The bytes of its state.
    """
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    return 3 * sum(param.nbytes for param in params) + 2 * state


def bytes_moved(optimizer: Optimizer, clip: bool) -> int | None:
    """Return the bytes that the Triton kernels of this package read and write in all passes, as in docs/gpu-results.md.

    The sums that a pass keeps for the next one, less than 2% of the parameters, are not counted.

    Args:
        optimizer: An optimizer after its first step.
        clip: Whether gradients are clipped, which reads them once more.

    Returns:
        The bytes; None for an optimizer that is not of this package or is served by another backend.
    """
    if not isinstance(optimizer, Lamb | Came):
        return None
    if any(line.split()[2] != "triton" for line in optimizer.explain().splitlines() if line.startswith("group")):
        return None
    count = _lamb if isinstance(optimizer, Lamb) else _came
    pairs: list[tuple[dict[str, Any], Tensor]] = [
        (group, param) for group in optimizer.param_groups for param in group["params"]
    ]
    return sum(count(group, param.nbytes, optimizer.state[param]) + clip * param.nbytes for group, param in pairs)


def _lamb(group: Mapping[str, Any], weight: int, state: Mapping[str, Tensor]) -> int:
    """Count one pass for moments and norms, and, with a trust ratio, a second one for the weights."""
    kept = sum(value.nbytes for value in state.values())
    one_pass = 3 * weight + 2 * kept
    return one_pass if group["adam"] or not group["adapt"] else one_pass + weight + kept


def _came(group: Mapping[str, Any], weight: int, state: Mapping[str, Tensor]) -> int:
    """Count four passes (g^2, u^2, residuals, weights), or two if unfactored (second moment, weights).

    A master is only in the last pass.
    """
    exp_avg = state["exp_avg"].nbytes
    others = 2 * (sum(value.nbytes for value in state.values()) - exp_avg)
    if "exp_avg_sq" in state:
        return 4 * weight + 2 * exp_avg + state["exp_avg_sq"].nbytes + others
    # Blocks of codes that are not rows of tiles have a separate pass.
    stacked = group["factor"] == "last_two" and state["exp_avg"].dim() > 2
    own_pass = stacked and state["exp_avg"].dtype == torch.int8
    return 5 * weight + 3 * exp_avg + others + own_pass * (weight + exp_avg)
