"""Presets: the optimizers of other packages by name, as the options in which each differs from the paper.

`tests/math/test_presets.py` proves every row, against the package itself or a second implementation of its formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from bighorn._arguments import choice
from bighorn._foreign_options import FOREIGN, Foreign

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """The options of one published LAMB, CAME or LARS.

    Attributes:
        name: The name for `Lamb.like` or its siblings.
        options: The options in addition to the defaults.
        differs: The differences from the paper (of LAMB: from its version 5), in words.
        source: The source: repository, file and commit, or package and version.
        aliases: The names of other packages' optimizers that compute the same.
        complete: A function from the parameters and the given options to further options. Default: None.
        argument: The boolean argument of the source that selects it. Default: None.
    """

    name: str
    options: Options
    differs: str
    source: str
    aliases: tuple[str, ...] = ()
    complete: Callable[[Iterable[Any], Options], Options] | None = None
    argument: str | None = None


def _exclusions_fall_back(_: Iterable[Any], given: Options) -> Options:
    """Exclude the same parameters from adaptation as from decay, unless adaptation has its own list."""
    name = "exclude_from_layer_adaptation"
    return {name: given.get(name) or given.get("exclude_from_weight_decay")}


def is_norm(name: str, param: Tensor) -> bool:
    """Whether MindSpore treats a parameter as one of a norm. A function, unlike patterns, may match nothing."""
    del param
    return "beta" in name or "gamma" in name


def _no_decay_for_norms(params: Iterable[Any], given: Options) -> Options:
    """Exclude norms by parameter names. Groups set their own weight decay, so nothing is excluded from them."""
    name = "exclude_from_weight_decay"
    return {} if name in given or any(isinstance(param, dict) for param in params) else {name: is_norm}


def is_bias_or_norm(name: str, param: Tensor) -> bool:
    """Whether MindSpore's LARS leaves a parameter alone, by default."""
    del param
    return "LayerNorm" in name or "bias" in name


def _both_exclusions(rule: Any, _: Iterable[Any], given: Options) -> Options:
    """Exclude parameters from decay and adaptation by a rule, unless the exclusions are given."""
    return {name: given.get(name, rule) for name in ("exclude_from_weight_decay", "exclude_from_layer_adaptation")}


_APEX = {"weight_decay": 0.01, "max_grad_norm": 1.0}
_TIMM = {**_APEX, "always_adapt": False}

PRESETS = (
    Preset("paper-v5", {}, "nothing", "arXiv:1904.00962v5, Algorithm 2; optax 0.2.8, lamb", ("optax",)),
    Preset("paper-v3", {"bias_correction": False}, "no bias correction", "arXiv:1904.00962v3, Algorithm 2"),
    Preset(
        "apex",
        _TIMM,
        "clips the global gradient norm to 1; no trust ratio where weight_decay is 0",
        "NVIDIA/apex 06a83ce, csrc/multi_tensor_lamb.cu; timm 1.0.31, optim/lamb.py",
        ("timm",),
    ),
    Preset(
        "nvlamb",
        _APEX,
        "clips the global gradient norm to 1",
        "NVIDIA/apex 06a83ce, csrc/multi_tensor_lamb.cu with use_nvlamb=True",
        argument="use_nvlamb",
    ),
    Preset(
        "lambc",
        {**_TIMM, "trust_ratio_bounds": (0.0, 1.0)},
        "as apex; trust ratio at most 1",
        "timm 1.0.31, optim/lamb.py with trust_clip=True",
        argument="trust_clip",
    ),
    Preset(
        "lambw",
        {**_TIMM, "decay_mode": "decoupled"},
        "as apex; x decays first, by lr * weight_decay, and stays out of u",
        "timm 1.0.31, optim/lamb.py with decoupled_decay=True",
        argument="decoupled_decay",
    ),
    Preset(
        "adamh",
        {"hyperball": True, "betas": (0.9, 0.95), "eps": 1e-8, "max_grad_norm": 1.0},
        "Hyperball instead of a trust ratio; clips the global gradient norm to 1; beta2 0.95; eps 1e-8",
        "marin-community/levanter a4f7721, src/levanter/optim/adamh.py, which measures the norm before each step",
    ),
    Preset(
        "keras",
        {"decay_mode": "decoupled", "eps": 1e-7},
        "x decays first, by lr * weight_decay, and stays out of u; eps 1e-7",
        "keras 3.15.1, src/optimizers/lamb.py",
    ),
    Preset(
        "torch_npu",
        {"bias_correction": False, "weight_norm_bounds": (0.0, 10.0)},
        "no bias correction, nor with adam=True; weight norm clamped to 10",
        "Ascend/pytorch 1178aa0, torch_npu/optim/npu_fused_lamb.py; jettify/pytorch-optimizer 06f9dbb, lamb.py",
        ("cybertronai",),
    ),
    Preset(
        "deepspeed",
        {"bias_correction": "lr", "trust_ratio_bounds": (0.01, 10.0), "eps": 1e-8},
        "bias correction in the learning rate; trust ratio from 0.01 to 10; eps 1e-8",
        "microsoft/DeepSpeed 0c1913d, csrc/lamb/fused_lamb_cuda_kernel.cu; from e5d277f on: bias_correction=True",
    ),
    Preset(
        "colossalai",
        {"bias_correction": "lr"},
        "bias correction in the learning rate",
        "hpcaitech/ColossalAI 02aba63, nn/optimizer/distributed_lamb.py; its Lamb is paper-v3",
    ),
    Preset(
        "tfa",
        {},
        "parameters excluded from weight decay are not adapted either, unless those are listed apart",
        "tensorflow/addons 00beec0, optimizers/lamb.py",
        complete=_exclusions_fall_back,
    ),
    Preset(
        "mindspore",
        {},
        "without groups: no weight decay where a name contains beta or gamma",
        "mindspore-ai/mindspore 0f4901b, ir_fission/lamb_fission.cc; before 08097c0 on GPUs: trust ratio at most 10",
        complete=_no_decay_for_norms,
    ),
)
"""The table of presets of `Lamb`."""

_ONE_BY_ONE = "factors matrices and 1x1 convolutions alone"

CAME_PRESETS = (
    Preset(
        "came-pytorch",
        {"factor": "last_two"},
        "makes a matrix of the last two dims",
        "came-pytorch 0.1.3, CAME.py; pytorch_optimizer 4.1.0, optimizer/came.py; OneTrainer 46b042e, CAME.py",
        ("pytorch_optimizer", "onetrainer"),
    ),
    Preset(
        "sana",
        {"factor": "linear"},
        _ONE_BY_ONE,
        "NVlabs/Sana, diffusion/utils/optimizer.py, CAMEWrapper",
    ),
    Preset(
        "came8bit",
        {"factor": "linear", "state_dtype": "int8", "min_8bit_size": 16385},
        f"{_ONE_BY_ONE}; keeps the momentum of those above 16,384 elements in 8 bits, here with a scale for each 256 "
        "elements of a row, there with one for each 2,048 rows",
        "NVlabs/Sana, diffusion/utils/optimizer.py, CAME8BitWrapper; OneTrainer 247b0c3, CAME8bit.py",
        ("sana-8bit", "onetrainer-8bit"),
    ),
    Preset(
        "mindformers",
        {"factor": "last_two", "betas": (0.9, 0.999, 0.99), "decay_rate": 0.8},
        "makes a matrix of the last two dims; b2 = 1 - t^-0.8 at step t; b3 = 0.99",
        "mindformers 0ca25cc, core/optim/came.py",
    ),
)
"""The table of presets of `Came`."""


_OUTSIDE = {"lr_in_momentum": False}
_OF_SGD = {"momentum": 0.0, **_OUTSIDE}
_SGD = "lr multiplies the momentum, which is 0 unless given"
_TIMM_LARS = {**_OF_SGD, "always_adapt": False}
_JOINT = {"denominator": "joint", "eps": 0.0}
_NEITHER = "neither decay nor trust ratio"

LARS_PRESETS = (
    Preset("paper", {"eps": 0.0}, "nothing", "arXiv:1708.03888v3, Algorithm 1"),
    Preset("timm", _TIMM_LARS, f"{_SGD}; no trust ratio where weight_decay is 0", "timm 1.0.31, optim/lars.py"),
    Preset(
        "larc",
        {**_TIMM_LARS, "trust_clip": True},
        "as timm; a layer's learning rate is at most lr",
        "timm 1.0.31, optim/lars.py with trust_clip=True",
    ),
    Preset(
        "apex",
        {**_OF_SGD, "trust_clip": True, "trust_coefficient": 0.02},
        f"{_SGD}; a layer's learning rate is at most lr; trust coefficient 0.02. Not as there: {_NEITHER} nor clip if "
        "a norm is 0",
        "NVIDIA/apex 0bfb830, parallel/LARC.py around torch.optim.SGD",
    ),
    Preset(
        "flash",
        _TIMM_LARS,
        f"as timm. Not as there: {_NEITHER} if a norm is 0",
        "lightning-flash 0944535, core/optimizers/lars.py; lightning-bolts 2c8b022, pl_bolts/optimizers/lars.py",
        ("bolts",),
    ),
    Preset(
        "pytorch_optimizer",
        {**_OUTSIDE, "eps": 0.0},
        f"lr multiplies the momentum; {_NEITHER} for tensors of less than 2 dims. Not as there: a trust ratio if the "
        "gradient is 0",
        "pytorch_optimizer 4.1.0, optimizer/lars.py",
        complete=partial(_both_exclusions, "ndim<2"),
    ),
    Preset(
        "optax", _JOINT, "the denominator is ||g + weight_decay * x||, without eps", "optax 0.2.8, _src/alias.py, lars"
    ),
    Preset(
        "simclr",
        _JOINT,
        "as optax; parameters excluded from weight decay are not adapted either, unless those are listed apart",
        "google-research/simclr 383d414, tf2/lars_optimizer.py; tensorflow/models 0ca414d, optimization/lars.py",
        ("tf-models",),
        complete=_exclusions_fall_back,
    ),
    Preset(
        "barlowtwins",
        {**_JOINT, **_OUTSIDE},
        "lr multiplies the momentum; the denominator is ||g + weight_decay * x||, without eps",
        "facebookresearch/barlowtwins 046eec3, main.py; vicreg b42aa23, main_vicreg.py; google-deepmind/"
        "deepmind-research 4822a45, byol/utils/optimizers.py",
        ("vicreg", "byol"),
    ),
    Preset(
        "mindspore",
        {**_OUTSIDE, "eps": 1e-5},
        f"lr multiplies the momentum; eps 1e-5; {_NEITHER} where a name contains LayerNorm or bias. Not as there: a "
        "trust ratio if a norm is 0, so that x stays 0",
        "mindspore 01fc6ef, nn/optim/lars.py, and 09fe5b6, nn/optim/momentum.py; CANN's impl/lars_v2_update.py",
        complete=partial(_both_exclusions, is_bias_or_norm),
    ),
)
"""The table of presets of `Lars`."""


LambPreset = Literal[
    "paper-v5",
    "optax",
    "paper-v3",
    "apex",
    "timm",
    "nvlamb",
    "lambc",
    "lambw",
    "adamh",
    "keras",
    "torch_npu",
    "cybertronai",
    "deepspeed",
    "colossalai",
    "tfa",
    "mindspore",
]
"""The names of `PRESETS`, for type checkers."""

CamePreset = Literal[
    "came-pytorch",
    "pytorch_optimizer",
    "onetrainer",
    "sana",
    "came8bit",
    "sana-8bit",
    "onetrainer-8bit",
    "mindformers",
]
"""The names of `CAME_PRESETS`, for type checkers."""

LarsPreset = Literal[
    "paper",
    "timm",
    "larc",
    "apex",
    "flash",
    "bolts",
    "pytorch_optimizer",
    "optax",
    "simclr",
    "tf-models",
    "barlowtwins",
    "vicreg",
    "byol",
    "mindspore",
]
"""The names of `LARS_PRESETS`, for type checkers."""


def _instead(preset: Preset) -> Foreign:
    """The argument of a preset in its package; the remedy is the preset, or the option that makes it."""
    assignments = {name: f"{name}={value!r}" for name, value in preset.options.items() if name not in _TIMM}
    remedy = " or ".join([f'use Lamb.like("{preset.name}", ...)', *assignments.values()])
    return Foreign(preset.source.partition(",")[0], remedy, tuple(assignments))


ELSEWHERE: Mapping[str, Foreign] = {
    **FOREIGN,
    **{preset.argument: _instead(preset) for preset in PRESETS if preset.argument},
}
"""Options of other packages' optimizers, with the arguments of presets."""


def _by_name(presets: tuple[Preset, ...]) -> dict[str, Preset]:
    return {name: preset for preset in presets for name in (preset.name, *preset.aliases)}


def options(name: str, params: Iterable[Any], given: Options, presets: tuple[Preset, ...] = PRESETS) -> dict[str, Any]:
    """Return the options of a preset for some parameters; given options override its own.

    Raises:
        ValueError: There is no such preset, or its argument in its own package is given and off.
    """
    by_name = _by_name(presets)
    for kind, others in {"Lamb": PRESETS, "Came": CAME_PRESETS, "Lars": LARS_PRESETS}.items():
        if isinstance(name, str) and name not in by_name and name in _by_name(others):
            raise ValueError(f"name={name!r} is a preset of {kind}: use {kind}.like({name!r}, ...)")
    choice(*by_name)("name", name)
    preset = by_name[name]
    if preset.argument is not None and preset.argument in given:
        value = given[preset.argument]
        raise ValueError(f"preset {name!r} is {preset.argument}=True, got {value!r}: leave it out, or use 'apex'")
    return {**preset.options, **given, **(preset.complete(params, given) if preset.complete else {})}
