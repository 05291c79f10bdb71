"""Weight-update sharding: each rank keeps the state of whole tensors of its own, steps them, and hands them out."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from bighorn.distributed import sharding

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


@runtime_checkable
class GoesOnRanks(Protocol):
    """An optimizer that can be made anew for a rank's part of the parameters, although its norms span all ranks."""

    def on_ranks(self, groups: list[dict[str, Any]], process_group: Any) -> Optimizer:
        """A fresh optimizer with the same options for this rank's part of each group."""


def shard_update(optimizer: Optimizer, process_group: Any = None) -> ZeroRedundancyOptimizer:
    """The optimizer spread over ranks, each of which holds state for a part of the tensors and steps these.

    The results are those of the optimizer itself after gradients were averaged, as DistributedDataParallel does: a
    global clip (`max_grad_norm`) and `skip_nonfinite` look at all ranks' gradients. State per rank shrinks with their
    number, in whole tensors; a rank may be left without any.

    A ZeroRedundancyOptimizer of one's own with either option is refused, since each rank would look at its gradients
    alone. That cannot be done for options that are not given to it: `functools.partial(Lamb, max_grad_norm=1.0)` is
    called with parameters of one rank as it would be with those of a whole model. Use `shard_update`, or add the ranks:
    `functools.partial(Lamb, max_grad_norm=1.0, process_group=torch.distributed.group.WORLD)`.

    Args:
        optimizer: Which has not stepped yet; it is not used any more. One of Bighorn's, or of `torch.optim`'s.
        process_group: The ranks. Default: None, which is all of them.

    Raises:
        TypeError: Something else than an Optimizer, or than a process group.
        ValueError: It is spread already or has stepped already, its parameters are sharded themselves (FSDP2, tensor
            parallelism), or they differ in dtype, which ZeroRedundancyOptimizer cannot hold.

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
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.13's own, for its torch.jit.script
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
    group = dist.group.WORLD if process_group is None else process_group
    names: dict[Tensor, str] = {
        param: name
        for own in optimizer.param_groups
        for param, name in zip(own["params"], own.get("param_names", ()), strict=False)
    }
    # It would leave all names in a group whose parameters it has divided.
    groups = [{key: value for key, value in own.items() if key != "param_names"} for own in optimizer.param_groups]

    def build(part: list[dict[str, Any]]) -> Optimizer:
        if names:
            part = [own | {"param_names": [names[param] for param in own["params"]]} for own in part]
        if isinstance(optimizer, GoesOnRanks):
            return optimizer.on_ranks(part, group)
        taken = inspect.signature(type(optimizer)).parameters
        return type(optimizer)(part, **{name: value for name, value in optimizer.defaults.items() if name in taken})

    return ZeroRedundancyOptimizer(groups, build, process_group=group)  # type: ignore[arg-type]  # any callable will do
