"""The parameters that take part in a step: their indices in the groups, and the options that hold for each of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bighorn import kernels
from bighorn.distributed import sharding
from bighorn.distributed.flat import FlatGroup, FlatParams
from bighorn.distributed.sharding import PLAIN, Layout, ShardedDims
from bighorn.kernels.bucket import Shard
from bighorn.names import excludes
from bighorn.optim.algorithm import Algorithm, Group, ParamTraits, Variant
from bighorn.optim.flat_tensors import FragmentView, views
from bighorn.optim.param_groups import Order, label_of
from bighorn.optim.settings import Settings
from bighorn.optim.state import StateSpec, is_dense, local_view, whole_view

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
    spec: StateSpec
    """The state tensors of `param`, besides `step`."""
    flat: FragmentView | None = None
    """The fragment of the parameter in `param`, if that is a flat tensor."""
    symmetric: bool = False
    """Whether the step of a matrix is that of its transpose, with the averages of rows and columns exchanged."""

    @property
    def sharded_dims(self) -> ShardedDims | None:
        """The mesh dims along which the parameter is sharded; None if this rank holds all of it."""
        return self.layout.sharded_dims if self.layout else None

    @property
    def summed_over(self) -> ShardedDims | FlatGroup | None:
        """The ranks over which norms are summed; None if this rank holds the whole parameter."""
        return self.flat.group if self.flat else self.sharded_dims

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, as a real tensor."""
        return self.flat.shape if self.flat else tuple(whole_view(self.param).shape)

    @property
    def shard(self) -> Shard | None:
        """The shard of the parameter on this rank; None if this rank holds all of it."""
        return self.flat.shard if self.flat else sharding.shard_of(self.param)

    @property
    def row_shard(self) -> Shard | None:
        """The shard of the parameter, or of the slices of a stacked one; None if this rank holds all of it."""
        shard = self.shard
        return shard.of_slice(here=True) if shard and self.stacked else shard

    def is_turned(self, view: Tensor) -> bool:
        """Whether kernels step the transpose of the parameter, since only that is contiguous in memory."""
        return self.symmetric and not view.is_contiguous() and view.mT.is_contiguous()

    def fits_kernels(self, view: Tensor) -> bool:
        """Whether every backend can step the parameter in its own memory, without a dense copy."""
        return is_dense(view, self.leading) or self.is_turned(view)

    def here(self, tensor: Tensor) -> Tensor:
        """Return the fragment in a flat tensor, or in its gradient; any other tensor unchanged."""
        return self.flat.part.of(tensor) if self.flat else tensor

    def state_here(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameter's parts of the state of a flat tensor; any other state unchanged."""
        return {name: part.of(state[name]) for name, part in self.flat.state.items()} if self.flat else dict(state)


def parameters(groups: list[Group], order: Order) -> Iterator[tuple[int, int, Tensor]]:
    """Return every parameter with its group and parameter index, in the order in which a step visits them."""
    if order:
        return ((index, position, groups[index]["params"][position]) for index, position in order)
    return (
        (index, position, param) for index, group in enumerate(groups) for position, param in enumerate(group["params"])
    )


KnownTraits = dict[tuple[int, torch.Size, torch.dtype], ParamTraits]
"""Traits by group index, shape and dtype, which many parameters of a model share."""


def info_of(
    param: Tensor,
    group: Group,
    indices: tuple[int, int],
    algorithm: Algorithm[Any],
    settings: Settings,
    known: KnownTraits | None = None,
) -> ParamInfo:
    """Return the ParamInfo of a parameter with these indices; `known` collects the traits of several parameters.

    Raises:
        ValueError: The parameter cannot be optimized with the group's options, or the group's parameters were replaced.
    """
    index, position = indices
    if "param_names" in group and len(group["param_names"]) != len(group["params"]):
        raise ValueError(
            f"param_groups[{index}] has {len(group['param_names'])} names for {len(group['params'])} parameters, "
            "which were replaced: construct the optimizer after whatever replaces them"
        )
    name = group["param_names"][position] if "param_names" in group else None
    centres = param.dim() - group["stacked"] >= CENTRED_FROM[group["grad_centralization"]]
    whole, label = whole_view(param), label_of(index, position, group.get("param_names"))
    known, key = {} if known is None else known, (index, whole.shape, param.dtype)
    if key not in known:
        algorithm.refuse_unfit(group, param, label)
        known[key] = algorithm.traits_of(group, whole)
    traits = known[key]
    variant = Variant(
        group=index,
        decays=not excludes(settings.exclude_from_weight_decay, name, param, group["stacked"]),
        adapts=not excludes(settings.exclude_from_layer_adaptation, name, param, group["stacked"]),
        centres=centres,
        factored=traits.factored,
        blocks=traits.blocks,
        packed=traits.packed,
    )
    # Blocks and random bits follow the logical order of elements.
    in_order = variant.blocks or group["weight_rounding"] == "stochastic"
    # The factors of a matrix are symmetric: the averages of rows and of columns have the same mean. The matrix has the
    # last two dims if all dims before them are leading ones.
    of_last_two = traits.leading >= whole.dim() - 1
    symmetric = traits.factored and of_last_two and type(param) in PLAIN and not (in_order or centres)
    leading = whole.dim() if in_order else max(traits.leading, group["stacked"] + centres)
    layout = sharding.layout_of(param)
    return ParamInfo(param, label, variant, group["stacked"], leading, layout, traits.spec, symmetric=symmetric)


def infos_of(
    parameters: Iterable[tuple[int, int, Tensor]],
    groups: list[Group],
    flat: list[FlatParams | None],
    algorithm: Algorithm[Any],
    settings: Settings,
) -> Iterator[ParamInfo]:
    """Yield the ParamInfo of each parameter; those in flat tensors follow at the first flat tensor of their group.

    Raises:
        ValueError: As for `info_of`.
    """
    known: KnownTraits = {}
    for index, position, param in parameters:
        held = flat[index]
        if held is None:
            yield info_of(param, groups[index], (index, position), algorithm, settings, known)
        elif position == 0:
            yield from _flat_infos(groups[index], index, held, algorithm, settings)


def _flat_infos(
    group: Group, index: int, held: FlatParams, algorithm: Algorithm[Any], settings: Settings
) -> Iterator[ParamInfo]:
    for each, view in zip(held.params, views(held, group, algorithm), strict=True):
        tensor = group["params"][each.tensor]
        whole = torch.empty(each.shape, dtype=tensor.dtype, device="meta")
        variant = Variant(
            group=index,
            decays=not excludes(settings.exclude_from_weight_decay, each.name, whole),
            adapts=not excludes(settings.exclude_from_layer_adaptation, each.name, whole),
            centres=False,
            factored=algorithm.shape_of(group, whole)[0],
            blocks=False,
            packed=False,
        )
        yield ParamInfo(tensor, each.name, variant, False, 0, None, view.spec, view)


def check_backend(
    group: Group, index: int, params: list[Tensor], algorithm: Algorithm[Any], settings: Settings
) -> None:
    """Raise if the requested backend does not serve all parameters of a group that is to be added at this index.

    Raises:
        ValueError: The backend does not serve one of the parameters.
    """
    for position, param in enumerate(params):
        info = info_of(param, group, (index, position), algorithm, settings)
        options = algorithm.kernel_options(group, info.variant)
        kernels.pick(settings.backend, local_view(param), options, info.row_shard)
