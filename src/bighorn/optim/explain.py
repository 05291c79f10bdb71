"""Reports of an optimizer: the backend of each tensor, the size of the state, and the metrics of the last step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import kernels
from bighorn.distributed.sharding import local
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.param_info import ParamInfo
from bighorn.optim.state import STEP_BYTES, local_view, real_view, same_layout
from bighorn.optim.step_plan import StepPlan

Figures = tuple[tuple[str, ...], Tensor, Tensor, Tensor, Tensor]


def explained(
    infos: Iterable[ParamInfo], groups: list[Group], algorithm: Algorithm[Any], backend: str
) -> dict[int, list[str]]:
    """Return lines by group, one for each kind of tensor: its backend, the reason, and what makes its steps slower.

    Raises:
        ValueError: The requested backend does not serve a tensor.
    """
    kinds: dict[tuple[int, str, str, str, str, str], list[Tensor]] = {}
    for info in infos:
        view, index = info.here(local_view(info.param)), info.variant.group
        options = algorithm.kernel_options(groups[index], info.variant)
        name, why = kernels.pick(backend, view, options, info.row_shard)
        kind = index, name, str(view.device), str(view.dtype), why, _slower(info, view, name)
        kinds.setdefault(kind, []).append(view)
    lines: dict[int, list[str]] = {}
    for (index, name, device, dtype, why, slower), tensors in kinds.items():
        lines.setdefault(index, []).append(
            f"group {index}: {name:<9} {len(tensors)} tensors, {sum(t.numel() for t in tensors):,} elements of "
            f"{dtype.removeprefix('torch.')} on {device} ({why}){slower}"
        )
    return lines


def _slower(info: ParamInfo, view: Tensor, backend: str) -> str:
    """Return what makes the steps of a parameter slower, with the remedy; empty if nothing does."""
    if not info.fits_kernels(view):
        way = "read and written in pieces" if backend == kernels.SERVES_STRIDED else "copied at each step"
        return f"; slower, {way}: its memory has gaps or another order, as p.data = p.data.contiguous() has not"
    grad = info.param.grad
    if grad is None or grad.layout is not torch.strided or grad.shape != info.param.shape or info.flat:
        return ""
    if same_layout(real_view(local(grad).resolve_conj()), view):
        return ""
    return "; slower: its gradient has other strides than the parameter, which torch.empty_like(p) would have"


def bytes_of_state(infos: Iterable[ParamInfo]) -> dict[str, int]:
    """The bytes of state on this rank by label, added up for equal labels. Frozen parameters have no state."""
    sizes: dict[str, int] = {}
    for info in infos:
        if isinstance(info.param, Parameter) and not info.param.requires_grad:
            continue
        state = {name: kept.like(local_view(info.param)) for name, kept in info.spec.items()}
        size = STEP_BYTES + sum(kept.nbytes for kept in info.state_here(state).values())
        sizes[info.label] = sizes.get(info.label, 0) + size
    return sizes


def figures(plans: Sequence[StepPlan]) -> Figures:
    """The labels of the rows of the last step, three metrics of each row, and the learning rate of the step."""
    pieces = [plan.figures() for plan in plans]
    table = torch.zeros(0, 4, dtype=torch.float32, device="cpu")
    if pieces:
        table = torch.cat([piece.to(pieces[0].device) for piece in pieces])
    first, second, third, lr = table.unbind(dim=1)
    return tuple([label for plan in plans for label in plan.step_labels()]), first, second, third, lr
