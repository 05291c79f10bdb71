"""One table per algorithm: the options that kernels get, each with its type, its check and its conversion to C.

A field with a check is an option of a parameter group, and kernels get the group's value; the algorithm computes the
others (`_optim/lamb.py` and its siblings). A field with a conversion is a field of the structure of the same name in C:
`make options` writes `csrc/options.h` from these classes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from bighorn._arguments import (
    Check,
    beta,
    betas,
    between,
    bounds,
    came_betas,
    came_eps,
    choice,
    count,
    flag,
    optional,
    positive,
)
from bighorn._kernels import codec
from bighorn._kernels.rounding import ROUNDING_MODES, Rounding

Bounds = tuple[float, float]
BiasCorrection = Literal[False, True, "lr"]
DecayMode = Literal["ratio", "decoupled", "l2"]
SecondMoment = Literal["adam", "amsgrad", "adagrad"]
Factor = Literal["matrix", "last_two"]
Denominator = Literal["sum", "joint"]


class Option(NamedTuple):
    """The check of a group's option, and its conversion to the type in C; each is None if the field has none."""

    check: Check | None = None
    c: Callable[[Any], Any] | None = None


def c_bounds(value: Bounds | None) -> Bounds:
    """Return bounds as C has them."""
    return value or (0.0, math.inf)


def one_of(kind: Any) -> Option:
    """Return an option for the values of a `Literal`, which in C is the value's index."""
    values = get_args(kind)
    return Option(choice(*values), values.index)


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """The options that the kernels of every algorithm get for one bucket."""

    algorithm: ClassVar[str]
    """The name of the module that has the algorithm's kernels, in each backend."""

    metrics: ClassVar[tuple[str, ...]]
    """The names of the numbers that kernels write for each slot, in this order; telemetry has a column for each."""

    rare: ClassVar[Mapping[str, object]] = {}
    """Options, with their values, of few users: plain torch operations compute them, and compiled kernels do not."""

    first_moment: ClassVar[str | None] = None
    """The name of the state tensor that averages gradients or updates, which kernels are compiled for, if any."""

    forms: ClassVar[codec.Forms] = {}
    """The forms of moments that can be kept in blocks."""

    numbers: ClassVar[frozenset[str]] = frozenset({"lr", "betas", "eps", "weight_decay"})
    """Options that may change between steps without a new plan."""

    multiplier: ClassVar[str | None] = None
    """The metric by which the learning rate of a layer is multiplied, if any."""

    lr: Annotated[float | Tensor, Option(c=float)]
    weight_decay: Annotated[float, Option(c=float)]
    maximize: Annotated[bool, Option(flag, int)]
    weight_rounding: Annotated[Rounding, Option(choice(*ROUNDING_MODES))] = "nearest"
    rounding_seed: Annotated[int, Option(count, ctypes.c_uint64)] = 0
    blocks: bool = False
    """Whether moments are kept in blocks, as in `_kernels/codec.py`."""
    int4: bool = False
    """Whether a moment is kept in codes of 4 bits."""

    @property
    def sums(self) -> int:
        """The number of sums over a tensor that a layer-wise step needs: of the squares of x and u."""
        return 2


Options = TypeVar("Options", bound=KernelOptions)


RATIOS = replace(codec.INT4, relative="exp_avg_sq")
"""The form of LAMB's first moment in 4 bits, as the ratio m / sqrt(v) that its update is made of.

The ratio of an element is at most (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), 7.3 by default. Codes of m
itself made steps 14 times as large beside an element with a gradient 100 times as large, and 118 times beside 1,000
(issue 67).
"""


@dataclass(frozen=True, kw_only=True)
class LambOptions(KernelOptions):
    """The options of LAMB."""

    algorithm = "lamb"
    metrics = ("weight_norm", "update_norm", "trust_ratio")
    rare: ClassVar[Mapping[str, object]] = {"cautious": True, "second_moment": "amsgrad"}
    first_moment = "exp_avg"
    forms: ClassVar[codec.Forms] = {
        "exp_avg_sq": {torch.uint8: codec.UNSIGNED},
        "exp_avg": {torch.int8: codec.SIGNED, torch.uint8: RATIOS},
    }
    multiplier = "trust_ratio"

    betas: Annotated[tuple[float, float], Option(betas(2), tuple)]
    eps: Annotated[float, Option(between(0), float)]
    bias_correction: Annotated[BiasCorrection, one_of(BiasCorrection)]
    grad_averaging: Annotated[bool, Option(flag, int)]
    decay_mode: Annotated[DecayMode, one_of(DecayMode)]
    adapt: Annotated[bool, Option(c=int)]
    hyperball: Annotated[bool, Option(c=int)] = False
    """Whether the norm of each tensor is kept, instead of a trust ratio."""
    weight_norm_bounds: Annotated[Bounds | None, Option(bounds, c_bounds)]
    trust_ratio_bounds: Annotated[Bounds | None, Option(bounds, c_bounds)]
    second_moment: Annotated[SecondMoment, one_of(SecondMoment)]
    cautious: Annotated[bool, Option(flag)]

    @property
    def sums(self) -> int:
        """The number of sums; Hyperball has a third one, of x u."""
        return 3 if self.hyperball else 2


@dataclass(frozen=True, kw_only=True)
class CameOptions(KernelOptions):
    """The options of CAME; all slots of a bucket are factored by one rule, or none of them is."""

    algorithm = "came"
    metrics = ("update_rms", "clip_factor", "confidence")
    rare: ClassVar[Mapping[str, object]] = {"cautious": True}
    first_moment = "exp_avg"
    forms: ClassVar[codec.Forms] = {"exp_avg": {torch.int8: codec.LINEAR, torch.uint8: codec.INT4}}
    multiplier = "confidence"

    betas: Annotated[tuple[float, float, float], Option(came_betas, tuple)]
    eps: Annotated[tuple[float, float], Option(came_eps, tuple)]
    clip_threshold: Annotated[float, Option(positive, float)]
    decay_rate: Annotated[float | None, Option(optional(between(0)))]
    bias_correction: Annotated[bool, Option(flag, int)]
    scale_parameter: Annotated[bool, Option(flag, int)]
    scale_eps: Annotated[float, Option(positive, float)]
    cautious: Annotated[bool, Option(flag)]
    factor: Factor | None
    """How a slot is divided into matrices: "matrix": one, of dim 0 by all other dims; "last_two": one for each index of
    the leading dims; None: the second moment is unfactored."""


@dataclass(frozen=True, kw_only=True)
class LarsOptions(KernelOptions):
    """The options of LARS."""

    algorithm = "lars"
    metrics = ("weight_norm", "update_norm", "trust_ratio")
    first_moment = "exp_avg"
    forms: ClassVar[codec.Forms] = {"exp_avg": {torch.int8: codec.SIGNED, torch.uint8: codec.INT4}}
    multiplier = "trust_ratio"

    momentum: Annotated[float, Option(beta, float)]
    nesterov: Annotated[bool, Option(flag, int)]
    trust_coefficient: Annotated[float, Option(positive, float)]
    eps: Annotated[float, Option(between(0), float)]
    denominator: Annotated[Denominator, one_of(Denominator)]
    trust_clip: Annotated[bool, Option(flag, int)]
    lr_in_momentum: Annotated[bool, Option(flag, int)]
    adapt: Annotated[bool, Option(c=int)]


def table(options: type) -> dict[str, Option]:
    """Return the annotated fields of a class, such as `LambOptions`, by name.

    Example:
        >>> [name for name, option in table(LambOptions).items() if option.check is None]
        ['lr', 'weight_decay', 'adapt', 'hyperball']
    """
    hints = get_type_hints(options, include_extras=True)
    pairs = [(name, each) for name, hint in hints.items() for each in getattr(hint, "__metadata__", ())]
    return {name: each for name, each in pairs if isinstance(each, Option)}


def checks_of(options: type) -> dict[str, Check]:
    """Return the checks of the annotated fields of a class, by name, without the fields that have none."""
    return {name: option.check for name, option in table(options).items() if option.check}
