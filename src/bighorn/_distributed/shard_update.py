"""Weight-update sharding: each rank keeps the state of some whole tensors, steps them, and sends them to the others."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from bighorn._distributed import sharding
from bighorn._distributed.step_in_parts import BighornOptimizer

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


def shard_update(optimizer: Optimizer, process_group: Any = None) -> ZeroRedundancyOptimizer:
    """Distribute an optimizer over ranks: each rank keeps the state of some tensors and steps them.

    The results equal the optimizer on one process with averaged gradients: a global clip (`max_grad_norm`) and
    `skip_nonfinite` use the gradients of all ranks. The state per rank shrinks with the number of ranks, in whole
    tensors; a rank may have no tensor.

    A ZeroRedundancyOptimizer that you construct with either option is refused, since each rank would use only its own
    gradients. Use `shard_update`, or add the ranks:
    `functools.partial(Lamb, max_grad_norm=1.0, grad_norm_group=torch.distributed.group.WORLD)`.

    Args:
        optimizer: An optimizer of Bighorn or of `torch.optim` that has not stepped yet; it is not used any more.
        process_group: The ranks. Default: None, which is all of them.

    Raises:
        TypeError: An argument is not an Optimizer, or not a process group.
        ValueError: The optimizer is distributed already or has stepped already, its parameters are sharded themselves
            (FSDP2, tensor parallelism, flat tensors), or they differ in dtype, which ZeroRedundancyOptimizer does not
            support.

    Source: Ascend's NPUDistributedOptimizer with `is_weight_update_sharding`; torch's ZeroRedundancyOptimizer.

    Example:
        >>> import torch
        >>> from bighorn import Lamb
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = shard_update(Lamb(model.parameters(), lr=0.01, max_grad_norm=1.0))
        >>> model(torch.ones(4, 3)).mean().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from torch 2.13 itself, for its torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, not {process_group!r}")
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ValueError("optimizer is a ZeroRedundancyOptimizer, spread over ranks already: use it as it is")
    if optimizer.state:
        raise ValueError("optimizer has state already, which would be lost: shard it before its first step")
    dtypes = sorted({str(p.dtype) for group in optimizer.param_groups for p in group["params"]})
    if len(dtypes) > 1:
        raise ValueError(
            f"optimizer holds parameters of {' and '.join(dtypes)}, but ZeroRedundancyOptimizer takes one dtype only: "
            "make an optimizer for each of them"
        )
    if any(sharding.is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer holds parameters that are sharded already, and so is their state: use it as it is, without "
            "shard_update"
        )
    ranks = dist.group.WORLD if process_group is None else process_group
    names: dict[Tensor, str] = {
        param: name
        for group in optimizer.param_groups
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    # ZeroRedundancyOptimizer would keep all names in a group whose parameters it has divided.
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in optimizer.param_groups]

    def build(part: list[dict[str, Any]]) -> Optimizer:
        if names:
            part = [group | {"param_names": [names[param] for param in group["params"]]} for group in part]
        if isinstance(optimizer, BighornOptimizer):
            return optimizer.on_ranks(part, ranks)
        taken = inspect.signature(type(optimizer)).parameters
        return type(optimizer)(part, **{name: value for name, value in optimizer.defaults.items() if name in taken})

    return ZeroRedundancyOptimizer(groups, build, process_group=ranks)  # type: ignore[arg-type]  # any callable works
