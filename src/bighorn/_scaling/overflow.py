"""Overflow: the gradients that are not finite, and the ranks that share found_inf."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from bighorn._arguments import shortened
from bighorn._distributed import sharding


@dataclass(frozen=True)
class OverflowReport:
    """The gradients that overflowed, with one flag per name, still on the device."""

    names: list[str]
    flags: list[Tensor]
    group: Any

    def describe(self) -> str:
        """The names by rank. All ranks of a group raise in the same step, so that they can exchange names."""
        bad = [name for name, flag in zip(self.names, self.flags, strict=True) if flag.item()]
        if not dist.is_initialized():
            return shortened(bad)
        by_rank = {dist.get_rank(): bad}
        if self.group is not None:
            gathered: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(gathered, bad, self.group)
            by_rank = dict(zip(dist.get_process_group_ranks(self.group), gathered, strict=True))
        return "; ".join(f"{shortened(names)} on rank {rank}" for rank, names in by_rank.items() if names)


def group_of(optimizer: Optimizer) -> Any:
    """The ranks that see different gradients: all, if a parameter is sharded. A rank may lack gradients."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    sharded = any(sharding.is_sharded(param) for group in optimizer.param_groups for param in group["params"])
    return dist.group.WORLD if sharded else None


def local_grads(optimizer: Optimizer, allow_fp16: bool) -> list[Tensor]:
    """This rank's shard of each gradient, real and dense, in the same memory."""
    grads: list[Tensor] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.dtype is torch.float16:
                if not allow_fp16:
                    _refuse_fp16(names_of(optimizer)[len(grads)])
                if param.grad.is_sparse:
                    param.grad = param.grad.coalesce()  # adds up duplicates, which may overflow
            grads.append(_real(sharding.local(param.grad)))
    return grads


def names_of(optimizer: Optimizer) -> list[str]:
    """The names or indices of the parameters that have gradients."""
    return [
        group["param_names"][j] if "param_names" in group else f"param_groups[{i}].params[{j}]"
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
        if param.grad is not None
    ]


def _refuse_fp16(name: str) -> NoReturn:
    raise ValueError(
        f"the gradient of {name} is float16, and would lose its small values if it was unscaled in place: keep "
        "parameters in float32 under autocast, or use an optimizer that unscales inside its step, as Bighorn's do"
    )


def _real(grad: Tensor) -> Tensor:
    values = grad._values() if grad.is_sparse else grad
    if not values.is_complex():
        return values
    return torch.view_as_real(values.conj() if values.is_conj() else values)


def batches(grads: list[Tensor]) -> list[list[Tensor]]:
    """Group gradients by device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_kind[grad.device, grad.dtype].append(grad)
    return list(by_kind.values())


@torch.no_grad()
def unscale(batch: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    """Multiply gradients of one device and dtype. Return 1.0 if one is not finite, else 0.0, on found_inf's device."""
    device = batch[0].device
    flag = torch.zeros_like(found_inf, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(batch), flag, inv_scale.to(device, non_blocking=True))
    return flag.to(found_inf.device, non_blocking=True)
