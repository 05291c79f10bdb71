"""The optimizers of other systems: their signatures, and the options of bighorn that equal their arguments."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

import bighorn
from bighorn._optim.presets import is_norm
from bighorn.compat import apex, mindformers, mindspore, npu_bridge, pytorch_fused_lamb, timm, torch_npu
from bighorn.schedules import RelativeStep

Options = dict[str, Any]


class Face(NamedTuple):
    """A compatibility class, and bighorn's optimizer that it equals."""

    signature: str
    """The signature in the documentation of the system; npu_bridge's has no `params`."""
    ours: Any
    base: Options
    """Options of a call without further arguments."""
    rows: tuple[tuple[Options, Options], ...]
    """Arguments, and the options that equal them."""
    chosen: tuple[Options, Options]
    """A row for the tests of all faces: copies, checkpoints and ranks must keep these."""

    def native(self, params: Any, lr: Any, options: Options) -> Optimizer:
        """Return bighorn's optimizer with the face's options and further ones."""
        made: Optimizer = self.ours(params, **{"lr": lr, **self.base, **options})
        return made


ADAM: tuple[tuple[Options, Options], ...] = tuple(
    ({name: value}, {name: value})
    for name, value in {"lr": 0.2, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}.items()
)
"""Arguments with the same name in torch's Adam and in bighorn."""
APEX: tuple[tuple[Options, Options], ...] = (
    *ADAM,
    ({"bias_correction": False}, {"bias_correction": False}),
    ({"grad_averaging": False}, {"grad_averaging": False}),
    ({"max_grad_norm": None}, {"max_grad_norm": None}),
)
OF_APEX: tuple[tuple[Options, Options], ...] = (
    *APEX,
    ({"adam_w_mode": False}, {"decay_mode": "l2"}),
    ({"use_nvlamb": True}, {"always_adapt": True}),
    ({"amsgrad": False}, {}),
)

EXCLUDED: Options = {"exclude_from_weight_decay": ["beta", "gamma"]}

FACES: dict[Any, Face] = {
    torch_npu.NpuFusedLamb: Face(
        "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-06, weight_decay=0, adam=False, use_global_grad_norm=False)",
        bighorn.Lamb,
        {"bias_correction": False, "weight_norm_bounds": (0, 10)},
        (*ADAM, ({"adam": True}, {"adam": True}), ({"use_global_grad_norm": True}, {"max_grad_norm": 1.0})),
        ({"weight_decay": 0.1, "use_global_grad_norm": True}, {"weight_decay": 0.1, "max_grad_norm": 1.0}),
    ),
    pytorch_fused_lamb.Lamb: Face(
        "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, amsgrad=False, *, maximize=False)",
        bighorn.Lamb,
        {"eps": 1e-8},
        (*ADAM, ({"amsgrad": True}, {"second_moment": "amsgrad"}), ({"maximize": True}, {"maximize": True})),
        ({"weight_decay": 0.1, "amsgrad": True}, {"weight_decay": 0.1, "second_moment": "amsgrad"}),
    ),
    npu_bridge.LAMBOptimizer: Face(
        "(learning_rate, weight_decay_rate=0.0, beta_1=0.9, beta_2=0.999, epsilon=1e-06, "
        "exclude_from_weight_decay=None, *, params, bias_correction=True)",
        bighorn.Lamb,
        {},
        (
            ({"learning_rate": 0.2}, {"lr": 0.2}),
            ({"weight_decay_rate": 0.1}, {"weight_decay": 0.1}),
            ({"beta_1": 0.8}, {"betas": (0.8, 0.999)}),
            ({"beta_2": 0.8}, {"betas": (0.9, 0.8)}),
            ({"epsilon": 1e-3}, {"eps": 1e-3}),
            ({"exclude_from_weight_decay": [r"\.b"]}, {"exclude_from_weight_decay": [r"\.b"]}),
            ({"bias_correction": False}, {"bias_correction": False}),
        ),
        ({"weight_decay_rate": 0.1, **EXCLUDED}, {"weight_decay": 0.1, **EXCLUDED}),
    ),
    apex.FusedLAMB: Face(
        "(params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-06, weight_decay=0.01, amsgrad=False, "
        "adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False)",
        bighorn.Lamb,
        {"weight_decay": 0.01, "max_grad_norm": 1.0, "always_adapt": False},
        (*OF_APEX, ({"set_grad_none": True}, {})),
        ({"adam_w_mode": False, "use_nvlamb": True}, {"decay_mode": "l2", "always_adapt": True}),
    ),
    apex.FusedMixedPrecisionLamb: Face(
        "(params, lr=0.001, step=0, bias_correction=True, betas=(0.9, 0.999), eps=1e-06, weight_decay=0.01, "
        "amsgrad=False, adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False, "
        "reduced_precision_dtype=None)",
        bighorn.Lamb,
        {"weight_decay": 0.01, "max_grad_norm": 1.0, "always_adapt": False},
        (*OF_APEX, ({"step": 0}, {}), ({"reduced_precision_dtype": torch.bfloat16}, {})),
        ({"weight_decay": 0.0, "reduced_precision_dtype": torch.bfloat16}, {"weight_decay": 0.0}),
    ),
    timm.Lamb: Face(
        "(params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-06, weight_decay=0.01, "
        "grad_averaging=True, max_grad_norm=1.0, trust_clip=False, always_adapt=False, caution=False, "
        "decoupled_decay=False, corrected_weight_decay=False, foreach=None)",
        bighorn.Lamb,
        {"weight_decay": 0.01, "max_grad_norm": 1.0, "always_adapt": False},
        (
            *APEX,
            ({"trust_clip": True}, {"trust_ratio_bounds": (0.0, 1.0)}),
            ({"always_adapt": True}, {"always_adapt": True}),
            ({"caution": True}, {"cautious": True}),
            ({"decoupled_decay": True}, {"decay_mode": "decoupled"}),
            (
                {"lr": 0.2, "decoupled_decay": True, "corrected_weight_decay": True},
                {"lr": 0.2, "decay_mode": "decoupled", "corrected_weight_decay": 0.2},
            ),
            ({"foreach": True}, {}),
        ),
        ({"trust_clip": True, "foreach": True}, {"trust_ratio_bounds": (0.0, 1.0)}),
    ),
    mindspore.Lamb: Face(
        "(params, learning_rate, beta1=0.9, beta2=0.999, eps=1e-06, weight_decay=0.0)",
        bighorn.Lamb,
        {"exclude_from_weight_decay": is_norm},
        (
            ({"learning_rate": 0.2}, {"lr": 0.2}),
            ({"beta1": 0.8}, {"betas": (0.8, 0.999)}),
            ({"beta2": 0.8}, {"betas": (0.9, 0.8)}),
            ({"eps": 1e-3}, {"eps": 1e-3}),
            ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
        ),
        ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    ),
    mindformers.Came: Face(
        "(params, learning_rate=None, eps=(1e-30, 0.001, 1e-16), clip_threshold=1.0, decay_rate=0.8, beta1=0.9, "
        "beta3=0.99, weight_decay=0.0, scale_parameter=False, relative_step=False, warmup_init=False, "
        "compression=False, loss_scale=1)",
        bighorn.Came,
        {"betas": (0.9, 0.999, 0.99), "factor": "last_two", "decay_rate": 0.8},
        (
            ({"learning_rate": 0.2}, {"lr": 0.2}),
            ({"eps": (1e-20, 1e-2, 1e-10)}, {"eps": (1e-20, 1e-10), "scale_eps": 1e-2}),
            ({"clip_threshold": 0.3}, {"clip_threshold": 0.3}),
            ({"decay_rate": 0.0}, {"decay_rate": 0.0}),
            ({"beta1": 0.8}, {"betas": (0.8, 0.999, 0.99)}),
            ({"beta3": 0.8}, {"betas": (0.9, 0.999, 0.8)}),
            ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
            ({"scale_parameter": True}, {"scale_parameter": True}),
            ({"learning_rate": None, "relative_step": True}, {"lr": RelativeStep()}),
            ({"learning_rate": None, "relative_step": True, "warmup_init": True}, {"lr": RelativeStep(True)}),
            ({"compression": True}, {"state_dtype": torch.float16}),
            ({"loss_scale": 1}, {}),
        ),
        (
            # With a small eps, four times the gradient takes the same step.
            {"weight_decay": 0.1, "compression": True, "loss_scale": 4, "eps": (1e-3, 1e-3, 1e-16)},
            {"weight_decay": 0.1, "state_dtype": torch.float16, "eps": (1e-3, 1e-16)},
        ),
    ),
}


def name_of(kind: Any) -> str:
    return f"{kind.__module__.removeprefix('bighorn.compat.')}.{kind.__name__}"


def face(kind: Any, params: Any, lr: Any, arguments: Options) -> Any:
    """Return the face's optimizer; its argument for the learning rate is `lr` or `learning_rate`."""
    rate = "learning_rate" if "learning_rate" in inspect.signature(kind).parameters else "lr"
    return kind(**{"params": params, rate: lr, **arguments})
