"""Parameter groups: their checks when a group is added and when a checkpoint is loaded.

A key of a group that resembles an option is refused, since it is a misspelling. Any other key is one that a framework
keeps there; it is kept, saved and loaded, as torch does with all keys.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bighorn._arguments import (
    asked_for,
    brief,
    checked,
    integer,
    learning_rate,
    misspells,
    number,
    refuse_unknown,
    truth,
)
from bighorn._distributed import sharding
from bighorn._foreign_options import NOT_ADAPTED, OF_SGD, OF_TORCH
from bighorn._names import common_prefix, named, names_of, unwrapped
from bighorn._optim.algorithm import Algorithm, Group
from bighorn._optim.presets import ELSEWHERE
from bighorn._optim.settings import CHECKS, OF_THE_WHOLE, Settings
from bighorn._optim.state import overlaps

LABELS = ("params", "param_names", "name")
"""Keys that are not options: torch's own, and the label that users give a group."""

COUNT = "schedule_step"
"""The key of the schedule step in a group: the number of `step()` calls that schedules are computed from."""

VERSION = "format_version"
"""The key of the checkpoint format version in a group."""

FORMAT = 1
"""The version that this package writes."""

NO_OPTIONS = (*LABELS, COUNT, VERSION)
"""All keys besides options that mean something here. Every method of saving keeps groups, hence the last two."""


MULTIPLIERS = {
    "lr": ("lr_scale", "lr_mult", "lr_multiplier"),
    "weight_decay": ("wd_mult", "wd_multiplier", "decay_mult"),
}
"""Keys by which the schedulers of timm, BEiT, DINOv2, MMEngine and Megatron-LM multiply an option of their group."""


def multiplier(group: Group, name: str) -> float:
    """The factor by which a group multiplies the schedule of an option."""
    given = [key for key in MULTIPLIERS[name] if group.get(key) is not None]
    return math.prod(number(key, group[key]) for key in given)


def in_lists(params: Iterable[Any]) -> list[Any]:
    """Return the given parameters or groups in a form that can be iterated over more than once."""
    return [
        {**item, "params": list(item["params"])}
        if isinstance(item, dict) and isinstance(item.get("params"), Iterator)
        else item
        for item in params
    ]


def prefix_of(params: list[Any], settings: Settings) -> str | None:
    """The prefix that wrappers add to the names of all parameters, "" without one; None if parameters have no names."""
    names = [] if settings.names is None else list(names_of(settings.names).values())
    named_already = False
    for item in params:
        group = item if isinstance(item, dict) else {"params": [item]}
        named_already |= "param_names" in group
        pairs = group.get("params")
        if isinstance(pairs, Iterable) and not isinstance(pairs, Tensor):
            names += [pair[0] for pair in pairs if isinstance(pair, tuple) and pair and isinstance(pair[0], str)]
    return common_prefix(names) if names or named_already else None


def names_in(group: Group) -> list[str]:
    """The names of the parameters of a group, which may be a damaged one; empty if it has none."""
    names = group.get("param_names")
    return [name for name in names if isinstance(name, str)] if isinstance(names, (list, tuple)) else []


def follow_names(groups: list[Group], name_of: dict[int, str]) -> None:
    """Let names follow parameters that a program has put into another order or group."""
    for group in groups:
        names = list(map(name_of.get, map(id, group["params"])))
        if None not in names and names != group.get("param_names"):
            group["param_names"] = names


def loaded_prefix(groups: list[Group], current: list[Group]) -> str:
    """The prefix that wrappers add to the names in a checkpoint and not to the current names."""
    saved_names, names = ([name for group in each for name in names_in(group)] for each in (groups, current))
    return "" if saved_names == names else common_prefix(saved_names).removeprefix(common_prefix(names))


def joining(
    given: Group,
    index: int,
    others: list[Group],
    defaults: Group,
    algorithm: Algorithm[Any],
    settings: Settings,
    prefix: str | None,
) -> tuple[Group, list[Tensor]]:
    """Return a group that is to be added, checked and with every option, and its tensors. Schedules stay unevaluated.

    Args:
        given: The group.
        index: Its index in `param_groups`.
        others: The groups there that the optimizer has already.
        defaults: The values of options that the group does not have.
        algorithm: The algorithm, which declares the options.
        settings: The options of the whole optimizer.
        prefix: The result of `prefix_of` for all parameters.

    Raises:
        TypeError: An unknown key, or a value of a wrong type.
        ValueError: A value out of range, an option of the whole optimizer, or a parameter that cannot be optimized
            here.
    """
    if not isinstance(given, dict):
        raise TypeError(f"a parameter group must be a dict, not {type(given).__name__}")
    if "params" not in given:
        raise ValueError("a parameter group must have the key 'params'")
    group = settings.without_copies(given)
    settings.refuse_in_group(group, f"param_groups[{index}]")
    for key in [key for key in group if str(key).lower() in NOT_ADAPTED and "adapt" in algorithm.options]:
        if truth(key, group.pop(key)) == NOT_ADAPTED[key.lower()]:
            group["adapt"] = False
    check_keys(group, algorithm, "a parameter group", given=True)
    group.update(checked(algorithm.options, group))
    group["params"] = named(group["params"], settings.names)
    pairs = [isinstance(param, tuple) for param in group["params"]]
    if any(pairs) and not all(pairs):
        raise ValueError("some of params have a name and some have none: name all of them, or none")
    if "param_names" not in group and not all(pairs):
        settings.refuse_nameless()
    tensors = []
    for param in group["params"]:
        if isinstance(param, tuple) and len(param) != 2:
            raise TypeError(f"params must be tensors or pairs of a name and a tensor, not tuples of {len(param)}")
        name, tensor = param if isinstance(param, tuple) else (None, param)
        check_parameter(name, tensor)
        tensors.append(tensor)
    earlier = (param for other in others for param in other["params"] if sharding.any_distributed([param]))
    settings.refuse_apart(map(sharding.holders_of, itertools.chain(itertools.islice(earlier, 1), tensors)))
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError("params holds the same parameter twice; pass each one once (tied weights count once)")
    names = [name for name, _ in group["params"]] if any(pairs) else group.get("param_names")
    if names is None and not tensors and prefix is not None:
        names = []  # torch requires names in all groups, or in none
    if names is not None:
        group["params"], group["param_names"] = tensors, _checked_names(names, len(tensors), prefix or "")
        names = group["param_names"]
    if "lr" not in defaults | group:
        raise ValueError(
            "lr is missing: give a learning rate, such as 2e-4, or a schedule, to the constructor or to every group"
        )
    lr = group.get("lr", defaults.get("lr"))
    if isinstance(lr, Tensor) and any(other["lr"] is lr for other in others):
        group["lr"] = lr.clone()  # schedulers fill it in place, with a value for each group
    count = max((other[COUNT] for other in others), default=0)
    complete = {**defaults, COUNT: count, **group, VERSION: FORMAT}
    for position, tensor in enumerate(tensors):
        algorithm.refuse_unfit(complete, tensor, label_of(index, position, names))
    return complete, tensors


def check_keys(group: Group, algorithm: Algorithm[Any], where: str, *, given: bool = False) -> None:
    """Raise for a key that is a misspelt option, or an option of another optimizer of ours.

    Args:
        group: The group.
        algorithm: The algorithm, which declares the options.
        where: The group in words, for the message.
        given: Whether the user has given the group: then options of other packages, and of torch.optim.SGD, are refused
            as well. Existing groups may hold these keys, since momentum schedulers write them.

    Raises:
        TypeError: There is such a key, or one that is not a string.
    """
    options = list(algorithm.options)
    foreign = ELSEWHERE if given else OF_TORCH
    for key in asked_for(group, foreign):
        if not isinstance(key, str):
            raise TypeError(f"{where} got the key {key!r}: a key of a group must be a string")
        if key in NO_OPTIONS or key in options or key in CHECKS or (key in OF_SGD and not given):
            continue
        if key in foreign:
            refuse_unknown([key], options, where, foreign)
        if key.lower() in NOT_ADAPTED and "adapt" in options:
            raise TypeError(f"{where} got {key!r} after it was added, when nothing reads it: write adapt=False")
        if others := dict.fromkeys(other.class_name for other in Algorithm.by_name.values() if key in other.options):
            raise TypeError(
                f"{where} got {key!r}, an option of {' and '.join(others)} but not of this optimizer: remove it, or "
                f"use {' or '.join(others)}"
            )
        for allowed in (options, [*options, *CHECKS]):
            if misspells(key, allowed):
                refuse_unknown([key], allowed, where)


def refuse_vectors(group: Group) -> None:
    """Raise for a tensor of several numbers that was written into a group, for which torch has no meaning."""
    for name in ("lr", "weight_decay"):
        if isinstance(value := group.get(name), Tensor):
            learning_rate(name, value)


def label_of(index: int, position: int, names: Sequence[str] | None) -> str:
    """The name of a parameter, or its indices if the group has no names."""
    return (names[position] if names else "") or f"param_groups[{index}].params[{position}]"


def check_parameter(name: object, param: object) -> None:
    """Raise unless a tensor can be optimized here.

    Raises:
        TypeError: It is not a tensor.
        ValueError: Its layout or kind cannot be optimized.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"params must be tensors or pairs of a name and a tensor, but a name is {brief(name)}")
    what = f"parameter {name!r}" if name is not None else "a parameter"
    if not isinstance(param, Tensor):
        raise TypeError(f"params must be tensors, but {what} is {brief(param)}")
    if not (param.is_leaf or param.retains_grad):
        raise ValueError(f"{what} is no leaf: it was computed from others, which get the gradients; pass those")
    if param.layout != torch.strided:
        raise ValueError(f"{what} has layout {param.layout}; only dense parameters can be optimized")
    reason = sharding.unsupported_reason(param)
    if reason:
        raise ValueError(f"{what} cannot be optimized here: {reason}")
    if overlaps(param) or param.is_neg() or param.is_conj():
        raise ValueError(f"{what} is a view whose elements share memory or are negated on reading: clone() it first")


def _checked_names(names: object, count: int, prefix: str) -> list[str]:
    """Return names without wrappers' prefixes. Raise unless there is one for each parameter, and all are different.

    Messages about a parameter, and its random bits, depend on its name. Groups may hold several models with equal
    names.
    """
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"param_names must be names in a list, not {names!r}")
    if len(names) != count:
        raise ValueError(f"param_names has {len(names)} names for {count} parameters")
    names = [unwrapped(name, prefix) for name in names]
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times > 1:
        raise ValueError(
            f"params has {times} parameters called {name!r}: give the names of each model a prefix of its own, or each "
            "model a group"
        )
    return names


def loaded(index: int, group: Group, current: Group, algorithm: Algorithm[Any], settings: Settings | None) -> Group:
    """Return a group of a checkpoint, checked; names, and options that it lacks, come from `current`.

    Raises:
        ValueError: It is of a newer format, or holds a key or an option that cannot be used.
    """
    try:
        if settings and not group.keys().isdisjoint(OF_THE_WHOLE):
            group = settings.without_copies(group)
        group = {
            VERSION: FORMAT,
            **{name: current[name] for name in algorithm.options},
            **group,
        }
        check_keys(group, algorithm, "the group")
        refuse_vectors(group)
        names = group.pop("param_names", None)
        if names is not None and names != current.get("param_names"):
            _checked_names(names, len(group["params"]), "")
        if "param_names" in current:
            group["param_names"] = current["param_names"]
        version = group[VERSION]
        if type(version) is not int or not 1 <= version <= FORMAT:
            raise ValueError(
                f"{VERSION}={version!r}, but this bighorn reads {FORMAT} and older: load it with the one that wrote it"
            )
        group[VERSION] = FORMAT
        if COUNT in group:
            group[COUNT] = integer(COUNT, group[COUNT])
        return {**group, **checked(algorithm.options, group)}
    except (TypeError, ValueError) as error:
        raise ValueError(f"the loaded param_groups[{index}] cannot be used: {error}") from None
