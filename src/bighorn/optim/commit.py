"""What a step multiplies gradients with, and whether it writes anything: on their devices, without a host wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bighorn.optim.algorithm import Group
from bighorn.optim.plan import Plan
from bighorn.optim.settings import Settings

LARGEST_NORM = 2.0**53
"""Up to this 2-norm of all gradients no square leaves float32, in which moments are.

Nor does a sum of 2^18 squares of CAME's updates, which can be as large as the largest gradient.
"""


def scale_and_commit(
    settings: Settings, grad_scale: Tensor | None, found_inf: Tensor | None, square_sum: Callable[[], Tensor]
) -> tuple[Tensor | float, Tensor | None]:
    """The factor of all gradients, and whether the step is written (None: it is).

    Args:
        settings: Whether gradients are clipped, and whether a step whose gradients are not finite is skipped.
        grad_scale: What a gradient scaler has multiplied them with.
        found_inf: Not 0 if it found some that are not finite.
        square_sum: The sum of all their squares, 0-dim; it is not called where nobody asks for it.
    """
    scale: Tensor | float = 1.0 if grad_scale is None else grad_scale.double().reciprocal().reshape(())
    commit = None if found_inf is None else (found_inf == 0).reshape(())
    if settings.max_grad_norm is not None or settings.skip_nonfinite:
        norm = square_sum().sqrt() * scale
        largest = LARGEST_NORM
        if settings.max_grad_norm is not None:
            clip = settings.max_grad_norm / norm
            scale = scale * torch.where(norm > settings.max_grad_norm, clip, torch.ones_like(clip))
            if settings.max_grad_norm <= LARGEST_NORM:
                largest = torch.finfo(norm.dtype).max  # what is beyond is clipped
        if settings.skip_nonfinite:
            fits = norm <= largest
            commit = fits if commit is None else commit & fits
    return scale, commit


def square_sum_of(plans: list[Plan], wait: Callable[[int], None], groups: list[Group], settings: Settings) -> Tensor:
    """The sum of all gradients' squares; with a process group, over all its ranks, those without gradients too."""
    sums: list[Tensor] = []
    for part, plan in enumerate(plans):
        wait(part)
        sums += plan.square_sums()
    if sums:
        total = torch.stack([part_sum.to(sums[0].device) for part_sum in sums]).sum()
    else:
        devices = [param.device for group in groups for param in group["params"]]
        total = torch.zeros((), dtype=torch.float64, device=devices[0] if devices else "cpu")
    if settings.process_group is not None:
        torch.distributed.all_reduce(total, group=settings.process_group)
    return total
