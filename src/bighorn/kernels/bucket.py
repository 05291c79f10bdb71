"""What a kernel works on: tensors that share a device, dtypes and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Bounds = tuple[float, float]
BiasCorrection = Literal[True, False, "lr"]
DecayMode = Literal["ratio", "decoupled", "l2"]
SecondMoment = Literal["adam", "amsgrad", "adagrad"]


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


@dataclass
class Bucket:
    """One row per tensor (or per slice of a stacked one); parameters are dense, and their state lies in their order.

    Attributes:
        options: What the rows share.
        params: The rows' parameters; kernels write them.
        state: Name to one tensor per row (`exp_avg`, `exp_avg_sq`, and `max_exp_avg_sq` for amsgrad).
        steps: One 0-dim float32 tensor per row: the steps taken so far. Slices of one parameter share theirs.
        counts: `steps` without repetition; kernels advance each by 1.
        norms: Float32, `[rows, 3]`; kernels write weight norm, update norm and trust ratio.
        grads: One gradient per row, new for each step, of any floating dtype and any strides; kernels only read them.
    """

    options: LambOptions
    params: list[Tensor]
    state: dict[str, list[Tensor]]
    steps: list[Tensor]
    counts: list[Tensor]
    norms: Tensor
    grads: list[Tensor] = field(default_factory=list)
