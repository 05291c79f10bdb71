"""What an optimizer says of itself: who serves which tensors, how large its state is, what the last step did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import kernels
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.param_info import ParamInfo, row_shard
from bighorn.optim.state import STEP_BYTES, local_view
from bighorn.optim.step_plan import StepPlan

Figures = tuple[tuple[str, ...], Tensor, Tensor, Tensor, Tensor]


def explained(infos: Iterable[ParamInfo], groups: list[Group], algorithm: Algorithm[Any], backend: str) -> str:
    """One line for each kind of tensor: its backend, and why.

    Raises:
        ValueError: The backend that is asked for does not serve a tensor.
    """
    kinds: dict[tuple[int, str, str, str, str], list[Tensor]] = {}
    for info in infos:
        view, index = local_view(info.param), info.variant.group
        options = algorithm.kernel_options(groups[index], info.variant)
        name, why = kernels.pick(backend, view, options, row_shard(info.param, info.stacked))
        kinds.setdefault((index, name, str(view.device), str(view.dtype), why), []).append(view)
    lines = [
        f"group {index}: {name:<9} {len(tensors)} tensors, {sum(t.numel() for t in tensors):,} elements of "
        f"{dtype.removeprefix('torch.')} on {device} ({why})"
        for (index, name, device, dtype, why), tensors in kinds.items()
    ]
    return "\n".join(lines)


def bytes_of_state(infos: Iterable[ParamInfo], groups: list[Group], algorithm: Algorithm[Any]) -> dict[str, int]:
    """By a parameter's label: how large its state will be here, those of one name added up. Frozen ones get none."""
    sizes: dict[str, int] = {}
    for info in infos:
        if isinstance(info.param, Parameter) and not info.param.requires_grad:
            continue
        spec, here = algorithm.state_spec(groups[info.variant.group], info.param), local_view(info.param)
        size = STEP_BYTES + sum(kept.like(here).nbytes for kept in spec.values())
        sizes[info.label] = sizes.get(info.label, 0) + size
    return sizes


def figures(plans: Sequence[StepPlan]) -> Figures:
    """Names, and for each of them three figures of the last step and the learning rate that it was taken with."""
    pieces = [plan.figures() for plan in plans]
    table = torch.zeros(0, 4, dtype=torch.float32, device="cpu")
    if pieces:
        table = torch.cat([piece.to(pieces[0].device) for piece in pieces])
    first, second, third, lr = table.unbind(dim=1)
    return tuple([label for plan in plans for label in plan.step_labels()]), first, second, third, lr
