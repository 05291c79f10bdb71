"""Checkpoints of other optimizers: how each is told, and what its options and state are here. And our own's version.

`load_state_dict` converts what a row of FORMATS recognises. What a checkpoint does not hold stays as constructed, and
whole-optimizer options are in none; where either makes the next steps others than the peer's, the note says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

State = Mapping[str, Any]
Group = Mapping[str, Any]

VERSION = "format_version"
"""The key of a group that says how its state is to be read. Groups survive every way of saving, sharded ones too."""

FORMAT = 1
"""The version that is written."""

NOT_FOREIGN = (VERSION, "stacked")
"""Our groups have at least one of these keys, of the time before versions too; nobody else's has."""


class ConvertedStateWarning(UserWarning):
    """`load_state_dict` was given another optimizer's checkpoint and converted it; the message says how."""


@dataclass(frozen=True)
class Format:
    """The checkpoints of one optimizer. Keys of its groups that are named nowhere here mean what they mean to us.

    Attributes:
        name: What the note calls it.
        algorithm: Which of ours can go on with its state.
        marks: Keys that all its groups have; with earlier rows, enough to tell it.
        where: Those of them that tell it by their value too.
        becomes: Options of its groups under other names here, each with what a value of it is.
        refused: Options that have no counterpart, once they are set, with what to do about it.
        left_out: Keys that say how, and not what, it computes.
        implied: Options that its groups do not have, with the values at which our steps are its steps.
        adds: Options that follow from the shapes of its state.
        state_left_out: Entries of its state that nothing depends on.
        unsaved: Options that its checkpoints do not tell.
    """

    name: str
    algorithm: str
    marks: frozenset[str]
    where: Group = field(default_factory=dict)
    becomes: Mapping[str, Callable[[Any], dict[str, Any]]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    implied: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    adds: Group = field(default_factory=dict)
    state_left_out: tuple[str, ...] = ()
    unsaved: str = ""

    def recognises(self, groups: Iterable[Group]) -> bool:
        """Whether all of these groups are its."""
        return all(
            self.marks <= group.keys() and all(group[key] is value for key, value in self.where.items())
            for group in groups
        )

    def options(self, group: Group) -> dict[str, Any]:
        """What its own options of a group are here.

        Raises:
            ValueError: One has no counterpart.
        """
        for key, remedy in self.refused.items():
            if group.get(key):
                raise ValueError(f"a checkpoint of {self.name} has {key}={group[key]!r}, which is not known: {remedy}")
        converted = [self.becomes[key](value) for key, value in group.items() if key in self.becomes]
        return {key: value for options in [*converted, self.adds] for key, value in options.items()}

    def group(self, group: Group) -> dict[str, Any]:
        """A group as ours, without the count of steps, which is each parameter's here."""
        gone = {*self.becomes, *self.refused, *self.left_out, "max_grad_norm", "step"}
        return {**{key: value for key, value in group.items() if key not in gone}, **self.options(group)}

    def state(self, group: Group, state: State) -> dict[str, Any]:
        """One parameter's state as ours."""
        count = {"step": group["step"]} if "step" in group else {}
        return {**count, **{key: value for key, value in state.items() if key not in self.state_left_out}}


_TORCH: dict[str, Any] = {
    "algorithm": "lamb",
    "becomes": {"amsgrad": lambda on: {"second_moment": "amsgrad"} if on else {}},
    "left_out": ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"),
}
_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"})
_ADAM_STEPS: dict[str, tuple[object, ...]] = {"adam": (True,), "bias_correction": (True,), "grad_averaging": (True,)}
_APEX = frozenset({"lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging", "max_grad_norm"})

FORMATS = (
    Format(
        name="torch's AdamW",
        marks=_ADAM | {"decoupled_weight_decay"},
        where={"decoupled_weight_decay": True},
        # With the trust ratio fixed to 1 decay inside u is decoupled decay.
        implied={**_ADAM_STEPS, "decay_mode": ("decoupled", "ratio"), "second_moment": ("adam",)},
        **_TORCH,
    ),
    Format(
        name="torch's Adam",
        marks=_ADAM | {"decoupled_weight_decay"},
        where={"decoupled_weight_decay": False},
        implied={**_ADAM_STEPS, "decay_mode": ("l2",), "second_moment": ("adam",)},
        **_TORCH,
    ),
    Format(
        name="torch's Adam or AdamW",  # before torch 2.7, whose groups do not tell these two apart
        marks=_ADAM,
        implied={**_ADAM_STEPS, "second_moment": ("adam",)},
        unsaved='its decay_mode, "decoupled" for AdamW and "l2" for Adam',
        **_TORCH,
    ),
    Format(
        name="timm's Lamb",
        algorithm="lamb",
        marks=_APEX | {"trust_clip", "always_adapt"},
        becomes={
            "trust_clip": lambda on: {"trust_ratio_bounds": (0.0, 1.0) if on else None},
            "caution": lambda on: {"cautious": on},
            "decoupled_decay": lambda on: {"decay_mode": "decoupled" if on else "ratio"},
        },
        refused={"corrected_weight_decay": "give weight_decay a schedule that falls as lr does, and load with False"},
        left_out=("foreach", "max_lr_snapshot"),
        implied={"adam": (False,), "weight_norm_bounds": (None,), "second_moment": ("adam",), "maximize": (False,)},
    ),
    Format(
        name="apex's FusedLAMB",
        algorithm="lamb",
        marks=_APEX,
        implied={
            "adam": (False,),
            "weight_norm_bounds": (None,),
            "trust_ratio_bounds": (None,),
            "second_moment": ("adam",),
            "cautious": (False,),
            "maximize": (False,),
        },
        unsaved='use_nvlamb and adam_w_mode, here always_adapt and decay_mode ("l2" for adam_w_mode=False)',
    ),
    Format(
        name="came-pytorch's CAME",
        algorithm="came",
        marks=frozenset({"lr", "betas", "eps", "weight_decay", "clip_threshold"}),
        implied={
            "decay_rate": (None,),
            "scale_parameter": (False,),
            "bias_correction": (False,),
            "maximize": (False,),
        },
        adds={"factor": "last_two"},
        state_left_out=("RMS",),
    ),
)
"""THE table of foreign checkpoints; the first row that recognises one is it."""


def converted(
    state_dict: dict[str, Any], algorithm: str, current: Iterable[Group], max_grad_norm: float | None
) -> dict[str, Any]:
    """A checkpoint as one of ours: converted with a warning if it is foreign, as it is if it is not.

    Args:
        state_dict: `state` and `param_groups`.
        algorithm: The one that it is loaded into.
        current: The groups of the optimizer that it is loaded into.
        max_grad_norm: That optimizer's.

    Raises:
        ValueError: It is of an optimizer whose state another algorithm has, or has an option that is not known here.
    """
    groups = state_dict["param_groups"]
    row = _recognised(groups)
    if row is None:
        return state_dict
    if row.algorithm != algorithm:
        raise ValueError(
            f"state_dict is a checkpoint of {row.name}, whose state is not {algorithm.capitalize()}'s: load it into "
            f"{row.algorithm.capitalize()}, or load the model alone and start the optimizer afresh"
        )
    ours = [row.group(group) for group in groups]
    states = dict(state_dict["state"])
    for group in groups:
        for key in group["params"]:
            if isinstance(states.get(key), dict) and states[key]:
                states[key] = row.state(group, states[key])
    warnings.warn(_note(row, groups, current, max_grad_norm), ConvertedStateWarning, stacklevel=3)
    return {**state_dict, "state": states, "param_groups": ours}


def check_version(value: object) -> int:
    """The version in a loaded group, if it can be read here.

    Raises:
        ValueError: It is a newer one, or none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= FORMAT:
        raise ValueError(
            f"{VERSION}={value!r}, but this bighorn reads {FORMAT} and older: load it with the one that wrote it"
        )
    return FORMAT


def _recognised(groups: Any) -> Format | None:
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        return None
    if any(key in group for group in groups for key in NOT_FOREIGN):
        return None
    return next((row for row in FORMATS if row.recognises(groups)), None)


def _note(row: Format, groups: list[Group], current: Iterable[Group], max_grad_norm: float | None) -> str:
    """What was done, and in what the next steps will differ from the peer's."""
    renamed = [
        f"{key}={group[key]!r} is {_listed(change(group[key]))}"
        for group in groups
        for key, change in row.becomes.items()
        if key in group and change(group[key])
    ]
    if any("step" in group for group in groups):
        renamed.append("each group's count of steps is its parameters' own")
    if row.adds:
        renamed.append(f"its state means {_listed(row.adds)}")
    differing = [
        f"{name}={here[name]!r} stays, where {row.name} has {' or '.join(map(repr, values))}"
        for group, here in zip(groups, current, strict=False)
        for name, values in row.implied.items()
        if name not in row.options(group) and here[name] not in values
    ]
    differing += [
        f"max_grad_norm={group['max_grad_norm']!r} is for the constructor, which was given {max_grad_norm!r}"
        for group in groups
        if group.get("max_grad_norm", max_grad_norm) != max_grad_norm
    ]
    if row.unsaved:
        differing.append(f"checkpoints of {row.name} do not tell {row.unsaved}")
    counted = f"{len(groups)} group{'s' * (len(groups) != 1)}"
    parts = [f"state_dict is a checkpoint of {row.name} ({counted}), and was converted", *_each_once(renamed)]
    return "; ".join(parts) + "".join(f". Note: {text}" for text in _each_once(differing))


def _listed(options: Group) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _each_once(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))
