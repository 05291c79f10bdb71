"""The optimizers of ``--optimizer``, each with its defaults. A new one needs one entry."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bighorn import Came, Lamb, Lars
from bighorn_workbench.hidden_matrices import LambHyperball, LambWithAdamW, MuonWithAdamW

KINDS = (Lamb, Came, Lars)
"""Bighorn's own optimizers."""

BACKENDS = ("cpu", "triton", "foreach", "reference")
"""The values of their option ``backend`` besides "auto"."""
ROUNDINGS = ("nearest", "stochastic", "kahan", "kahan8", "master")
"""The values of their option ``weight_rounding``."""

STATE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8", "int4": "int4"}
"""The values of ``--state-dtype``, and the names of these dtypes in the optimizers."""
NARROW = [name for name in STATE_DTYPES if name != "fp32"]
"""The dtypes of fewer bits than float32."""
NARROW_OF_LAMB = [name for name in NARROW if name != "fp16"]
"""The dtypes that ``lamb`` and ``lars`` have, too."""


@dataclass(frozen=True)
class Metric:
    """A number per layer and step.

    Attributes:
        name: The attribute of ``telemetry()``.
        label: Its name in tables and on the terminal.
        short: What it is, on the terminal.
        heading: The heading of its heat map.
        text: The description of the heat map.
        times_lr: Whether the heat map shows it times the learning rate.
    """

    name: str
    label: str
    short: str
    heading: str
    text: str
    times_lr: bool


TRUST_RATIO = Metric(
    "trust_ratio",
    "trust ratio",
    "times lr, the share of its norm by which a layer moves",
    "Effective learning rate by layer",
    "Learning rate x trust ratio: how far a step moves each layer, relative to a plain step of Adam or, for lars, SGD.",
    times_lr=True,
)

CONFIDENCE = Metric(
    "confidence",
    "confidence",
    "CAME multiplies lr by it: about 1, with came-published 50 at first,\n  millions where gradients are still 0",
    "Effective learning rate by layer",
    "Learning rate x mean confidence, what CAME multiplies its momentum with: large where the momentum predicts well, "
    "and beyond measure while elements have met no gradient yet, as behind dead units.",
    times_lr=True,
)

UPDATE_RMS = Metric(
    "update_rms",
    "update RMS",
    "the root mean square of the update",
    "Update size by layer",
    "Root mean square of the update before it was clipped. What is above the threshold, 1 by default, was scaled down "
    "to it.",
    times_lr=False,
)


@dataclass(frozen=True)
class Recipe:
    """The construction of an optimizer, and its defaults.

    Attributes:
        about: What it is, in one line.
        lr: Default learning rate.
        weight_decay: Default weight decay of matrices.
        space: The options that ``bighorn compare`` searches, each from its lowest to its highest value.
        defaults: The values of options of the optimizer that it can search: the options of ``space``, and any for which
            ``--space`` gives a range.
        build: A function from parameter groups and options to the optimizer.
        metrics: The values of its telemetry that the history keeps for each layer.
    """

    about: str
    lr: float
    weight_decay: float
    space: Mapping[str, tuple[float, float]]
    defaults: Mapping[str, float]
    build: Callable[..., torch.optim.Optimizer]
    metrics: tuple[Metric, ...] = ()

    @property
    def kind(self) -> Any:
        """The class of the optimizer."""
        return getattr(self.build, "func", self.build)

    @property
    def fixed(self) -> Mapping[str, Any]:
        """The options of the optimizer that are not its defaults."""
        return getattr(self.build, "keywords", {})


WARMUP = (0.02, 0.4)
"""The shares of a run that are tried as its warm-up."""

WITH_BETA2 = {"warmup": WARMUP, "one_minus_beta2": (0.001, 0.1)}
WITH_MOMENTUM = {"warmup": WARMUP, "one_minus_momentum": (0.01, 0.5)}
ADAM_DEFAULTS = {"one_minus_beta1": 0.1, "one_minus_beta2": 0.001, "eps": 1e-8}
MOMENTUM = {"one_minus_momentum": 0.1}
ADAMW_RATE = (0.01, 1.0)
"""AdamW's share of the learning rate, where hidden matrices have another rule."""

CAME = Recipe(
    "confidence-guided, factored second moment (arXiv:2307.02047), with bias_correction=True",
    0.001,
    0.01,
    {"lr": (0.00003, 0.3), "weight_decay": (0.001, 0.3), **WITH_BETA2},
    {"one_minus_beta1": 0.1, "one_minus_beta2": 0.001, "one_minus_beta3": 0.0001},
    partial(Came, bias_correction=True),
    (CONFIDENCE, UPDATE_RMS),
)

OPTIMIZERS = {
    "lamb": Recipe(
        "Adam with a trust ratio for each layer (arXiv:1904.00962)",
        0.03,
        0.01,
        {"lr": (0.0005, 5.0), "weight_decay": (0.001, 0.3), **WITH_BETA2},
        {**ADAM_DEFAULTS, "eps": 1e-6},
        Lamb,
        (TRUST_RATIO,),
    ),
    "came": CAME,
    "came-published": replace(CAME, about="came by the paper's rule, whose first steps are too large", build=Came),
    "lars": Recipe(
        "SGD with a trust ratio for each layer (arXiv:1708.03888)",
        2.0,
        0.01,
        {"lr": (0.02, 200.0), "weight_decay": (0.0001, 0.1), **WITH_MOMENTUM},
        {**MOMENTUM, "eps": 1e-8},
        Lars,
        (TRUST_RATIO,),
    ),
    "adamw": Recipe(
        "torch.optim.AdamW",
        0.003,
        0.01,
        {"lr": (0.00003, 0.3), "weight_decay": (0.001, 0.3), **WITH_BETA2},
        ADAM_DEFAULTS,
        partial(torch.optim.AdamW, fused=True),
    ),
    "lamb-adamw": Recipe(
        "lamb for hidden matrices, AdamW's step for embeddings, the head and vectors",
        0.03,
        0.01,
        {"lr": (0.0005, 5.0), "adamw_rate": ADAMW_RATE, "weight_decay": (0.001, 0.3), **WITH_BETA2},
        {**ADAM_DEFAULTS, "eps": 1e-6, "adamw_rate": 0.1},
        LambWithAdamW,
    ),
    "lamb-hyperball": Recipe(
        "Hyperball by lamb for hidden matrices (arXiv:2606.16899), AdamW's step for the rest",
        0.03,
        0.01,
        {"lr": (0.0005, 5.0), "adamw_rate": ADAMW_RATE, "weight_decay": (0.001, 0.3), **WITH_BETA2},
        {**ADAM_DEFAULTS, "adamw_rate": 0.1},
        LambHyperball,
    ),
    "muon": Recipe(
        "torch.optim.Muon for hidden matrices at AdamW's rates, torch.optim.AdamW for the rest",
        0.003,
        0.01,
        {"lr": (0.00003, 0.3), "weight_decay": (0.001, 0.3), **WITH_BETA2},
        ADAM_DEFAULTS,
        MuonWithAdamW,
    ),
    "adam": Recipe(
        "torch.optim.Adam, without weight decay",
        0.003,
        0.0,
        {"lr": (0.00003, 0.3), **WITH_BETA2},
        ADAM_DEFAULTS,
        partial(torch.optim.Adam, fused=True),
    ),
    "adafactor": Recipe(
        "torch.optim.Adafactor",
        0.05,
        0.01,
        {"lr": (0.0003, 3.0), "weight_decay": (0.001, 0.3), "warmup": WARMUP},
        {},
        torch.optim.Adafactor,
    ),
    # Not fused: on the CPU that does not change bf16 parameters (https://github.com/pytorch/pytorch/issues/191763).
    "sgd": Recipe(
        "torch.optim.SGD with momentum",
        0.1,
        0.0005,
        {"lr": (0.001, 10.0), "weight_decay": (0.00005, 0.01), **WITH_MOMENTUM},
        MOMENTUM,
        partial(torch.optim.SGD, momentum=0.9, foreach=True),
    ),
}

OF_BIGHORN = [name for name, recipe in OPTIMIZERS.items() if recipe.kind in KINDS]
"""Bighorn's own, which have ``--backend`` and ``--state-dtype``, and clip gradients themselves."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (recipe.about, {"optimizer": name}) for name, recipe in OPTIMIZERS.items()},
    **{
        f"{name}-{dtype}": (f"{name} with its momentum in {dtype}", {"optimizer": name, "state_dtype": dtype})
        for name in ("came", "came-published")
        for dtype in NARROW
    },
    "came-small": (
        "came in the least memory: weights in bf16, rounded stochastically, and its momentum in int8",
        {
            "optimizer": "came",
            "state_dtype": "int8",
            "precision": "bf16",
            "optimizer_option": ("weight_rounding=stochastic",),
        },
    ),
    "lars-int8": ("lars with its momentum in int8", {"optimizer": "lars", "state_dtype": "int8"}),
    "nesterov": ("sgd with Nesterov's momentum", {"optimizer": "sgd", "optimizer_option": ("nesterov=True",)}),
    "lambc": (
        "lamb with trust ratios of at most 1",
        {"optimizer": "lamb", "optimizer_option": ("trust_ratio_bounds=(0, 1)",)},
    ),
    "lamb-clipped": ("lamb with gradients clipped to a norm of 1", {"optimizer": "lamb", "max_grad_norm": 1.0}),
    "lamb-warm": ("lamb with a warm-up of 40% of the run", {"optimizer": "lamb", "warmup": "40%"}),
    "lamb-free": (
        "lamb without a trust ratio on the recurrent weights of an LSTM",
        {"optimizer": "lamb", "optimizer_option": ("exclude_from_layer_adaptation=['weight_hh']",)},
    ),
    **{
        f"lamb-{dtype}": (f"lamb with its moments in {dtype}", {"optimizer": "lamb", "state_dtype": dtype})
        for dtype in NARROW_OF_LAMB
    },
    **{
        f"lamb-{way}": (
            f"lamb with weights in bf16 and weight_rounding={way}",
            {"optimizer": "lamb", "precision": "bf16", "optimizer_option": (f"weight_rounding={way}",)},
        )
        for way in ROUNDINGS
    },
}
"""The names of ``bighorn compare --optimizers``: what each is in one line, and its options."""

CONTESTANTS = {name: options for name, (_, options) in VARIANTS.items()}
ABOUT = {name: text for name, (text, _) in VARIANTS.items()}


@contextmanager
def without_compiler() -> Iterator[None]:
    """Use Bighorn's optimizers without an import of torch's compiler, which takes as long as torch itself.

    torch imports it in the first call of a method that is not to be compiled, and leaves what to call in this
    attribute. No step is compiled in the block.
    """
    methods = (method for kind in KINDS for owner in kind.__mro__ for method in vars(owner).values())
    plain = {method.__wrapped__ for method in methods if hasattr(method, "__wrapped__")}
    unset = [] if "torch._dynamo" in sys.modules else plain
    for method in unset:
        method.__dynamo_disable = method
    try:
        yield
    finally:
        for method in unset:
            del method.__dynamo_disable


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of all tensors in the optimizer's state, in bytes."""
    states = optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
