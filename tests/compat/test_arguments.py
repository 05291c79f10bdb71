"""The arguments of each compatibility class: bighorn's options, or a refusal in the system's terms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bighorn.compat import apex, mindformers, mindspore, npu_bridge, pytorch_fused_lamb, timm, torch_npu
from tests.support.compat_faces import FACES, Options, face, name_of
from tests.support.compat_training import weights
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


@for_every("kind", [torch_npu.NpuFusedLamb, pytorch_fused_lamb.Lamb, apex.FusedLAMB, timm.Lamb], ids=name_of)
def test_one_and_zero_are_true_and_false_as_in_the_classes_that_are_shipped(kind: Any) -> None:
    """MindSpore's and MindFormers' classes refuse them, like bighorn's own."""
    for arguments, _ in FACES[kind].rows:
        for name, value in arguments.items():
            if not isinstance(value, bool):
                continue
            for number in (int(value), torch.tensor(value)):
                given, plain = (face(kind, weights().items(), 0.001, {name: each}) for each in (number, value))
                assert described(given) == described(plain), (name, number)


# ---- refusals -----------------------------------------------------------------------------------------------------

Refusal = tuple[Options, type[Exception], str]


def each(names: str, error: type[Exception], *bad: tuple[Any, str]) -> list[Refusal]:
    """Return a refusal of each of these arguments, with each value and the message after the argument's name."""
    return [({name: value}, error, f"^{name}{message}") for name in names.split() for value, message in bad]


NO_LISTS: tuple[Any, ...] = (3, None, "w", torch.nn.Parameter(torch.ones(3)), {"params": []}, set())
A_FLOAT, A_NUMBER = " must be a float", " must be a number or a schedule"
REFUSED: dict[Any, list[Refusal]] = {
    torch_npu.NpuFusedLamb: [
        ({"adam": 2}, TypeError, "adam must be True or False, not 2"),
        ({"use_global_grad_norm": "yes"}, TypeError, "use_global_grad_norm must be"),
    ],
    pytorch_fused_lamb.Lamb: [
        ({"amsgrad": "yes"}, TypeError, "amsgrad must be"),
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
        ({"adam_w_mode": 2}, TypeError, "^adam_w_mode must be"),
        ({"use_nvlamb": 2}, TypeError, "^use_nvlamb must be"),
    ],
    apex.FusedMixedPrecisionLamb: [
        ({"step": 5}, ValueError, "^step=5 must be 0: load_state_dict restores"),
        ({"reduced_precision_dtype": "fp16"}, TypeError, "^reduced_precision_dtype must"),
    ],
    timm.Lamb: [
        ({"corrected_weight_decay": 2}, TypeError, "^corrected_weight_decay must be"),
        ({"trust_clip": 2}, TypeError, "^trust_clip must be"),
        ({"caution": 2}, TypeError, "^caution must be"),
        ({"decoupled_decay": 2}, TypeError, "^decoupled_decay must be"),
    ],
    mindspore.Lamb: [
        *each("learning_rate", TypeError, *((bad, " must be") for bad in ("0.1", None, {0.1}, True))),
        *each("learning_rate", ValueError, (-0.1, r"=-0\.1"), (torch.ones(1, 1), " as a tensor")),
        *each("learning_rate", ValueError, ([], ": values is empty"), ([0.1, math.nan], r": values\[1\]=nan")),
        *each("learning_rate", TypeError, (["fast"], ": values")),
        *each("beta1 beta2 eps", TypeError, (1, A_FLOAT), ("0.9", A_FLOAT)),
        *each(
            "beta1 beta2", ValueError, (0.0, r"=0\.0.*in \(0, 1\)"), (1.5, r"=1\.5.*in \(0, 1\)"), (math.nan, "=nan")
        ),
        *each("beta1 beta2", ValueError, (1.0, r"=1\.0.*in \(0, 1\)")),
        *each("eps", ValueError, (0.0, r"=0\.0.*above 0"), (math.inf, "=inf")),
        *each("weight_decay", TypeError, ("0.1", A_NUMBER), ([0.1, 0.2], A_NUMBER), (True, A_NUMBER)),
        *each("weight_decay", ValueError, (-0.1, r"=-0\.1"), (10**400, "=1000")),
        ({"weight_decay": lambda step: -1.0 - step}, ValueError, r"^the schedule of weight_decay at step 0: w.*=-1\.0"),
        ({"loss_scale": 2.0}, TypeError, "loss_scale"),
    ],
    mindformers.Came: [
        *each("learning_rate", TypeError, ("0.1", " must be"), ({0.1}, " must be")),
        *each("learning_rate", ValueError, (-0.1, r"=-0\.1"), ([], ": values is empty"), (None, " is missing")),
        ({"relative_step": True}, ValueError, r"^relative_step=True.*leave learning_rate=0\.001 out"),
        ({"warmup_init": True}, ValueError, r"^warmup_init=True.*set relative_step=True"),
        ({"learning_rate": None, "warmup_init": True}, ValueError, r"^warmup_init=True.*set relative_step=True"),
        ({"eps": 1e-30}, TypeError, "^eps must be three floats"),
        ({"eps": (1e-30, 1, 1e-16)}, TypeError, r"^eps\[1\] must be a float"),
        *each("eps", ValueError, ((1e-30, 1e-16), "=.*three floats"), ([0.0, 1e-3, 1e-16], r"\[0\]=0\.0")),
        *each("eps", ValueError, ((1e-30, 1e-3, -1e-16), r"\[2\]=-1e-16")),
        *each("clip_threshold loss_scale", TypeError, ("1", " must be")),
        *each("clip_threshold loss_scale", ValueError, (0, "=0")),
        *each("decay_rate", TypeError, (1, A_FLOAT)),
        *each("decay_rate", ValueError, (1.1, r"=1\.1.*\[0, 1\]"), (-0.1, r"=-0\.1")),
        *each("beta1 beta3", TypeError, (0, A_FLOAT)),
        *each("beta1", ValueError, (-0.1, r"=-0\.1 .*\(0, 1\)$"), (1.1, r"=1\.1"), (1.0, r"=1\.0")),
        *each("beta1", ValueError, (0.0, "=0.0 .*without momentum")),
        *each("beta3", ValueError, (-0.1, r"=-0\.1"), (1.1, r"=1\.1 .*\[0, 1\)$")),
        *each("beta3", ValueError, (1.0, r"=1\.0.*instability.*stay at 0")),
        *each(
            "weight_decay", TypeError, ("0.1", " must be"), (1, r" must be a float, not 1 \(int\)"), ([0.1], " must be")
        ),
        *each("weight_decay", ValueError, (-0.1, r"=-0\.1"), (2.0, r"=2\.0 .*\[0, 1\]")),
        *each("scale_parameter relative_step warmup_init compression", TypeError, (1, " must be")),
        *each("loss_scale", TypeError, (True, " must be a number")),
        *each("loss_scale", ValueError, (-1.0, r"=-1\.0"), (math.inf, "=inf")),
        ({"params": [3]}, TypeError, r"^params\[0\] must be a torch\.nn\.Parameter"),
        *each("params", TypeError, *((bad, " must be a list") for bad in NO_LISTS)),
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
