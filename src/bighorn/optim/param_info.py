"""The parameters that take part in a step: their indices in the groups, and the options that hold for each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bighorn import kernels
from bighorn.distributed import sharding
from bighorn.distributed.sharding import Layout, ShardedDims
from bighorn.kernels.bucket import Shard
from bighorn.names import excludes
from bighorn.optim.algorithm import Algorithm, Group, Variant
from bighorn.optim.param_groups import Order, label_of
from bighorn.optim.settings import Settings
from bighorn.optim.state import local_view, whole_view

Indices = dict[int, tuple[int, int]]
"""The group index and parameter index of each parameter, by its `id`."""

CENTRED_FROM = {False: math.inf, True: 2, "conv": 3}
"""The fewest dims of a tensor that `grad_centralization` centres."""


@dataclass
class ParamInfo:
    """A parameter that takes part in a step, with the options that hold for it."""

    param: Tensor
    label: str
    variant: Variant
    stacked: bool
    leading: int
    """The number of leading dims that must be outermost in memory, since kernels split the tensor along them."""
    layout: Layout | None
    """The layout of a distributed parameter, else None."""

    @property
    def sharded_dims(self) -> ShardedDims | None:
        """The mesh dims along which the parameter is sharded; None if this rank holds all of it."""
        return self.layout.sharded_dims if self.layout else None


def parameters(groups: list[Group], order: Order) -> Iterator[tuple[int, int, Tensor]]:
    """Return every parameter with its group and parameter index, in the order in which a step visits them."""
    if order:
        return ((index, position, groups[index]["params"][position]) for index, position in order)
    return (
        (index, position, param) for index, group in enumerate(groups) for position, param in enumerate(group["params"])
    )


def info_of(
    param: Tensor, group: Group, indices: tuple[int, int], algorithm: Algorithm[Any], settings: Settings
) -> ParamInfo:
    """Return the ParamInfo of a parameter with these indices.

    Raises:
        ValueError: The parameter cannot be optimized with the group's options, or the group's parameters were replaced.
    """
    index, position = indices
    if "param_names" in group and len(group["param_names"]) != len(group["params"]):
        raise ValueError(
            f"param_groups[{index}] has {len(group['param_names'])} names for {len(group['params'])} parameters, "
            "which were replaced: DeepSpeed's ZeRO does so with one flat tensor, whose norms are no layer's. Do "
            "without ZeRO, or use bighorn.shard_update"
        )
    name = group["param_names"][position] if "param_names" in group else None
    centres = param.dim() - group["stacked"] >= CENTRED_FROM[group["grad_centralization"]]
    whole, label = whole_view(param), label_of(index, position, group.get("param_names"))
    algorithm.refuse_unfit(group, param, label)
    factored, leading = algorithm.shape_of(group, whole)
    variant = Variant(
        group=index,
        decays=not excludes(settings.exclude_from_weight_decay, name, param, group["stacked"]),
        adapts=not excludes(settings.exclude_from_layer_adaptation, name, param, group["stacked"]),
        centres=centres,
        factored=factored,
        blocks=algorithm.in_blocks(group, whole),
    )
    # Blocks and random bits follow the logical order of elements.
    in_order = variant.blocks or group["weight_rounding"] == "stochastic"
    leading = whole.dim() if in_order else max(leading, group["stacked"] + centres)
    return ParamInfo(param, label, variant, group["stacked"], leading, sharding.layout_of(param))


def row_shard(param: Tensor, stacked: bool) -> Shard | None:
    """The shard of a parameter, or of the slices of a stacked one, on this rank; None if this rank holds all of it."""
    shard = sharding.shard_of(param)
    return shard.of_slice(here=True) if shard and stacked else shard


def check_backend(group: Group, params: list[Tensor], algorithm: Algorithm[Any], backend: str) -> None:
    """Raise if the requested backend does not serve all parameters.

    Raises:
        ValueError: The backend does not serve one of the parameters.
    """
    for param in params:
        whole = whole_view(param)
        factored, blocks = algorithm.shape_of(group, whole)[0], algorithm.in_blocks(group, whole)
        variant = Variant(0, decays=True, adapts=True, centres=False, factored=factored, blocks=blocks)
        options = algorithm.kernel_options(group, variant)
        kernels.pick(backend, local_view(param), options, row_shard(param, group["stacked"]))
