"""The map of Megatron-LM's distributed optimizer: which elements of a parameter each of its flat tensors holds.

Megatron (core/optimizer/distrib_optimizer.py) divides each bucket of its buffers among the ranks of data parallelism. A
rank's range of a parameter becomes a tensor of its own, which the inner optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn._distributed.flat import FlatLayout, Fragment

OF_ADAM = ("lr", "weight_decay")
"""The options of the inner optimizer that Megatron's groups keep, since its scheduler writes them."""

SAVED = {"exp_avg", "exp_avg_sq", "step"}
"""The state that Megatron's own checkpoints hold, if they are sharded by ranks."""


def megatron_groups(distributed: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of Megatron-LM's distributed optimizer, with the layouts of their flat tensors.

    An optimizer of these groups replaces the Adam that Megatron has made:
    `distributed.optimizer = Lamb(megatron_groups(distributed), ...)`. Groups keep `lr`, `weight_decay` and the keys
    that Megatron has added. A rank that holds no part of a group has an empty flat tensor with an empty gradient.

    Megatron's own checkpoints hold two averages of each element, as Lamb has, and only those that are sharded by ranks
    restore step counts. From here on, Megatron's methods that would save any other state raise a ValueError.

    Args:
        distributed: A `DistributedOptimizer`, after Megatron has made it and before its first step.

    Raises:
        TypeError: It is not a `DistributedOptimizer` with `gbuf_ranges`.
        ValueError: Its flat tensors are not the ranges of whole parameters: tensor parallelism has cut these, or the
            inner optimizer holds the float32 weights (`use_precision_aware_optimizer`). Or its maps lack a parameter.
    """
    if not hasattr(distributed, "gbuf_ranges"):
        raise TypeError(
            "distributed must be Megatron's DistributedOptimizer with gbuf_ranges, not "
            f"{type(distributed).__name__}: use --use-distributed-optimizer, and for a ChainedOptimizer each of its "
            "chained_optimizers"
        )
    names, ranges = _names(distributed.model_chunks), _ranges(distributed.gbuf_ranges)
    tensor_parallel = [getattr(buffer, "tp_group", None) for buffer in distributed.buffers]
    cut_up = any(group is not None and group.size() > 1 for group in tensor_parallel)
    groups = []
    for index, group in enumerate(distributed.optimizer.param_groups):
        params = [*distributed.model_fp32_groups[index], *distributed.model_float16_groups[index]]
        tensors, fragments = list(group["params"]), []
        if len(tensors) != len(params):
            raise ValueError(
                f"distributed.optimizer has {len(tensors)} tensors in group {index}, and Megatron's groups have "
                f"{len(params)} parameters: call megatron_groups once, on the optimizer that Megatron made"
            )
        for param, tensor in zip(params, tensors, strict=True):
            if param not in names or param not in ranges:
                where = "gbuf_ranges" if param in names else "model_chunks"
                raise ValueError(
                    f"distributed.{where} lacks a parameter of shape {tuple(param.shape)} of group {index}: call "
                    "megatron_groups before parameters are replaced or added"
                )
            if cut_up and getattr(param, "tensor_model_parallel", False):
                raise ValueError(
                    f"{names[param]} is a part of a layer, which tensor parallelism has cut up, so that the norm of no "
                    "layer is known: use tensor_model_parallel_size 1"
                )
            held = ranges[param]
            if tensor is None or tensor.numel() != held.size or tensor.dtype != torch.float32:
                raise ValueError(
                    f"the inner optimizer has no float32 weights of {names[param]}: leave out "
                    "use_precision_aware_optimizer"
                )
            if not tensor.is_leaf:  # a view of a float32 parameter, which torch's optimizers take if it keeps gradients
                tensor.retain_grad()
            fragments.append([Fragment(names[param], tuple(param.shape), held.size, offset=held.start)])
        if not tensors:
            tensors, fragments = [_empty(distributed)], [[]]
        dropped = distributed.optimizer.defaults.keys() - set(OF_ADAM)
        kept = {name: value for name, value in group.items() if name not in dropped}
        layout = FlatLayout(fragments, distributed.data_parallel_group)
        groups.append({**kept, "params": tensors, "flat_layout": layout})
    _refuse_to_save(distributed, "get_parameter_state_dp_zero", set())  # its counterpart loads no step count (0.16.1)
    _refuse_to_save(distributed, "sharded_state_dict", SAVED)
    return groups


def _refuse_to_save(distributed: Any, name: str, saved: set[str]) -> None:
    """Make a method of Megatron's optimizer raise if the state has other names than `saved`."""
    method: Callable[..., Any] = getattr(distributed, name)

    def checked(*args: Any, **kwargs: Any) -> Any:
        names = {key for state in distributed.optimizer.state.values() for key in state}
        if names and names != saved:
            raise ValueError(
                f"Megatron could not load what its {name} would save of {type(distributed.optimizer).__name__}, whose "
                f"state is {', '.join(sorted(names))}: pass --no-save-optim, and save the optimizer on each rank "
                "yourself, as docs/sharding.md shows"
            )
        return method(*args, **kwargs)

    setattr(distributed, name, checked)


def _names(chunks: Any) -> dict[Tensor, str]:
    """The name of each parameter without wrappers; with several chunks of the model, their numbers come first."""
    return {
        param: name.removeprefix("module.").removeprefix("module.") if len(chunks) == 1 else f"{index}.{name}"
        for index, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }


def _ranges(gbuf_ranges: Any) -> dict[Tensor, Any]:
    """The range of each parameter that this rank holds."""
    return {
        param: held["param"]
        for by_dtype in gbuf_ranges
        for buckets in by_dtype.values()
        for bucket in buckets
        for param, held in bucket["param_map"].items()
    }


def _empty(distributed: Any) -> Parameter:
    device = next(param.device for chunk in distributed.model_chunks for param in chunk.parameters())
    flat = Parameter(torch.empty(0, dtype=torch.float32, device=device))
    flat.grad = torch.empty_like(flat)
    return flat
