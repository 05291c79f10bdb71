"""The arguments of each compatibility class: bighorn's options, or a refusal in the system's terms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from bighorn.compat import apex, mindformers, mindspore, npu_bridge, pytorch_fused_lamb, timm, torch_npu
from tests.support import peer_came_formulas
from tests.support.compat_faces import FACES, Options, face, name_of
from tests.support.compat_training import LRS, assert_close, by_formula, by_scalar, trained, weights
from tests.support.tables import for_every

SIGNATURES = {
    **{kind: each.signature for kind, each in FACES.items()},
    npu_bridge.FixedLossScaleManager: "(loss_scale, enable_overflow_check=True)",
    npu_bridge.ExponentialUpdateLossScaleManager: (
        "(init_loss_scale, incr_every_n_steps, decr_every_n_nan_or_inf=2, incr_ratio=2, decr_ratio=0.8)"
    ),
    mindspore.FixedLossScaleManager: "(loss_scale=128.0, drop_overflow_update=True)",
    mindspore.DynamicLossScaleManager: "(init_loss_scale=16777216, scale_factor=2, scale_window=2000)",
}


def described(optimizer: Any) -> Any:
    """Return all attributes of the constructor; a rule on names becomes its result for each name."""
    group = {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "step")}
    settings = vars(optimizer._settings)
    rule = settings["exclude_from_weight_decay"]
    verdicts = {name: rule(name, param) for name, param in weights().items()} if callable(rule) else rule
    return group, {**settings, "exclude_from_weight_decay": verdicts}, optimizer._default_schedules


@for_every("kind", SIGNATURES, ids=name_of)
def test_names_order_and_defaults_are_those_of_the_system(kind: Callable[..., object]) -> None:
    signature = inspect.signature(kind)
    bare = [argument.replace(annotation=inspect.Parameter.empty) for argument in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[kind]


@for_every("kind", FACES, ids=name_of)
def test_arguments_become_options(kind: Any) -> None:
    made = FACES[kind]
    for arguments, options in (({}, {}), *made.rows):
        ours = made.native(weights().items(), 0.001, options)
        theirs = face(kind, weights().items(), 0.001, arguments)
        assert isinstance(theirs, made.ours)
        assert described(theirs) == described(ours), arguments
    seen = {name for arguments, _ in made.rows for name in arguments}
    assert seen == inspect.signature(kind).parameters.keys() - {"params"}, "each argument has a row"


# ---- one training of each -----------------------------------------------------------------------------------------

FIVE: Options = {"betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.1}
TRAININGS: dict[str, tuple[Callable[[Mapping[str, Any]], Any], Callable[[str], Options], float | None]] = {
    "torch_npu": (
        lambda params: torch_npu.NpuFusedLamb(params.values(), LRS, **FIVE, use_global_grad_norm=True),
        lambda _: {**FIVE, "bias_correction": False, "weight_norm_bounds": (0.0, 10.0)},
        1.0,
    ),
    "pytorch_fused_lamb": (
        lambda params: pytorch_fused_lamb.Lamb(params.values(), LRS, **FIVE, amsgrad=True, maximize=True),
        lambda _: {**FIVE, "second_moment": "amsgrad", "maximize": True},
        None,
    ),
    "npu_bridge": (
        lambda params: npu_bridge.LAMBOptimizer(LRS, 0.1, 0.8, 0.99, 1e-5, ["bias", "gam{2}a$"], params=params.items()),
        lambda name: FIVE | ({"weight_decay": 0.0} if name in ("conv.bias", "norm.gamma") else {}),
        None,
    ),
    "apex": (
        lambda params: apex.FusedLAMB(params.values(), LRS, **FIVE, adam_w_mode=False, grad_averaging=False),
        lambda _: {**FIVE, "decay_mode": "l2", "grad_averaging": False},
        1.0,
    ),
    "apex, no decay": (
        lambda params: apex.FusedMixedPrecisionLamb(params.values(), LRS, weight_decay=0.0, max_grad_norm=None),
        lambda _: {"adam": True},
        None,
    ),
    "timm": (
        lambda params: timm.Lamb(params.values(), LRS, **FIVE, trust_clip=True, caution=True),
        lambda _: {**FIVE, "trust_ratio_bounds": (0.0, 1.0), "cautious": True},
        1.0,
    ),
    "mindspore": (
        lambda params: mindspore.Lamb(params.items(), LRS, 0.8, 0.99, 1e-5, 0.1),
        lambda name: FIVE | ({"weight_decay": 0.0} if name in ("norm.beta", "norm.gamma") else {}),
        None,
    ),
}
"""Each class, the scalar formulas' options by the names of parameters, and the norm that clips gradients."""


@for_every("name", TRAININGS)
def test_a_training_is_that_of_the_paper(name: str) -> None:
    make, options, max_grad_norm = TRAININGS[name]
    assert_close(trained(make), by_scalar(options, max_grad_norm), 1e-12)


def test_a_training_of_mindformers_is_that_of_its_formula() -> None:
    ours = trained(lambda params: mindformers.Came(params.items(), LRS, weight_decay=0.1))
    assert_close(ours, by_formula(peer_came_formulas.mindformers))


# ---- refusals -----------------------------------------------------------------------------------------------------

Refusal = tuple[Options, type[Exception], str]
REFUSED: dict[Any, list[Refusal]] = {
    torch_npu.NpuFusedLamb: [
        ({"adam": 1}, TypeError, "adam must be"),
        ({"use_global_grad_norm": 1}, TypeError, "use_global_grad_norm must be"),
    ],
    pytorch_fused_lamb.Lamb: [
        ({"amsgrad": 1}, TypeError, "amsgrad must be"),
    ],
    npu_bridge.LAMBOptimizer: [
        ({"learning_rate": -0.1}, ValueError, r"^learning_rate=-0\.1"),
        ({"learning_rate": "fast"}, TypeError, "^learning_rate must be"),
        ({"weight_decay_rate": -1}, ValueError, "^weight_decay_rate=-1"),
        ({"beta_1": 1.0}, ValueError, r"^beta_1=1\.0"),
        ({"beta_2": -0.5}, ValueError, r"^beta_2=-0\.5"),
        ({"epsilon": -1e-6}, ValueError, "^epsilon=-1e-06"),
        ({"exclude_from_weight_decay": "bias"}, TypeError, "^exclude_from_weight_decay must be"),
        ({"exclude_from_weight_decay": ["("]}, ValueError, "^exclude_from_weight_decay.*regular expression"),
        ({"bias_correction": 1}, ValueError, "^bias_correction=1 .*'lr'$"),
        ({"name": "LAMB"}, TypeError, "name"),
        (
            {"exclude_from_weight_decay": ["bias"], "params": weights().values()},
            ValueError,
            r"needs names: pass model\.named_parameters\(\) as params, ",
        ),
    ],
    apex.FusedLAMB: [
        ({"amsgrad": True}, ValueError, r"^amsgrad=True is refused by apex, too: use bighorn\.Lamb"),
        ({"set_grad_none": False}, ValueError, r"call zero_grad\(set_to_none=False\)$"),
        ({"adam_w_mode": 1}, TypeError, "^adam_w_mode must be"),
        ({"use_nvlamb": 1}, TypeError, "^use_nvlamb must be"),
    ],
    apex.FusedMixedPrecisionLamb: [
        ({"step": 5}, ValueError, "^step=5 must be 0: load_state_dict restores"),
        ({"reduced_precision_dtype": "fp16"}, TypeError, "^reduced_precision_dtype must"),
    ],
    timm.Lamb: [
        ({"corrected_weight_decay": True}, ValueError, "pass a schedule as weight_decay"),
        ({"trust_clip": 1}, TypeError, "^trust_clip must be"),
        ({"caution": 1}, TypeError, "^caution must be"),
        ({"decoupled_decay": 1}, TypeError, "^decoupled_decay must be"),
    ],
    mindspore.Lamb: [
        ({"learning_rate": "0.1"}, TypeError, "^learning_rate must be"),
        ({"learning_rate": None}, TypeError, "^learning_rate must be"),
        ({"learning_rate": {0.1}}, TypeError, "^learning_rate must be"),
        ({"learning_rate": True}, TypeError, "^learning_rate must be"),
        ({"learning_rate": ["fast"]}, TypeError, "^learning_rate: values"),
        ({"learning_rate": -0.1}, ValueError, r"^learning_rate=-0\.1"),
        ({"learning_rate": torch.ones(2, 2)}, ValueError, "^learning_rate as a tensor"),
        ({"learning_rate": []}, ValueError, "^learning_rate: values is empty"),
        ({"learning_rate": [0.1, math.nan]}, ValueError, r"^learning_rate: values\[1\]=nan"),
        ({"beta1": 1}, TypeError, "^beta1 must be a float"),
        ({"beta2": "0.9"}, TypeError, "^beta2 must be a float"),
        ({"eps": 1}, TypeError, "^eps must be a float"),
        ({"beta1": 0.0}, ValueError, r"^beta1=0\.0.*in \(0, 1\)"),
        ({"beta1": 1.0}, ValueError, r"^beta1=1\.0.*in \(0, 1\)"),
        ({"beta2": 0.0}, ValueError, r"^beta2=0\.0.*in \(0, 1\)"),
        ({"beta2": 1.5}, ValueError, r"^beta2=1\.5.*in \(0, 1\)"),
        ({"beta2": math.nan}, ValueError, "^beta2=nan"),
        ({"eps": 0.0}, ValueError, r"^eps=0\.0.*above 0"),
        ({"eps": math.inf}, ValueError, "^eps=inf"),
        ({"weight_decay": "0.1"}, TypeError, "^weight_decay must be a number or a schedule"),
        ({"weight_decay": [0.1, 0.2]}, TypeError, "^weight_decay must be a number or a schedule"),
        ({"weight_decay": True}, TypeError, "^weight_decay must be a number or a schedule"),
        ({"weight_decay": -0.1}, ValueError, r"^weight_decay=-0\.1"),
        ({"weight_decay": 10**400}, ValueError, "^weight_decay=1000"),
        ({"loss_scale": 2.0}, TypeError, "loss_scale"),
        ({"weight_decay": lambda step: -1.0 - step}, ValueError, r"^the schedule of weight_decay at step 0: w.*=-1\.0"),
    ],
    mindformers.Came: [
        ({"learning_rate": "0.1"}, TypeError, "^learning_rate must be"),
        ({"learning_rate": {0.1}}, TypeError, "^learning_rate must be"),
        ({"learning_rate": -0.1}, ValueError, r"^learning_rate=-0\.1"),
        ({"learning_rate": []}, ValueError, "^learning_rate: values is empty"),
        ({"learning_rate": None}, ValueError, "^learning_rate is missing"),
        ({"relative_step": True}, ValueError, r"^relative_step=True.*leave learning_rate=0\.001 out"),
        ({"warmup_init": True}, ValueError, r"^warmup_init=True.*set relative_step=True"),
        ({"learning_rate": None, "warmup_init": True}, ValueError, r"^warmup_init=True.*set relative_step=True"),
        ({"eps": 1e-30}, TypeError, "^eps must be three floats"),
        ({"eps": (1e-30, 1e-16)}, ValueError, "^eps=.*three floats"),
        ({"eps": (1e-30, 1, 1e-16)}, TypeError, r"^eps\[1\] must be a float"),
        ({"eps": [0.0, 1e-3, 1e-16]}, ValueError, r"^eps\[0\]=0\.0"),
        ({"eps": (1e-30, 1e-3, -1e-16)}, ValueError, r"^eps\[2\]=-1e-16"),
        ({"clip_threshold": "1"}, TypeError, "^clip_threshold must be"),
        ({"clip_threshold": 0}, ValueError, "^clip_threshold=0"),
        ({"decay_rate": 1}, TypeError, "^decay_rate must be a float"),
        ({"decay_rate": 1.1}, ValueError, r"^decay_rate=1\.1.*\[0, 1\]"),
        ({"decay_rate": -0.1}, ValueError, r"^decay_rate=-0\.1"),
        ({"beta1": 1}, TypeError, "^beta1 must be a float"),
        ({"beta1": -0.1}, ValueError, r"^beta1=-0\.1 .*\(0, 1\)$"),
        ({"beta1": 1.1}, ValueError, r"^beta1=1\.1"),
        ({"beta1": 0.0}, ValueError, "^beta1=0.0 .*without momentum"),
        ({"beta1": 1.0}, ValueError, r"^beta1=1\.0"),
        ({"beta3": 0}, TypeError, "^beta3 must be a float"),
        ({"beta3": -0.1}, ValueError, r"^beta3=-0\.1"),
        ({"beta3": 1.1}, ValueError, r"^beta3=1\.1 .*\[0, 1\)$"),
        ({"beta3": 1.0}, ValueError, r"^beta3=1\.0.*instability.*stay at 0"),
        ({"weight_decay": "0.1"}, TypeError, "^weight_decay must be"),
        ({"weight_decay": 1}, TypeError, r"^weight_decay must be a float, not 1 \(int\)"),
        ({"weight_decay": [0.1]}, TypeError, "^weight_decay must be"),
        ({"weight_decay": -0.1}, ValueError, r"^weight_decay=-0\.1"),
        ({"weight_decay": 2.0}, ValueError, r"^weight_decay=2\.0 .*\[0, 1\]"),
        ({"scale_parameter": 1}, TypeError, "^scale_parameter must be"),
        ({"relative_step": 1}, TypeError, "^relative_step must be"),
        ({"warmup_init": 1}, TypeError, "^warmup_init must be"),
        ({"compression": 1}, TypeError, "^compression must be"),
        ({"loss_scale": "1"}, TypeError, "^loss_scale must be a number"),
        ({"loss_scale": True}, TypeError, "^loss_scale must be a number"),
        ({"loss_scale": 0}, ValueError, "^loss_scale=0.*above 0"),
        ({"loss_scale": -1.0}, ValueError, r"^loss_scale=-1\.0"),
        ({"loss_scale": math.inf}, ValueError, "^loss_scale=inf"),
        ({"params": [3]}, TypeError, r"^params\[0\] must be a torch\.nn\.Parameter"),
        ({"params": 3}, TypeError, "^params must be a list"),
        ({"use_locking": True}, TypeError, "use_locking"),
    ],
}


@for_every(
    ("kind", "arguments", "error", "message"),
    [(kind, *row) for kind, rows in REFUSED.items() for row in rows],
)
def test_what_is_refused(kind: Any, arguments: Options, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        face(kind, weights().items(), 0.001, arguments)


def near(name: str) -> str:
    return rf"\(did you mean {name!r}\?\)"


UNKNOWN: list[tuple[Any, str, str]] = [
    (torch_npu.NpuFusedLamb, "use_global_gradnorm", near("use_global_grad_norm")),
    (torch_npu.NpuFusedLamb, "bias_correction", r"; bighorn\.Lamb has it$"),
    (mindspore.Lamb, "lr", near("learning_rate")),
    (pytorch_fused_lamb.Lamb, "amsgrd", near("amsgrad")),
    (pytorch_fused_lamb.Lamb, "max_grad_norm", r"; bighorn\.Lamb has it$"),
    (pytorch_fused_lamb.Lamb, "foreach", r'torch\.optim: with bighorn\.Lamb, use backend="foreach"$'),
    (pytorch_fused_lamb.Lamb, "fused", r"torch\.optim: with bighorn\.Lamb, every backend is fused; "),
    (apex.FusedLAMB, "adamw_mode", near("adam_w_mode")),
    (apex.FusedMixedPrecisionLamb, "reduced_precision_type", near("reduced_precision_dtype")),
    (timm.Lamb, "trust_clp", near("trust_clip")),
    (npu_bridge.LAMBOptimizer, "weight_decay", near("weight_decay_rate")),
    (npu_bridge.NPUOptimizer, "is_losscale", near("is_loss_scale")),
    (npu_bridge.NPUDistributedOptimizer, "models", near("model")),
    (npu_bridge.NPULossScaleOptimizer, "is_distribute", near("is_distributed")),
    (npu_bridge.NPULossScaleOptimizer, "is_tailing_optimization", "; NPUOptimizer has it$"),
    (mindformers.Came, "clip_treshold", near("clip_threshold")),
    (mindformers.Came, "max_grad_norm", r"; bighorn\.Came has it$"),
]


@for_every(("kind", "name", "words"), UNKNOWN)
def test_an_unknown_argument_has_the_nearest_or_the_class_that_knows_it(kind: Any, name: str, words: str) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} got an unknown .*{name!r}.*{words}"):
        kind(**{name: True})
