"""Checkpoints: a `state_dict` is checked, converted and loaded."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from torch import Tensor

from bighorn._arguments import shortened
from bighorn._distributed.flat import FlatParams
from bighorn._names import unwrapped
from bighorn._optim.algorithm import Algorithm, Group
from bighorn._optim.checkpoint_formats import FORMATS, NOT_FOREIGN, Format
from bighorn._optim.flat_tensors import state_specs
from bighorn._optim.param_groups import COUNT, NO_OPTIONS, label_of, loaded_prefix, names_in
from bighorn._optim.state import StateSpec, init_or_validate_state, local_view


class ConvertedStateWarning(UserWarning):
    """`load_state_dict` has converted the checkpoint of another optimizer; the message describes how."""


def check_structure(state_dict: object) -> None:
    """Raise for anything that no optimizer's `state_dict()` has returned.

    Raises:
        ValueError: The object has another structure, or holds state of parameters that are in none of its groups.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("state_dict must be what optimizer.state_dict() returned, with 'state' and 'param_groups'")
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not isinstance(groups, (list, tuple)):
        raise ValueError(
            "state_dict must hold a dict, 'state', and a list, 'param_groups', not a "
            f"{type(states).__name__} and a {type(groups).__name__}"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"param_groups[{index}] of state_dict must be a dict with a list of 'params'")
    params = [param for group in groups for param in group["params"]]
    for param in params:
        if not isinstance(param, Hashable):
            raise ValueError(f"state_dict is damaged: its params hold {param!r}, where an index or a name must be")
    members = set(params)
    for param, state in states.items():
        if param not in members:
            raise ValueError(
                f"state_dict is damaged: it has a state of {param!r}, which is in none of its param_groups"
            )
        if not isinstance(state, Mapping):
            raise ValueError(f"state_dict is damaged: its state of {param!r} is a {type(state).__name__}, not a dict")


def converted(
    state_dict: dict[str, Any], algorithm: Algorithm[Any], current: Iterable[Group], max_grad_norm: float | None
) -> dict[str, Any]:
    """Return a checkpoint in our format. Another optimizer's is converted, with a warning that describes how.

    An option that the checkpoint does not hold keeps its constructed value; no checkpoint holds options of the whole
    optimizer. The warning names each option that makes the next steps differ from the other optimizer's.

    Args:
        state_dict: A dict with `state` and `param_groups`.
        algorithm: The algorithm that it is loaded into.
        current: The groups of the optimizer that it is loaded into.
        max_grad_norm: The max_grad_norm of that optimizer.

    Raises:
        ValueError: The checkpoint has the state of another algorithm, or an option that is not known here.
    """
    groups = state_dict["param_groups"]
    row = _detected(groups, state_dict["state"])
    if row is None:
        _refuse_unknown_format(groups, current)
        return state_dict
    if row.algorithm != algorithm.name:
        raise ValueError(
            f"state_dict is a checkpoint of {row.name}, whose state is not {algorithm.class_name}'s: load it into "
            f"{Algorithm.by_name[row.algorithm].class_name}, or load only the model and start the optimizer afresh"
        )
    ours = [row.group(group) for group in groups]
    states = dict(state_dict["state"])
    for group in groups:
        for key in group["params"]:
            if isinstance(states.get(key), dict) and states[key]:
                states[key] = row.state(group, states[key])
    warnings.warn(_note(row, groups, current, max_grad_norm), ConvertedStateWarning, stacklevel=3)
    return {**state_dict, "state": states, "param_groups": ours}


def in_model_order(state_dict: dict[str, Any], current: list[Group]) -> dict[str, Any]:
    """Return a checkpoint with its parameters and groups in the order of the model's, if both have the same names.

    A group gets the options of the saved group with the same parameters. If there is none, its options stay, with a
    warning. torch loads by position, and so does this function, with a warning, where names differ. A checkpoint from
    torch.distributed.checkpoint has names in place of indices, and is in the model's order already.

    Args:
        state_dict: A dict with `state` and `param_groups`.
        current: The groups of the optimizer that it is loaded into.
    """
    groups = state_dict["param_groups"]
    if [group.get("param_names") for group in groups] == [group.get("param_names") for group in current]:
        return state_dict
    prefix = loaded_prefix(groups, current)
    theirs = [[unwrapped(name, prefix) for name in names_in(group)] for group in groups]
    ours = [names_in(group) for group in current]
    keys = [key for group in groups for key in group["params"]]
    sizes, model_sizes = ([len(group["params"]) for group in each] for each in (groups, current))
    named = [*map(len, theirs), *map(len, ours)] == [*sizes, *model_sizes]
    if not named or any(isinstance(key, str) for key in keys):
        return state_dict
    names, model_names = (list(itertools.chain.from_iterable(each)) for each in (theirs, ours))
    if len(set(model_names)) == len(model_names) == len(names) and set(model_names) == set(names):
        return _by_name(state_dict, theirs, current)
    if sizes != model_sizes:
        return state_dict  # torch refuses it
    # Groups may hold models with equal names, each in the same place.
    if all(len(set(each)) == len(each) and set(each) == set(other) for each, other in zip(ours, theirs, strict=True)):
        pairs = zip(groups, theirs, ours, strict=True)
        return {**state_dict, "param_groups": [_ordered(group, names, order) for group, names, order in pairs]}
    differing = [f"{saved!r} for {name!r}" for saved, name in zip(names, model_names, strict=True) if saved != name]
    if differing and all(len(set(each)) == len(each) for each in theirs):  # other groups are refused
        warnings.warn(
            f"state_dict has other parameter names than the model, so its state is loaded by position: "
            f"{', '.join(differing[:3])}{', ...' * (len(differing) > 3)}",
            stacklevel=3,
        )
    return state_dict


def _ordered(group: Group, names: list[str], order: list[str]) -> Group:
    """Return a saved group with its parameters in the order of the model's names."""
    keys = dict(zip(names, group["params"], strict=True))
    return {**group, "params": [keys[name] for name in order]}


def _by_name(state_dict: dict[str, Any], names: list[list[str]], current: list[Group]) -> dict[str, Any]:
    """Return a checkpoint with the groups of the model, given the names in each saved group, which are the model's."""
    groups = state_dict["param_groups"]
    saved = {
        name: (i, key) for i, group in enumerate(groups) for name, key in zip(names[i], group["params"], strict=True)
    }
    empty = iter([group for group in groups if not group["params"]])
    ours: list[Group] = []
    for index, group in enumerate(current):
        group_names = names_in(group)
        numbers = dict.fromkeys(saved[name][0] for name in group_names)
        sources = [groups[i] for i in numbers] if group_names else list(itertools.islice(empty, 1))
        whole = sum(len(names[i]) for i in numbers) == len(group_names)
        if sources and whole and all(_options(each) == _options(sources[0]) for each in sources):
            found = sources[0]
        else:
            found = {**group, COUNT: max([group[COUNT], *(each.get(COUNT, 0) for each in sources)])}
            if any(_options({**group, **each}) != _options(group) for each in sources):
                warnings.warn(
                    f"the parameters of param_groups[{index}] ({shortened(group_names)}) were saved in other groups, "
                    "with other options: each gets its state, and the options of the group stay as they are",
                    stacklevel=4,
                )
        ours.append({**found, "params": [saved[name][1] for name in group_names], "param_names": group_names})
    return {**state_dict, "param_groups": ours}


def _options(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in NO_OPTIONS}


class OpaqueState:
    """A wrapper to pass a state through `Optimizer.load_state_dict`, which casts tensors to the parameter's dtype.

    Torch calls its cast as an attribute of `Optimizer` itself, so an override in a subclass has no effect (torch 2.13).
    It leaves values of unknown types unchanged.
    """

    __slots__ = ("entries",)

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries


def wrap(state_dict: dict[str, Any], current: list[Group]) -> dict[str, Any]:
    """Return a `state_dict` whose states are opaque.

    Raises:
        ValueError: Its groups have other sizes than the optimizer's, which torch refuses without a remedy.
    """
    theirs, ours = ([len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], current))
    if theirs != ours:
        raise ValueError(
            f"the loaded param_groups have {theirs} parameters, and this optimizer's have {ours}: make the groups of "
            "the run that saved them, in its order (timm's factory makes two), or load only the model"
        )
    return {**state_dict, "state": {key: OpaqueState(state) for key, state in state_dict["state"].items()}}


def unwrap(state: object) -> object:
    """Return one parameter's state; of an opaque one with copies of the tensors, since torch copies them as well."""
    if not isinstance(state, OpaqueState):
        return state
    if all(isinstance(value, dict) and not value for value in state.entries.values()):
        return {}  # torch's flattened state_dict of a parameter that has no state has an empty dict for each entry
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.entries.items()}


def loaded_states(
    groups: list[Group], flat: list[FlatParams | None], loaded: Mapping[Any, Any], algorithm: Algorithm[Any]
) -> defaultdict[Any, Any]:
    """Return every parameter's state, checked and in its declared dtypes, and set the schedule step of the groups.

    Args:
        groups: The loaded groups, with the parameters themselves.
        flat: The parameters in the flat tensors of each group.
        loaded: The loaded states, which may be opaque.
        algorithm: The algorithm, which declares the state tensors.

    Raises:
        ValueError: A state does not fit its parameter.
    """
    states: defaultdict[Any, Any] = defaultdict(dict)
    states.update({param: unwrap(value) for param, value in loaded.items()})
    for index, (group, held) in enumerate(zip(groups, flat, strict=True)):
        steps, of_flat = 0.0, {} if held is None else state_specs(held, group, algorithm)
        for position, param in enumerate(group["params"]):
            what = label_of(index, position, group.get("param_names"))
            algorithm.refuse_unfit(group, param, what)
            if isinstance(states.get(param), dict) and states[param]:
                if "step" not in states[param]:
                    _refuse_strange(states[param], algorithm.state_spec(group, param), what)
                spec = of_flat[position] if position in of_flat else algorithm.state_spec(group, param)
                view, forms = local_view(param), algorithm.forms
                states[param] = init_or_validate_state(param, view, spec, states[param], forms, what)
                steps = max(steps, float(states[param]["step"]))
        group.setdefault(COUNT, int(steps))  # checkpoints of other optimizers only count per parameter
    return states


def _refuse_strange(state: Mapping[str, Any], spec: StateSpec, what: str) -> None:
    """Raise for a state without a step count and a moment, whose entries would be kept and ignored."""
    tensors = [repr(name) for name, value in state.items() if isinstance(value, Tensor)]
    if tensors and state.keys().isdisjoint(spec):
        raise ValueError(
            f"the state of {what} has {' and '.join(tensors[:2])}, and no entry of Bighorn's: it is another "
            "optimizer's, so load it into that one, or load only the model"
        )


def _detected(groups: Any, states: Mapping[Any, Any]) -> Format | None:
    if not isinstance(groups, list) or not groups:
        return None
    if any(key in group for group in groups for key in NOT_FOREIGN):
        return None
    return next((row for row in FORMATS if row.recognises(groups, states.values())), None)


def _refuse_unknown_format(groups: Iterable[Group], current: Iterable[Group]) -> None:
    """Raise for groups without our keys that hold a key besides options: the state may have another meaning."""
    allowed = {*NO_OPTIONS, *(key for group in current for key in group)}
    for index, group in enumerate(groups):
        strange = [repr(key) for key in group if key not in allowed]
        if strange and not any(key in group for key in NOT_FOREIGN):
            raise ValueError(
                f"the loaded param_groups[{index}] holds {' and '.join(strange[:2])}, unknown here, and no key of "
                "Bighorn's: the state is another optimizer's, so load it into that one"
            )


def _note(row: Format, groups: list[Group], current: Iterable[Group], max_grad_norm: float | None) -> str:
    """The text of the warning: what was converted, and how the next steps will differ from the other optimizer's."""
    renamed = [
        f"{key}={group[key]!r} is {_listed(options)}"
        for group in groups
        for key, change in row.becomes.items()
        if key in group and (options := change(group[key])) not in ({}, {key: group[key]})
        if options.items() <= row.options(group).items()  # else another key has overridden it
    ]
    if any("step" in group for group in groups):
        renamed.append("each group's count of steps is its parameters' own")
    if row.adds:
        renamed.append(f"its state means {_listed(row.adds)}")
    differing = [
        f"{name}={target[name]!r} stays, where {row.name} has {' or '.join(map(repr, values))}"
        for group, target in zip(groups, current, strict=False)
        for name, values in row.implied.items()
        if name not in row.group(group) and target[name] not in values
    ]
    differing += [
        f"max_grad_norm={group['max_grad_norm']!r} is for the constructor, which was given {max_grad_norm!r}"
        for group in groups
        if "max_grad_norm" not in row.left_out and group.get("max_grad_norm", max_grad_norm) != max_grad_norm
    ]
    kept = [repr(key) for group, target in zip(groups, current, strict=False) for key in row.others(group, target)]
    if kept:
        differing.append(f"{' and '.join(_each_once(kept))} of its groups are kept, and change no step here")
    if row.unsaved:
        differing.append(f"checkpoints of {row.name} do not tell {row.unsaved}")
    counted = f"{len(groups)} group{'s' * (len(groups) != 1)}"
    parts = [f"state_dict is a checkpoint of {row.name} ({counted}), and was converted", *_each_once(renamed)]
    return "; ".join(parts) + "".join(f". Note: {text}" for text in _each_once(differing))


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _each_once(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))
