"""The checkpoint formats of other optimizers: how each is detected, and how its options and state are converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bighorn._optim.param_groups import NO_OPTIONS, VERSION

State = Mapping[str, Any]
Group = Mapping[str, Any]

NOT_FOREIGN = (VERSION, "stacked")
"""Each of our groups has at least one of these keys, even before versions were written; other optimizers have none."""


@dataclass(frozen=True)
class Format:
    """The checkpoint format of another optimizer. Keys of its groups that are in no field have the same meaning here.

    Attributes:
        name: The name in messages.
        algorithm: The algorithm here that can continue with the state.
        marks: Keys that all groups have; together with the order of the formats, they identify the format.
        bare: Whether groups that have other options are of another format.
        where: The marks that identify the format by their value as well, with that value.
        evidence: Whether the state of a parameter shows the format. If given, at least one parameter's must.
        becomes: Options that have other names here, each with a function from its value to the options here.
        joined: Options that are several keys there, in their order.
        refused: Options with the value that has no counterpart, or True or False if they are on or off, each with the
            remedy.
        left_out: Keys that affect how the optimizer computes, but not the result.
        implied: Options that the groups do not have, with the values for which our steps equal the optimizer's.
        adds: Options that follow from the shapes of the state.
        state_left_out: Entries of the state that nothing depends on.
        state_refused: Entries of the state that have no counterpart, each with the remedy.
        uncounted: Entries of the state that have other names here, in a format that counts no steps.
        decode: A function from the state of a parameter to tensors of the shapes here.
        unsaved: Options that the checkpoints do not contain.
    """

    name: str
    algorithm: str
    marks: frozenset[str]
    bare: bool = False
    where: Group = field(default_factory=dict)
    evidence: Callable[[State], bool] | None = None
    becomes: Mapping[str, Callable[[Any], dict[str, Any]]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused: Mapping[tuple[str, bool | str], str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    implied: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    adds: Group = field(default_factory=dict)
    state_left_out: tuple[str, ...] = ()
    state_refused: Mapping[str, str] = field(default_factory=dict)
    uncounted: Mapping[str, str] = field(default_factory=dict)
    decode: Callable[[State], State] | None = None
    unsaved: str = ""

    def recognises(self, groups: Iterable[Group], states: Iterable[State]) -> bool:
        """Whether all of these groups, and the states of their parameters, have this format."""
        return all(
            self.marks <= group.keys()
            and all(group.get(key) is value for key, value in self.where.items())
            and (not self.bare or group.keys() <= {*self.marks, *NO_OPTIONS, "initial_lr"})
            for group in groups
        ) and (self.evidence is None or any(map(self.evidence, states)))

    def options(self, group: Group) -> dict[str, Any]:
        """Return the options here that follow from a group's options of other names and from the format.

        Raises:
            ValueError: An option has no counterpart.
        """
        for (key, value), remedy in self.refused.items():
            if key in group and (bool(group[key]) if isinstance(value, bool) else group[key]) == value:
                raise ValueError(f"a checkpoint of {self.name} has {key}={group[key]!r}, which is not known: {remedy}")
        converted = [self.becomes[key](group[key]) for key in self.becomes if key in group]
        joined = {option: tuple(group[key] for key in keys) for option, keys in self.joined.items()}
        return {key: value for options in [*converted, joined, self.adds] for key, value in options.items()}

    def others(self, group: Group, target: Group) -> list[str]:
        """The keys of a group that are neither of this format nor of the group into which it is loaded."""
        return [key for key in group if key not in {*NO_OPTIONS, "initial_lr", *target, *self._gone}]

    @property
    def _gone(self) -> set[str]:
        several = [key for keys in self.joined.values() for key in keys]
        return {*self.becomes, *several, *(key for key, _ in self.refused), *self.left_out, "max_grad_norm", "step"}

    def group(self, group: Group) -> dict[str, Any]:
        """Convert a group, without the count of steps, which each parameter has here."""
        gone = self._gone
        return {**{key: value for key, value in group.items() if key not in gone}, **self.options(group)}

    def state(self, group: Group, state: State) -> dict[str, Any]:
        """Convert the state of one parameter.

        Raises:
            ValueError: An entry has no counterpart, or is damaged.
        """
        if self.decode is not None:
            try:
                state = self.decode(state)
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(f"a state in the checkpoint of {self.name} is damaged: {error!r}") from error
        for name in state.keys() & self.state_refused.keys():
            raise ValueError(
                f"a checkpoint of {self.name} has a state {name!r}, which is not known: {self.state_refused[name]}"
            )
        count = {"step": group["step"]} if "step" in group else {"step": 1.0} if self.uncounted else {}
        kept = {self.uncounted.get(key, key): state[key] for key in state if key not in self.state_left_out}
        return {**count, **kept}


_TORCH: dict[str, Any] = {
    "algorithm": "lamb",
    "becomes": {"amsgrad": lambda on: {"second_moment": "amsgrad"} if on else {}},
    "left_out": ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"),
}
_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"})
_ADAM_STEPS: dict[str, tuple[object, ...]] = {
    "adam": (True,),
    "hyperball": (False,),
    "bias_correction": (True,),
    "grad_averaging": (True,),
}
_WITHOUT_EXTENSIONS: dict[str, tuple[object, ...]] = {
    "hyperball": (False,),
    "trust_ratio_bounds": (None,),
    "second_moment": ("adam",),
    "cautious": (False,),
}
_UNCORRECTED = {"corrected_weight_decay": False}
_APEX = frozenset({"lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging", "max_grad_norm"})

_CAME = frozenset({"lr", "betas", "eps", "weight_decay", "clip_threshold"})
_CAME_OF_TWO_EPS = frozenset({"lr", "betas", "eps1", "eps2", "weight_decay", "weight_decouple", "ams_bound"})
_CAME_STEPS: dict[str, tuple[object, ...]] = {
    "decay_rate": (None,),
    "scale_parameter": (False,),
    "bias_correction": (False,),
    "maximize": (False,),
}


def _shows_linear(state: State) -> bool:
    """Whether a state of more than 2 dims is factored by `factor="linear"`, where came-pytorch has more averages."""
    exp_avg, col = state.get("exp_avg"), state.get("exp_avg_sq_col")
    if not isinstance(exp_avg, Tensor) or exp_avg.dim() < 3:
        return False
    return "exp_avg_sq" in state or (isinstance(col, Tensor) and col.dim() == 1)


def _decode_linear(state: State) -> State:
    """Decode momentum of 8 bits in blocks of whole rows, and give averages of a 1x1 convolution its other dims."""
    exp_avg = state["exp_avg"]
    if isinstance(exp_avg, list):
        codes = [block["value" if "value" in block else "data"] for block in exp_avg]
        blocks = zip(codes, exp_avg, strict=True)
        exp_avg = torch.cat([code.float() * block["scale"] + block["min"] for code, block in blocks])
    cols = {name: state[name] for name in ("exp_avg_sq_col", "exp_avg_res_col") if name in state}
    return {**state, "exp_avg": exp_avg, **{name: col.reshape(exp_avg.shape[1:]) for name, col in cols.items()}}


def _above(size: int) -> dict[str, Any]:
    """The largest size that is left in 32 bits there, as the smallest size that is in 8 bits here."""
    return {"min_8bit_size": size + 1}


_OF_SANA: dict[str, Any] = {
    "algorithm": "came",
    "adds": {"factor": "linear"},
    "state_left_out": ("RMS",),
    "decode": _decode_linear,
}
_FIXED = "give weight_decay a schedule that does not fall as lr does, and load with False"
_NOT_OF_CAME: dict[tuple[str, bool | str], str] = {
    ("ams_bound", True): "Bighorn has no AMSGrad for CAME; load only the model",
    ("fixed_decay", True): _FIXED,
    ("weight_decouple", False): "Bighorn's CAME has decoupled decay alone; load only the model",
}

FORMATS = (
    Format(
        name="torch's AdamW",
        marks=_ADAM | {"decoupled_weight_decay"},
        where={"decoupled_weight_decay": True},
        # With the trust ratio fixed to 1, decay inside u is decoupled decay.
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
        name="LAMBrrr's Lamb",
        marks=_ADAM,
        where={"foreach": True, "capturable": True, "fused": False},  # which nothing else than its constructor sets
        implied={
            "adam": (False,),
            "bias_correction": (True,),
            "grad_averaging": (True,),
            "decay_mode": ("ratio",),
            "always_adapt": (True,),
            "weight_norm_bounds": (None,),
            **_WITHOUT_EXTENSIONS,
        },
        **_TORCH,
    ),
    Format(
        name="torch's Adam or AdamW",  # before torch 2.7, whose groups do not distinguish these two
        marks=_ADAM | {"maximize"},  # torchao's groups, whose moments are no plain tensors, have all keys but this one
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
            "max_lr_snapshot": lambda largest: {"corrected_weight_decay": largest},
            "corrected_weight_decay": lambda on: {} if on else _UNCORRECTED,
            # Without decoupled decay there is nothing to correct.
            "decoupled_decay": lambda on: {"decay_mode": "decoupled"} if on else {"decay_mode": "ratio"} | _UNCORRECTED,
        },
        left_out=("foreach",),
        implied={
            "adam": (False,),
            "hyperball": (False,),
            "weight_norm_bounds": (None,),
            "second_moment": ("adam",),
            "maximize": (False,),
        },
    ),
    Format(
        name="apex's FusedLAMB",
        algorithm="lamb",
        marks=_APEX,
        implied={
            "adam": (False,),
            "weight_norm_bounds": (None,),
            "maximize": (False,),
            **_WITHOUT_EXTENSIONS,
        },
        unsaved='use_nvlamb and adam_w_mode, here always_adapt and decay_mode ("l2" for adam_w_mode=False)',
    ),
    Format(
        name="torch_npu's NpuFusedLamb",
        algorithm="lamb",
        marks=frozenset({"lr", "betas", "eps", "weight_decay"}),
        bare=True,
        evidence=lambda state: {"exp_avg", "exp_avg_sq"} <= state.keys(),
        implied={
            "bias_correction": (False,),
            "grad_averaging": (True,),
            "decay_mode": ("ratio",),
            "always_adapt": (True,),
            "weight_norm_bounds": ((0.0, 10.0),),
            "maximize": (False,),
            **_WITHOUT_EXTENSIONS,
        },
        unsaved="adam and use_global_grad_norm (in bighorn.Lamb: max_grad_norm=1.0)",
    ),
    Format(
        name="pytorch_optimizer's Lamb",
        algorithm="lamb",
        marks=frozenset({"lr", "betas", "eps", "weight_decay", "weight_decouple", "rectify", "grad_averaging"}),
        becomes={"weight_decouple": lambda on: {"decay_mode": "decoupled" if on else "ratio"}},
        refused={
            ("rectify", True): "Bighorn has no rectified step; load only the model",
            ("fixed_decay", True): _FIXED,
            ("adanorm", True): "Bighorn has no AdaNorm; load only the model",
        },
        left_out=("foreach", "max_grad_norm", "adam_debias", "adanorm_r"),
        implied={
            "bias_correction": (False,),
            "always_adapt": (True,),
            "weight_norm_bounds": ((0.0, 10.0),),
            **_WITHOUT_EXTENSIONS,
        },
        state_left_out=("weight_norm", "adam_norm", "trust_ratio"),
        unsaved="pre_norm and maximize; without adam_debias it divides lr by 1 - beta1^t, which is 1 after 100 steps",
    ),
    Format(
        name="timm's Lars",
        algorithm="lars",
        marks=frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov", "trust_coeff", "trust_clip"}),
        becomes={"trust_coeff": lambda value: {"trust_coefficient": value}},
        refused={("dampening", True): "Bighorn's momentum adds the whole gradient; load only the model"},
        left_out=("foreach",),
        implied={"denominator": ("sum",), "maximize": (False,)},
        adds={"lr_in_momentum": False},
        uncounted={"momentum_buffer": "exp_avg"},
        unsaved="the steps that it has made, of which one is counted",
    ),
    Format(
        name="OneTrainer's CAME8bit",
        marks=_CAME | {"quant_block_size", "use_cautious"},
        becomes={
            "use_cautious": lambda on: {"cautious": bool(on)},
            "stochastic_rounding": lambda on: {"weight_rounding": "stochastic" if on else "nearest"},
            "min_8bit_size": _above,
        },
        left_out=("quant_block_size",),
        implied={**_CAME_STEPS, "state_dtype": ("int8",)},
        **_OF_SANA,
    ),
    Format(
        name="SANA's CAME8BitWrapper",
        marks=_CAME | {"block_size"},
        becomes={"min_8bit_size": _above},
        left_out=("block_size",),
        implied={**_CAME_STEPS, "cautious": (False,), "state_dtype": ("int8",)},
        **_OF_SANA,
    ),
    Format(
        name="SANA's CAMEWrapper",
        marks=_CAME,
        evidence=_shows_linear,
        implied={**_CAME_STEPS, "cautious": (False,)},
        **_OF_SANA,
    ),
    Format(
        name="came-pytorch's CAME",
        algorithm="came",
        marks=_CAME,
        implied=_CAME_STEPS,
        adds={"factor": "last_two"},
        state_left_out=("RMS",),
        unsaved="OneTrainer's use_cautious and stochastic_rounding, here cautious and weight_rounding",
    ),
    Format(
        name="LoRA_Easy's CAME",
        algorithm="came",
        marks=_CAME_OF_TWO_EPS | {"update_strategy"},
        # "both" gives the elements that "cautious" keeps the gradient's sign, which they have.
        becomes={"update_strategy": lambda name: {"cautious": name in ("cautious", "both")}},
        joined={"eps": ("eps1", "eps2")},
        refused={
            **_NOT_OF_CAME,
            ("update_strategy", "grams"): "Bighorn has no Grams; load only the model",
            ("cautious_weight_decay", True): "Bighorn's decay is of all elements; load only the model",
        },
        left_out=(
            *("foreach", "compile_step", "sync_chunk_size", "state_storage_dtype", "state_storage_device"),
            "non_factored_confidence",  # which the state shows
        ),
        implied=_CAME_STEPS,
        adds={"factor": "last_two"},
        state_left_out=("RMS", "exp_avg_sq_hat"),
        state_refused={
            "exp_avg_res": "Bighorn's CAME has no confidence of vectors (non_factored_confidence); load only the model"
        },
        unsaved=(
            'its stochastic rounding of bfloat16 weights, here weight_rounding="stochastic"; checkpoints of 2025 do '
            "not tell clip_threshold either"
        ),
    ),
    Format(
        name="pytorch_optimizer's CAME",
        algorithm="came",
        marks=_CAME_OF_TWO_EPS,
        joined={"eps": ("eps1", "eps2")},
        refused=_NOT_OF_CAME,
        left_out=("foreach",),
        implied={"cautious": (False,), **{name: values for name, values in _CAME_STEPS.items() if name != "maximize"}},
        adds={"factor": "last_two"},
        state_left_out=("RMS", "exp_avg_sq_hat"),
        unsaved="clip_threshold and maximize",
    ),
)
"""The known formats in order: the first one that recognises a checkpoint applies."""
