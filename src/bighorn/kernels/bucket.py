"""What a kernel works on: tensors that share a device, dtypes and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from torch import Tensor

Bounds = tuple[float, float]
BiasCorrection = Literal[True, False, "lr"]
DecayMode = Literal["ratio", "decoupled", "l2"]
SecondMoment = Literal["adam", "amsgrad", "adagrad"]
Factor = Literal["matrix", "last_two"]


@dataclass(frozen=True)
class LambOptions:
    """The options of one bucket, resolved: no names, no group keys, nothing left to decide but the trust ratio."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: BiasCorrection
    grad_averaging: bool
    decay_mode: DecayMode
    adapt: bool
    weight_norm_bounds: Bounds | None
    trust_ratio_bounds: Bounds | None
    second_moment: SecondMoment
    cautious: bool
    maximize: bool
    centre: bool


@dataclass(frozen=True)
class CameOptions:
    """The options of one bucket, resolved, as `LambOptions`; all of its rows are factored by one rule, or none is."""

    lr: float | Tensor
    betas: tuple[float, float, float]
    eps: tuple[float, float]
    clip_threshold: float
    weight_decay: float
    decay_rate: float | None
    bias_correction: bool
    scale_parameter: bool
    scale_eps: float
    maximize: bool
    centre: bool
    factor: Factor | None
    """How a row becomes matrices: "matrix", one of dim 0 by everything else; "last_two", one for each index of the
    leading dims; None, its second moment is kept unfactored."""


Options = TypeVar("Options", LambOptions, CameOptions)


@dataclass
class Bucket(Generic[Options]):
    """One row per tensor (or per slice of a stacked one); parameters are dense, and their state lies in their order.

    Attributes:
        options: What the rows share.
        params: The rows' parameters; kernels write them.
        state: Name to one tensor per row; every row has the same names. LAMB: `exp_avg`, `exp_avg_sq`, and
            `max_exp_avg_sq` for amsgrad. CAME: `exp_avg` (with `exp_avg_scale` where it is int8), and either
            `exp_avg_sq_row`, `exp_avg_sq_col`, `exp_avg_res_row`, `exp_avg_res_col`, or `exp_avg_sq` unfactored.
        steps: One 0-dim float32 tensor per row: the steps taken so far. Slices of one parameter share theirs.
        counts: `steps` without repetition; kernels advance each by 1.
        norms: Float32, `[rows, 3]`; kernels write what telemetry shows. LAMB: weight norm, update norm, trust ratio.
            CAME: RMS of u before it is clipped, what clipping multiplied it with, mean confidence.
        grads: One gradient per row, new for each step, of any floating dtype and any strides; kernels only read them.
    """

    options: Options
    params: list[Tensor]
    state: dict[str, list[Tensor]]
    steps: list[Tensor]
    counts: list[Tensor]
    norms: Tensor
    grads: list[Tensor] = field(default_factory=list)
