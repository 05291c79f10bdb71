"""The rows of the table of cases: options of each optimizer, alone and in groups, and dtypes.

A new option is one line in `LAMB_OPTIONS` or its siblings, and a new dtype one in `DTYPES`; all tests run with them.
Weight decay is 0 only in cases about that: without it the trust ratio hides a constant factor of the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bighorn.schedules import RelativeStep


def is_matrix(_: str, param: torch.Tensor) -> bool:
    return param.ndim >= 2 or param.is_complex()


def is_zero(name: str, _: torch.Tensor) -> bool:
    return name.startswith("zero")


ON_BALL: Mapping[str, Any] = {
    "hyperball": True,
    "exclude_from_weight_decay": is_matrix,
    "exclude_from_layer_adaptation": is_zero,
}
"""Hyperball: matrices have no decay, the others take steps of AdamW; a matrix of zeros cannot move on a ball."""

LAMB_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "paper-v5": {},
    "paper-v3": {"bias_correction": False},
    "correction-in-lr": {"bias_correction": "lr"},
    "no-weight-decay": {"weight_decay": 0.0},
    "large-eps": {"eps": 0.3},
    "long-memory": {"betas": (0.95, 0.9999)},
    "no-memory": {"betas": (0.0, 0.0)},
    "no-grad-averaging": {"grad_averaging": False},
    "no-grad-averaging-v3": {"grad_averaging": False, "bias_correction": False},
    "adam": {"adam": True, "weight_decay": 0.0},
    "adamw": {"adam": True, "decay_mode": "decoupled"},
    "adam-ratio-decay": {"adam": True},
    "adam-l2": {"adam": True, "decay_mode": "l2"},
    "adam-v3": {"adam": True, "bias_correction": False},
    "decoupled": {"decay_mode": "decoupled"},
    "decoupled-correction-in-lr": {"decay_mode": "decoupled", "bias_correction": "lr"},
    "decoupled-corrected": {"decay_mode": "decoupled", "corrected_weight_decay": 0.25},
    "l2": {"decay_mode": "l2"},
    "l2-correction-in-lr": {"decay_mode": "l2", "bias_correction": "lr"},
    "weight-norm-paper": {"weight_norm_bounds": (0, 10)},
    "weight-norm-narrow": {"weight_norm_bounds": (0.8, 1.5)},
    "lambc": {"trust_ratio_bounds": (0, 1)},
    "trust-ratio-narrow": {"trust_ratio_bounds": (0.3, 0.6)},
    "both-bounds": {"weight_norm_bounds": (0.1, 10), "trust_ratio_bounds": (0.01, 0.4)},
    "clip-active": {"max_grad_norm": 0.7},
    "clip-inactive": {"max_grad_norm": 1e6},
    "clip-skip": {"max_grad_norm": 1.5, "skip_nonfinite": True},
    "skip": {"skip_nonfinite": True},
    "clip-l2": {"max_grad_norm": 0.7, "decay_mode": "l2"},
    "amsgrad": {"second_moment": "amsgrad"},
    "amsgrad-v3": {"second_moment": "amsgrad", "bias_correction": False},
    "amsgrad-in-lr": {"second_moment": "amsgrad", "bias_correction": "lr"},
    "amsgrad-adam": {"second_moment": "amsgrad", "adam": True},
    "adagrad": {"second_moment": "adagrad"},
    "adagrad-v3": {"second_moment": "adagrad", "bias_correction": False},
    "adagrad-in-lr": {"second_moment": "adagrad", "bias_correction": "lr"},
    "maximize": {"maximize": True},
    "maximize-l2": {"maximize": True, "decay_mode": "l2"},
    "maximize-clip": {"maximize": True, "max_grad_norm": 0.7},
    "cautious": {"cautious": True},
    "cautious-maximize": {"cautious": True, "maximize": True},
    "cautious-decoupled": {"cautious": True, "decay_mode": "decoupled"},
    "cautious-l2": {"cautious": True, "decay_mode": "l2"},
    "cautious-amsgrad-in-lr": {"cautious": True, "second_moment": "amsgrad", "bias_correction": "lr"},
    "hyperball": ON_BALL,
    "hyperball-in-lr": {**ON_BALL, "bias_correction": "lr", "decay_mode": "decoupled", "maximize": True},
    "hyperball-cautious": {**ON_BALL, "cautious": True},
    "no-decay-by-name": {"exclude_from_weight_decay": [r"bias$", r"^conv\d"]},
    "no-adapt-by-name": {"exclude_from_layer_adaptation": [r"bias$", r"^big"]},
    "both-by-name": {"exclude_from_weight_decay": [r"\.bias"], "exclude_from_layer_adaptation": ["conv"]},
    "by-callable": {
        "exclude_from_weight_decay": lambda _name, p: p.ndim < 2,
        "exclude_from_layer_adaptation": lambda name, p: "big" in name or p.numel() == 17,
    },
    "sometimes-adapt": {"always_adapt": False},
    "sometimes-adapt-by-name": {"always_adapt": False, "exclude_from_weight_decay": ["bias"]},
    "sometimes-adapt-no-decay": {"always_adapt": False, "weight_decay": 0.0},
    "everything": {
        "bias_correction": "lr",
        "grad_averaging": False,
        "decay_mode": "l2",
        "weight_norm_bounds": (0, 10),
        "trust_ratio_bounds": (0.01, 2),
        "max_grad_norm": 0.9,
        "skip_nonfinite": True,
        "maximize": True,
        "exclude_from_weight_decay": ["bias"],
    },
}

LAMB_GROUPS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "stacked": ({"stacked": True},),
    "stacked-decoupled": ({"stacked": True, "decay_mode": "decoupled"},),
    "stacked-bounds": ({"stacked": True, "weight_norm_bounds": (0, 1), "trust_ratio_bounds": (0.01, 0.5)},),
    "stacked-cautious": ({"stacked": True, "cautious": True},),
    "stacked-centralised": ({"stacked": True, "grad_centralization": True},),
    "stacked-centralised-conv": ({"stacked": True, "grad_centralization": "conv"},),
    "stacked-adam": ({"stacked": True, "adam": True},),
    "stacked-hyperball": ({"stacked": True, "hyperball": True, "weight_decay": 0.0},),
    "centralised": ({"grad_centralization": True},),
    "centralised-conv": ({"grad_centralization": "conv"},),
    "centralised-l2-maximize": ({"grad_centralization": True, "decay_mode": "l2", "maximize": True},),
    "centralised-adam": ({"grad_centralization": True, "adam": True},),
    "not-adapted": ({"adapt": False},),
    "not-adapted-decoupled": ({"adapt": False, "decay_mode": "decoupled"},),
    "two-groups": ({}, {"adapt": False, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-3}),
    "two-groups-options": (
        {"decay_mode": "decoupled", "bias_correction": "lr"},
        {"adam": True, "maximize": True, "grad_averaging": False, "stacked": True, "grad_centralization": "conv"},
    ),
    "two-groups-sometimes-adapt": ({"always_adapt": False}, {"always_adapt": False, "weight_decay": 0.0}),
}

CAME_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "published": {},
    "last-two": {"factor": "last_two"},
    "linear": {"factor": "linear"},
    "no-weight-decay": {"weight_decay": 0.0},
    "large-eps": {"eps": (1e-3, 1e-2)},
    "short-memory": {"betas": (0.5, 0.9, 0.99)},
    "no-memory": {"betas": (0.9, 0.0, 0.0)},
    "hard-clip": {"clip_threshold": 0.2},
    "no-clip": {"clip_threshold": 1e6},
    "decay-rate": {"decay_rate": 0.8},
    "scale-parameter": {"scale_parameter": True},
    "scale-eps": {"scale_parameter": True, "scale_eps": 0.7},
    "bias-correction": {"bias_correction": True},
    "cautious": {"cautious": True},
    "cautious-maximize": {"cautious": True, "maximize": True, "factor": "last_two"},
    "cautious-clip-skip": {"cautious": True, "max_grad_norm": 1.5, "skip_nonfinite": True, "bias_correction": True},
    "relative-step": {"lr": RelativeStep()},
    "warmup-init": {"lr": RelativeStep(warmup_init=True)},
    "clip-active": {"max_grad_norm": 0.7},
    "clip-inactive": {"max_grad_norm": 1e6},
    "clip-skip": {"max_grad_norm": 1.5, "skip_nonfinite": True},
    "skip": {"skip_nonfinite": True},
    "maximize": {"maximize": True},
    "maximize-clip": {"maximize": True, "max_grad_norm": 0.7},
    "no-decay-by-name": {"exclude_from_weight_decay": [r"bias$", r"^conv\d"]},
    "no-decay-by-callable": {"exclude_from_weight_decay": lambda _name, p: p.ndim < 2},
    "everything": {
        "betas": (0.8, 0.5, 0.99),
        "clip_threshold": 0.5,
        "decay_rate": 0.8,
        "scale_parameter": True,
        "bias_correction": True,
        "max_grad_norm": 0.9,
        "skip_nonfinite": True,
        "maximize": True,
        "exclude_from_weight_decay": ["bias"],
    },
}

CAME_GROUPS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "stacked": ({"stacked": True},),
    "stacked-last-two": ({"stacked": True, "factor": "last_two"},),
    "stacked-linear": ({"stacked": True, "factor": "linear"},),
    "stacked-cautious": ({"stacked": True, "cautious": True},),
    "stacked-scaled": ({"stacked": True, "scale_parameter": True, "bias_correction": True, "decay_rate": 0.8},),
    "stacked-centralised": ({"stacked": True, "grad_centralization": True},),
    "stacked-centralised-conv": ({"stacked": True, "grad_centralization": "conv"},),
    "centralised": ({"grad_centralization": True},),
    "centralised-conv": ({"grad_centralization": "conv"},),
    "centralised-last-two-maximize": ({"grad_centralization": True, "factor": "last_two", "maximize": True},),
    "two-groups": ({}, {"weight_decay": 0.0, "betas": (0.8, 0.9, 0.99), "eps": (1e-8, 1e-6), "clip_threshold": 0.5}),
    "two-groups-options": (
        {"factor": "last_two", "decay_rate": 0.8, "state_dtype": torch.bfloat16},
        {"scale_parameter": True, "bias_correction": True, "stacked": True, "grad_centralization": "conv"},
    ),
}

LARS_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"eps": 0.0},
    "nesterov": {"nesterov": True},
    "no-memory": {"momentum": 0.0, "nesterov": True},
    "large-eps": {"eps": 0.3},
    "small-trust": {"trust_coefficient": 0.3},
    "joint": {"denominator": "joint"},
    "joint-nesterov": {"denominator": "joint", "nesterov": True},
    "trust-clip": {"trust_clip": True, "trust_coefficient": 0.1},
    "trust-clip-joint": {"trust_clip": True, "trust_coefficient": 0.1, "denominator": "joint", "lr_in_momentum": False},
    "lr-outside": {"lr_in_momentum": False},
    "lr-outside-nesterov": {"lr_in_momentum": False, "nesterov": True},
    "no-weight-decay": {"weight_decay": 0.0},
    "clip-active": {"max_grad_norm": 0.7},
    "clip-inactive": {"max_grad_norm": 1e6},
    "clip-skip": {"max_grad_norm": 1.5, "skip_nonfinite": True},
    "skip": {"skip_nonfinite": True},
    "maximize": {"maximize": True, "denominator": "joint"},
    "no-decay-by-name": {"exclude_from_weight_decay": [r"bias$", r"^conv\d"]},
    "no-adapt-by-name": {"exclude_from_layer_adaptation": [r"bias$", r"^big"]},
    "vectors-excluded": {"exclude_from_weight_decay": "ndim<2", "exclude_from_layer_adaptation": "ndim<2"},
    "by-callable": {"exclude_from_layer_adaptation": lambda name, p: "big" in name or p.numel() == 17},
    "sometimes-adapt-by-name": {"always_adapt": False, "exclude_from_weight_decay": ["bias"]},
    "sometimes-adapt-no-decay": {"always_adapt": False, "weight_decay": 0.0},
    "everything": {
        "momentum": 0.7,
        "nesterov": True,
        "trust_coefficient": 0.1,
        "eps": 1e-3,
        "denominator": "joint",
        "trust_clip": True,
        "lr_in_momentum": False,
        "max_grad_norm": 0.9,
        "skip_nonfinite": True,
        "maximize": True,
        "exclude_from_weight_decay": ["bias"],
    },
}

LARS_GROUPS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "stacked": ({"stacked": True},),
    "stacked-joint-clipped": ({"stacked": True, "denominator": "joint", "trust_clip": True, "trust_coefficient": 0.1},),
    "stacked-centralised": ({"stacked": True, "grad_centralization": True},),
    "centralised": ({"grad_centralization": True},),
    "centralised-conv": ({"grad_centralization": "conv"},),
    "not-adapted": ({"adapt": False},),
    "two-groups": (
        {"denominator": "joint", "lr_in_momentum": False},
        {"adapt": False, "weight_decay": 0.0, "momentum": 0.5, "nesterov": True, "stacked": True},
    ),
    "two-groups-sometimes-adapt": ({"always_adapt": False}, {"always_adapt": False, "weight_decay": 0.0}),
}

DTYPES: Mapping[str, tuple[torch.dtype, torch.dtype, Mapping[str, Any]]] = {
    "float64": (torch.float64, torch.float64, {}),
    "float64-states-float32": (torch.float64, torch.float64, {"state_dtype": torch.float32}),
    "float64-states-bfloat16": (torch.float64, torch.float16, {"state_dtype": torch.bfloat16}),
    "bfloat16": (torch.bfloat16, torch.bfloat16, {}),
    "float16": (torch.float16, torch.float16, {}),
    "bfloat16-grads-float32": (torch.bfloat16, torch.float32, {}),
    "float16-grads-float32": (torch.float16, torch.float32, {}),
    "float32-grads-bfloat16": (torch.float32, torch.bfloat16, {}),
    "float32-grads-float16": (torch.float32, torch.float16, {}),
    "bfloat16-grads-float16": (torch.bfloat16, torch.float16, {}),
    "float32-states-bfloat16": (torch.float32, torch.float32, {"state_dtype": torch.bfloat16}),
    "bfloat16-states-bfloat16": (torch.bfloat16, torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "float16-states-bfloat16": (torch.float16, torch.float32, {"state_dtype": torch.bfloat16}),
    "float32-states-int8": (torch.float32, torch.float32, {"state_dtype": "int8"}),
    "bfloat16-states-int8": (torch.bfloat16, torch.float32, {"state_dtype": "int8", "rounding_seed": 2**40 + 1}),
    "float32-states-int8-all": (torch.float32, torch.bfloat16, {"state_dtype": "int8", "min_8bit_size": 1}),
    "float32-states-int4": (torch.float32, torch.float32, {"state_dtype": "int4"}),
    "bfloat16-states-int4-all": (torch.bfloat16, torch.float32, {"state_dtype": "int4", "min_8bit_size": 1}),
    "bfloat16-weights-stochastic": (torch.bfloat16, torch.float32, {"weight_rounding": "stochastic"}),
    "float16-weights-stochastic": (torch.float16, torch.float32, {"weight_rounding": "stochastic", "rounding_seed": 7}),
    "bfloat16-weights-kahan": (torch.bfloat16, torch.float32, {"weight_rounding": "kahan"}),
    "float16-weights-kahan": (torch.float16, torch.float32, {"weight_rounding": "kahan"}),
    "bfloat16-weights-kahan8": (torch.bfloat16, torch.float32, {"weight_rounding": "kahan8"}),
    "float16-weights-kahan8": (torch.float16, torch.float32, {"weight_rounding": "kahan8"}),
    "bfloat16-weights-master": (torch.bfloat16, torch.float32, {"weight_rounding": "master"}),
    "float16-weights-master": (torch.float16, torch.float32, {"weight_rounding": "master"}),
    "bfloat16-weights-kahan-states-int8": (
        torch.bfloat16,
        torch.bfloat16,
        {"weight_rounding": "kahan", "state_dtype": "int8"},
    ),
    "complex64": (torch.complex64, torch.complex64, {}),
    "complex128": (torch.complex128, torch.complex128, {}),
}

CAME_DTYPES = {
    **DTYPES,
    "float32-states-float16": (torch.float32, torch.float32, {"state_dtype": torch.float16}),
    "float16-states-float16": (torch.float16, torch.float32, {"state_dtype": torch.float16}),
    "float64-states-float16": (torch.float64, torch.float32, {"state_dtype": torch.float16}),
}
"""`DTYPES` and state in float16, which LAMB and LARS refuse."""


def in_blocks(options: Mapping[str, Any]) -> bool:
    """Whether moments are kept in blocks of few bits."""
    return options.get("state_dtype") in ("int4", "int8")
