"""THE table of cases: every option, shape, layout and dtype that Lamb and Came are tested on, for every backend.

A new option is one line in `LAMB` or `CAME`, a new trap one line in `ZOO`, a new dtype one line in `DTYPES`; each
inherits every test. Weight decay is 0 only where that is the point: the trust ratio then hides a constant factor of the
update.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb, kernels
from bighorn.optim.came import CameAlgorithm
from bighorn.optim.lamb import LambAlgorithm

Optimizer: TypeAlias = Lamb | Came
Kind: TypeAlias = type[Lamb] | type[Came]
KINDS: tuple[Kind, ...] = (Lamb, Came)

BACKENDS = ("reference", "foreach", "cpu", *sorted(set(kernels.status()) - {"reference", "foreach", "cpu"}))

LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cautious",),
    "triton": ("cautious", "grad_centralization"),
}
"""The options that a compiled backend leaves to others."""

INTERPRETED = {
    *("paper-v5", "paper-v3", "correction-in-lr", "adamw", "adam-l2", "decoupled", "both-bounds", "everything"),
    *("skip", "clip-skip", "maximize", "amsgrad-in-lr", "adagrad", "no-adapt-by-name", "sometimes-adapt-by-name"),
    *("stacked", "two-groups-sometimes-adapt", "mixed-paper-v5", "mixed-clip-skip", "large-amsgrad"),
    *("bfloat16-everything", "bfloat16-grads-float32-adamw", "float16-paper-v5", "complex64-adagrad"),
    *("float32-states-bfloat16-paper-v5", "bfloat16-states-bfloat16-everything"),
    *("came-published", "came-everything", "came-skip", "came-mixed-published", "came-large-clip-skip"),
    *("came-bfloat16-grads-float32-last-two", "came-float16-states-float16-stacked", "came-complex64-published"),
    *("came-float32-states-int8-published", "came-bfloat16-states-int8-everything"),
    *("came-bfloat16-states-bfloat16-published", "came-float32-states-int8-everything"),
    *("bfloat16-weights-stochastic-everything", "float16-weights-kahan-paper-v5", "bfloat16-weights-master-adamw"),
    *("came-float16-weights-stochastic-everything", "came-bfloat16-weights-kahan-published"),
}
"""What runs by default where kernels are interpreted, which takes a while for each block; the others are slow tests."""


class ExactLamb(Lamb):
    """Steps float64 parameters too with state in 8 bits, which users are refused: it is what others must compute."""

    class Unrestricted(LambAlgorithm):
        def why_unfit(self, *_: object) -> None:
            return None

    algorithm = Unrestricted()


class ExactCame(Came):
    """As `ExactLamb`."""

    class Unrestricted(CameAlgorithm):
        def why_unfit(self, *_: object) -> None:
            return None

    algorithm = Unrestricted()


Fill = Literal["normal", "big", "small", "zero"]
Grad = Literal["normal", "tiny", "minute", "zero", "none", "late", "gap"]
Layout = Literal["plain", "transposed", "strided", "channels_last", "misaligned", "expanded", "lazy"]

LRS = (0.1, 0.05, 0.2, 0.08)
"""The learning rate changes at every step; it is large because the rounding of a parameter hides a small step."""

SCALES: Mapping[Grad, float] = {"tiny": 1e-3, "minute": 1e-8, "zero": 0.0}


@dataclass(frozen=True)
class Leaf:
    """One parameter and how its gradients look."""

    name: str
    shape: tuple[int, ...]
    fill: Fill = "normal"
    grad: Grad = "normal"
    layout: Layout = "plain"
    grad_layout: Layout = "plain"
    dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    group: int = 0

    def has_gradient(self, step: int) -> bool:
        return not (self.grad == "none" or (self.grad == "late" and step == 0) or (self.grad == "gap" and step == 1))


@dataclass(frozen=True)
class Case:
    """A set of parameters, their gradients, and the options they are optimised with."""

    id: str
    options: Mapping[str, Any]
    leaves: tuple[Leaf, ...]
    groups: tuple[Mapping[str, Any], ...] = ({},)
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    kind: Kind = Lamb

    def of(self, kind: Kind) -> Case:
        """The same case for another optimizer."""
        return replace(self, kind=kind)

    @property
    def size(self) -> int:
        return sum(torch.Size(leaf.shape).numel() for leaf in self.leaves)

    def dtypes(self) -> set[torch.dtype]:
        return {d for leaf in self.leaves for d in (leaf.dtype or self.dtype, self.gradient_dtype(leaf))}

    def gradient_dtype(self, leaf: Leaf) -> torch.dtype:
        return leaf.grad_dtype or self.grad_dtype or leaf.dtype or self.dtype

    def runs_on(self, backend: str) -> bool:
        """Whether the specification asks this backend for this case: the compiled ones leave out float64 too."""
        if backend not in LEFT_OUT:
            return True
        groups = (self.options, *self.groups)
        left_out = any(group.get(option) for group in groups for option in LEFT_OUT[backend])
        return not left_out and not self.dtypes() & {torch.float64, torch.complex128}

    def in_double(self) -> Case:
        """The same case with parameters, which lose nothing, and gradients in float64."""
        options = {name: value for name, value in self.options.items() if name != "weight_rounding"}
        leaves = tuple(
            replace(leaf, dtype=double(leaf.dtype) if leaf.dtype else None, grad_dtype=None) for leaf in self.leaves
        )
        kind = ExactLamb if self.kind is Lamb else ExactCame
        return replace(self, leaves=leaves, options=options, dtype=double(self.dtype), grad_dtype=None, kind=kind)

    def parameters(self) -> list[Parameter]:
        parameters = []
        for index, leaf in enumerate(self.leaves):
            dtype = leaf.dtype or self.dtype
            values = self._normal(f"x{index}", leaf.shape, dtype)
            values = values * {"normal": 0.5, "big": 3.0, "small": 1e-3, "zero": 0.0}[leaf.fill]
            parameters.append(Parameter(arranged(values.to(dtype), leaf.layout)))
        return parameters

    def gradients(self, step: int) -> list[Tensor | None]:
        """Fresh gradients for one step; every call allocates its own."""
        gradients: list[Tensor | None] = []
        for index, leaf in enumerate(self.leaves):
            if not leaf.has_gradient(step):
                gradients.append(None)
                continue
            dtype = self.gradient_dtype(leaf)
            values = self._normal(f"g{index}.{step}", leaf.shape, dtype) * SCALES.get(leaf.grad, 1.0) * (1 + step / 2)
            gradients.append(arranged(values.to(dtype), leaf.grad_layout))
        return gradients

    def optimizer(self, parameters: Sequence[Parameter], backend: str, **options: Any) -> Optimizer:
        groups: list[dict[str, Any]] = [{"params": [], **group} for group in self.groups]
        for leaf, parameter in zip(self.leaves, parameters, strict=True):
            groups[leaf.group]["params"].append((leaf.name, parameter))
        return self.kind(groups, **{"lr": LRS[0], "weight_decay": 0.1, "backend": backend, **self.options, **options})

    def set_lr(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """The learning rate of a step, unless the optimizer computes its own."""
        if not self.options.get("relative_step"):
            set_lr(optimizer, LRS[step])

    def _normal(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{self.id}/{key}".encode()))
        values = torch.randn(shape, generator=generator, dtype=double(dtype), device="cpu")
        return values.to(torch.get_default_device())


def double(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def arranged(values: Tensor, layout: Layout) -> Tensor:
    """A fresh tensor with these values in the given memory layout."""
    if layout == "transposed":
        return values.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if layout == "strided":
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 7.0, dtype=values.dtype)
        return wide[..., ::2].copy_(values)
    if layout == "channels_last":
        return values.clone(memory_format=torch.channels_last)
    if layout == "misaligned":
        return torch.zeros(values.numel() + 1, dtype=values.dtype)[1:].view(values.shape).copy_(values)
    if layout == "expanded":
        return values.flatten()[:1].clone().expand(values.shape)
    if layout == "lazy":  # torch's views that are conjugated or negated only when they are read
        if values.is_complex():
            return values.conj().resolve_conj().conj()
        return torch.complex(torch.zeros_like(values), -values).conj().imag
    return values.clone(memory_format=torch.contiguous_format)


def set_gradients(parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None
        if gradient is not None and gradient.dtype != parameter.dtype:
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


ZOO = (
    Leaf("plain.weight", (7, 5)),
    Leaf("plain.bias", (17,)),
    Leaf("scalar", ()),
    Leaf("empty", (0,)),
    Leaf("empty.weight", (3, 0)),
    Leaf("one", (1,)),
    Leaf("page.bias", (4097,)),
    Leaf("zero.weight", (6, 4), fill="zero"),
    Leaf("zero.bias", (9,), grad="zero"),
    Leaf("zero.both", (5, 2), fill="zero", grad="zero"),
    Leaf("none.weight", (4, 2), grad="none"),
    Leaf("late.weight", (5, 3), grad="late"),
    Leaf("gap.bias", (13,), grad="gap"),
    Leaf("big.weight", (8, 8, 3), fill="big"),
    Leaf("tiny.weight", (12, 3), grad="tiny"),
    Leaf("minute.bias", (11,), grad="minute"),
    Leaf("transposed.weight", (5, 9), layout="transposed"),
    Leaf("strided.weight", (6, 7), layout="strided", grad_layout="transposed"),
    Leaf("conv.weight", (4, 3, 3, 5), layout="channels_last"),
    Leaf("conv2.weight", (3, 2, 3, 3), grad_layout="channels_last"),
    Leaf("conv3.weight", (2, 4, 3, 2), layout="channels_last", grad_layout="channels_last"),
    Leaf("misaligned.bias", (31,), layout="misaligned", grad_layout="misaligned"),
    Leaf("expanded.weight", (4, 6), grad_layout="expanded"),
    Leaf("column.weight", (19, 1), grad_layout="strided"),
    Leaf("empty.rows", (0, 3)),
    Leaf("pointwise.weight", (6, 5, 1, 1), layout="channels_last"),
    Leaf("negated.weight", (7, 3), grad_layout="lazy"),
)

LARGE = (
    Leaf("blocks.weight", (70, 1001)),
    Leaf("blocks.bias", (8192,)),
    Leaf("blocks.odd", (8193,), layout="misaligned"),
    Leaf("blocks.transposed", (130, 129), layout="transposed"),
)

BLOCKS = (
    # Of 4096 elements or more, which int8 takes, in rows of less than a block, one, a few, and some with odd ends.
    Leaf("rows.weight", (41, 100)),
    Leaf("row.weight", (1, 4100)),
    Leaf("column.weight", (19, 1)),  # in blocks only where all tensors are: 4,100 of them take an interpreter minutes
    Leaf("odd.weight", (16, 257), layout="transposed"),
    Leaf("strided.weight", (9, 600), layout="strided", grad_layout="transposed"),
    Leaf("conv.weight", (24, 20, 3, 3), layout="channels_last"),
    Leaf("deep.weight", (2, 9, 256), grad="late"),
    Leaf("zero.weight", (64, 64), fill="zero", grad="zero"),
    Leaf("tiny.weight", (8, 513), grad="tiny"),
    Leaf("bias", (4200,)),
    Leaf("small.weight", (20, 9)),
)

FEW = tuple(
    leaf
    for leaf in ZOO
    if leaf.name
    in {"plain.weight", "page.bias", "empty", "zero.weight", "zero.bias", "strided.weight", "big.weight", "conv.weight"}
)

# More than a workspace of foreach holds, so that its second phase computes the update again.
HUGE = (Leaf("huge.weight", (1301, 2050), grad_layout="transposed"), Leaf("huge.bias", (1301,)))

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
        "second_moment": "amsgrad",
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
    "centralised": ({"grad_centralization": True},),
    "centralised-conv": ({"grad_centralization": "conv"},),
    "centralised-l2-maximize": ({"grad_centralization": True, "decay_mode": "l2", "maximize": True},),
    "centralised-adam": ({"grad_centralization": True, "adam": True},),
    "not-adapted": ({"adapt": False},),
    "not-adapted-decoupled": ({"adapt": False, "decay_mode": "decoupled"},),
    "two-groups": ({}, {"adapt": False, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-3}),
    "two-groups-options": (
        {"decay_mode": "decoupled", "bias_correction": "lr", "second_moment": "amsgrad"},
        {"adam": True, "maximize": True, "grad_averaging": False, "stacked": True, "grad_centralization": "conv"},
    ),
    "two-groups-sometimes-adapt": ({"always_adapt": False}, {"always_adapt": False, "weight_decay": 0.0}),
}

CAME_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "published": {},
    "last-two": {"factor": "last_two"},
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
    "relative-step": {"relative_step": True, "lr": None},
    "warmup-init": {"relative_step": True, "warmup_init": True, "lr": None},
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

DTYPES: Mapping[str, tuple[torch.dtype, torch.dtype, Mapping[str, Any]]] = {
    "float64": (torch.float64, torch.float64, {}),
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
    "float32-states-float16": (torch.float32, torch.float32, {"state_dtype": torch.float16}),
    "float16-states-float16": (torch.float16, torch.float32, {"state_dtype": torch.float16}),
    "float32-states-int8": (torch.float32, torch.float32, {"state_dtype": "int8"}),
    "bfloat16-states-int8": (torch.bfloat16, torch.float32, {"state_dtype": "int8", "rounding_seed": 2**40 + 1}),
    "float32-states-int8-all": (torch.float32, torch.bfloat16, {"state_dtype": "int8", "min_8bit_size": 1}),
    "bfloat16-weights-stochastic": (torch.bfloat16, torch.float32, {"weight_rounding": "stochastic"}),
    "float16-weights-stochastic": (torch.float16, torch.float32, {"weight_rounding": "stochastic", "rounding_seed": 7}),
    "bfloat16-weights-kahan": (torch.bfloat16, torch.float32, {"weight_rounding": "kahan"}),
    "float16-weights-kahan": (torch.float16, torch.float32, {"weight_rounding": "kahan"}),
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

MIXED = (
    Leaf("float32.weight", (9, 5)),
    Leaf("bfloat16.weight", (9, 5), dtype=torch.bfloat16),
    Leaf("float16.bias", (33,), dtype=torch.float16),
    Leaf("bfloat16.bias", (21,), dtype=torch.bfloat16, grad_dtype=torch.float32),
    Leaf("float32.bias", (40,), grad_dtype=torch.bfloat16),
    Leaf("complex64.weight", (4, 3), dtype=torch.complex64),
    Leaf("conjugated.weight", (5, 2), dtype=torch.complex64, grad_layout="lazy"),
    Leaf("bfloat16.conv", (2, 3, 3, 3), dtype=torch.bfloat16, layout="channels_last"),
)


def in_blocks(options: Mapping[str, Any]) -> bool:
    """Whether moments are kept in blocks of few bits, by LAMB at least."""
    return options.get("state_dtype") in ("int8", "float16", torch.float16)


def _stackable(leaves: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    # A slice of one element has an update that may cancel to nothing, and a ratio that is then no more than noise.
    return tuple(leaf for leaf in leaves if len(leaf.shape) >= 2 and leaf.shape[1:] != (1,))


@dataclass(frozen=True)
class Rows:
    """What makes the cases of one optimizer."""

    kind: Kind
    prefix: str
    options: Mapping[str, Mapping[str, Any]]
    groups: Mapping[str, tuple[Mapping[str, Any], ...]]
    dtypes: Mapping[str, tuple[torch.dtype, torch.dtype, Mapping[str, Any]]]
    with_dtypes: tuple[str, ...]
    """The options that are combined with every dtype."""
    with_sizes: tuple[str, ...]
    """Those that are combined with mixed dtypes and with large tensors."""
    huge: Mapping[str, Mapping[str, Any]]
    """Those that are tried on huge tensors."""

    def cases(self) -> Iterator[Case]:
        for name, options in self.options.items():
            yield self._case(name, options, ZOO)
        for name, groups in self.groups.items():
            stacked = any(group.get("stacked") for group in groups)
            leaves = _stackable(ZOO) if stacked else ZOO
            if any(group.get("grad_centralization") for group in groups):
                # Equal gradients centralise to rounding noise, whose direction is nobody's.
                leaves = tuple(leaf for leaf in leaves if leaf.grad_layout != "expanded")
            yield self._case(
                name, {}, tuple(replace(leaf, group=i % len(groups)) for i, leaf in enumerate(leaves)), groups
            )
        stacked_group = ({"stacked": True},)
        for name, (dtype, grad_dtype, precision) in self.dtypes.items():
            few = BLOCKS if in_blocks(precision) else FEW
            for option in self.with_dtypes:
                options = {**self.options[option], **precision}
                if in_blocks(precision) and options.get("second_moment") == "amsgrad":
                    del options["second_moment"]
                yield self._case(f"{name}-{option}", options, few, ({},), dtype, grad_dtype)
            yield self._case(f"{name}-stacked", precision, _stackable(few), stacked_group, dtype, grad_dtype)
        for option in self.with_sizes:
            yield self._case(f"mixed-{option}", self.options[option], MIXED)
            yield self._case(f"large-{option}", self.options[option], LARGE)
        yield self._case("large-stacked", {}, _stackable(LARGE), stacked_group)
        for name, options in self.huge.items():
            yield self._case(f"huge-{name}", options, HUGE)
        yield self._case("large-bfloat16", {}, LARGE, ({},), torch.bfloat16)

    def _case(self, name: str, *rest: Any) -> Case:
        return Case(f"{self.prefix}{name}", *rest).of(self.kind)


LAMB = Rows(
    Lamb,
    "",
    LAMB_OPTIONS,
    LAMB_GROUPS,
    DTYPES,
    with_dtypes=("paper-v5", "adamw", "everything", "cautious", "adagrad"),
    with_sizes=("paper-v5", "adamw", "clip-skip", "amsgrad", "decoupled"),
    huge={
        "clip-skip": LAMB_OPTIONS["clip-skip"],
        "amsgrad-states-bfloat16": {"second_moment": "amsgrad", "state_dtype": torch.bfloat16},
    },
)
CAME = Rows(
    Came,
    "came-",
    CAME_OPTIONS,
    CAME_GROUPS,
    DTYPES,
    with_dtypes=("published", "last-two", "everything"),
    with_sizes=("published", "last-two", "clip-skip"),
    huge={"everything-states-int8": {**CAME_OPTIONS["everything"], "state_dtype": "int8"}},
)

CASES = (*LAMB.cases(), *CAME.cases())
