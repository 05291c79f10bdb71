"""The entries of the parameters that take part in a step, from the groups and the optimizer's settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from bighorn import _kernels as kernels
from bighorn._arguments import about
from bighorn._distributed import sharding
from bighorn._distributed.flat import FlatParams
from bighorn._distributed.sharding import PLAIN
from bighorn._kernels.rounding import LOW
from bighorn._names import excludes
from bighorn._optim.algorithm import Algorithm, Group, ParamTraits, Variant
from bighorn._optim.entry import Entry
from bighorn._optim.flat_tensors import fragments
from bighorn._optim.param_groups import label_of
from bighorn._optim.settings import Settings
from bighorn._optim.state import whole_view

Indices = dict[int, tuple[int, int]]
"""The group index and parameter index of each parameter, by its `id`."""

CENTRED_FROM = {False: math.inf, True: 2, "conv": 3}
"""The fewest dims of a tensor that `grad_centralization` centres."""


def parameters(groups: list[Group]) -> Iterator[tuple[int, int, Tensor]]:
    """Return every parameter with its group and parameter index."""
    return (
        (index, position, param) for index, group in enumerate(groups) for position, param in enumerate(group["params"])
    )


TraitsCache = dict[tuple[int, torch.Size, torch.dtype], ParamTraits]
"""Traits by group index, shape and dtype, which many parameters of a model share."""


def entry_of(
    param: Tensor,
    group: Group,
    indices: tuple[int, int],
    algorithm: Algorithm[Any],
    settings: Settings,
    cache: TraitsCache | None = None,
) -> Entry:
    """Return the entry of a parameter with these indices; `cache` collects the traits of several parameters.

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
    cache, key = {} if cache is None else cache, (index, whole.shape, param.dtype)
    if key not in cache:
        algorithm.refuse_unfit(group, param, label)
        cache[key] = algorithm.traits_of(group, whole)
    traits = cache[key]
    variant = Variant(
        group=index,
        decays=not excludes(settings.exclude_from_weight_decay, name, param, group["stacked"]),
        adapts=algorithm.adapts(group, whole)
        and not excludes(settings.exclude_from_layer_adaptation, name, param, group["stacked"]),
        centres=centres,
        factored=traits.factored,
        blocks=traits.blocks,
        int4=traits.int4,
        rounds=traits.rounds,
    )
    # Blocks and random bits follow the logical order of elements.
    in_order = variant.blocks or (variant.rounds and group["weight_rounding"] == "stochastic")
    # The matrix has the last two dims if all dims before them are leading ones.
    of_last_two = traits.leading >= whole.dim() - 1
    symmetric = traits.factored and of_last_two and type(param) in PLAIN and not (in_order or centres)
    leading = whole.dim() if in_order else max(traits.leading, group["stacked"] + centres)
    layout = sharding.layout_of(param)
    return Entry(
        param,
        label,
        variant,
        traits.spec,
        tuple(whole.shape),
        shard=sharding.shard_of(param),
        ranks=layout.sharded_dims if layout else None,
        layout=layout,
        stacked=group["stacked"],
        leading=leading,
        exchanged=algorithm.exchanged or None if symmetric else None,
    )


def entries_of(
    parameters: Iterable[tuple[int, int, Tensor]],
    groups: list[Group],
    flat: list[FlatParams | None],
    algorithm: Algorithm[Any],
    settings: Settings,
) -> Iterator[Entry]:
    """Yield the entry of each parameter; those in flat tensors follow at the first flat tensor of their group.

    Raises:
        ValueError: As for `entry_of`.
    """
    cache: TraitsCache = {}
    for index, position, param in parameters:
        held = flat[index]
        if held is None:
            yield entry_of(param, groups[index], (index, position), algorithm, settings, cache)
        elif position == 0:
            yield from _flat_entries(groups[index], index, held, algorithm, settings)


def _flat_entries(
    group: Group, index: int, held: FlatParams, algorithm: Algorithm[Any], settings: Settings
) -> Iterator[Entry]:
    for each, placed in zip(held.params, fragments(held, group, algorithm), strict=True):
        tensor = group["params"][each.tensor]
        whole = torch.empty(each.shape, dtype=tensor.dtype, device="meta")
        variant = Variant(
            group=index,
            decays=not excludes(settings.exclude_from_weight_decay, each.name, whole),
            adapts=algorithm.adapts(group, whole)
            and not excludes(settings.exclude_from_layer_adaptation, each.name, whole),
            centres=False,
            factored=algorithm.shape_of(group, whole)[0],
            blocks=False,
            int4=False,
            rounds=tensor.dtype in LOW,
        )
        yield Entry(
            tensor,
            each.name,
            variant,
            placed.spec,
            each.shape,
            shard=placed.shard,
            ranks=held.group,
            fragment=placed.part,
            state_parts=placed.state,
        )


def check_entries(
    group: Group, index: int, params: list[Tensor], algorithm: Algorithm[Any], settings: Settings
) -> None:
    """Raise if a parameter of a group that is to be added at this index cannot be stepped.

    Raises:
        ValueError: The requested backend does not serve it, or the algorithm refuses its options.
    """
    for position, param in enumerate(params):
        entry = entry_of(param, group, (index, position), algorithm, settings)
        with about(entry.label):
            options = algorithm.kernel_options(group, entry.variant)
        if settings.backend != "auto":
            kernels.pick(settings.backend, entry.local(), options, entry.slot_shard)
