"""LAMB: its options, and their values for a bucket. The mathematics is in `_kernels/reference/lamb.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bighorn._arguments import Check, StepFunction, about, flag, positive
from bighorn._kernels.options import BiasCorrection, Bounds, DecayMode, LambOptions, SecondMoment
from bighorn._kernels.rounding import Rounding
from bighorn._names import Exclusion, Names, listed
from bighorn._optim import presets
from bighorn._optim.algorithm import Group, Variant
from bighorn._optim.layerwise import LayerwiseAlgorithm
from bighorn._optim.optimizer import KernelOptimizer
from bighorn._optim.reports import Table
from bighorn._optim.state import (
    BLOCK_DTYPES,
    MIN_8BIT_SIZE,
    ZEROS,
    StateDtype,
    StateSpec,
    StateTensorSpec,
    moments_dtype,
)


@dataclass(frozen=True, repr=False)
class LambTelemetry(Table):
    """The metrics of the last step, with one entry per parameter (per slice of a stacked one); it prints as a table.

    Attributes:
        names: The parameters' names, or their indices in `param_groups`.
        weight_norm: ||x|| before the step, `[names]`, float32, on the parameters' device.
        update_norm: ||u||, likewise.
        trust_ratio: The ratio that multiplied the learning rate, likewise.
        lr: The learning rate of the step, likewise.
        skipped: The number of steps that wrote nothing because gradients were not finite, since the optimizer was made,
            copied or loaded; 0-dim, int64.
    """

    names: tuple[str, ...]
    weight_norm: Tensor
    update_norm: Tensor
    trust_ratio: Tensor
    lr: Tensor
    skipped: Tensor


def largest_lr(name: str, value: object) -> float | bool:
    """Return False, or the largest learning rate: a number above 0."""
    if isinstance(value, int) and value is not False:
        raise TypeError(
            f"{name} must be the largest learning rate in a group, a float such as 1.0, not {value!r}; the constructor "
            "also takes True"
        )
    return False if value is False else positive(name, value)


def share_of(lr: float | Tensor, largest: float) -> float:
    """Return a learning rate relative to the largest one, which it may exceed by rounding alone."""
    if isinstance(lr, Tensor):
        raise ValueError(
            f"corrected_weight_decay={largest:g} is applied on the host, and lr is a tensor on {lr.device.type}: give "
            "lr as a number or as a tensor on the CPU"
        )
    if lr > largest * (1 + 1e-6):
        raise ValueError(
            f"lr={lr:g} is above the largest learning rate, corrected_weight_decay={largest:g}: give the peak of the "
            "schedule as corrected_weight_decay"
        )
    return lr / largest


OFF_THE_BALL = {"adam": False, "always_adapt": True, "weight_norm_bounds": None, "trust_ratio_bounds": None}
"""Options of the trust ratio, with the values that Hyperball allows."""


class LambAlgorithm(LayerwiseAlgorithm[LambOptions]):
    """The options, state tensors and kernel options of `Lamb`."""

    name = "lamb"
    class_name = "Lamb"
    slow_layers_hint = (
        "LAMB's trust ratio of each stays below {below:g}: it moves by lr times its own small norm. Exclude such "
        'layers, as exclude_from_layer_adaptation=["lora_B"] does LoRA\'s, or by bighorn.groups.zero_initialized '
        "before training"
    )
    never_zero = (
        "radius",
        "hyperball=True would keep its norm of 0: initialize it with other values, or exclude it from layer adaptation",
    )
    kernel_options_type = LambOptions
    group_options: ClassVar[Mapping[str, Check]] = {
        **LayerwiseAlgorithm.group_options,
        "adam": flag,
        "hyperball": flag,
        "corrected_weight_decay": largest_lr,
    }

    def unsupported_reason(self, group: Group, param: Tensor) -> str | None:
        """The reason why a parameter cannot be optimized, or None; amsgrad and adagrad do not fit all state dtypes."""
        if group["corrected_weight_decay"] and group["decay_mode"] != "decoupled":
            return 'corrected_weight_decay is of decoupled decay: give decay_mode="decoupled", or leave it out'
        if group["second_moment"] == "amsgrad" and group["state_dtype"] in BLOCK_DTYPES:
            return (
                f'state_dtype="{group["state_dtype"]}" rounds a running maximum up again and again: with '
                'second_moment="amsgrad" use state_dtype="float32"'
            )
        for name, allowed in OFF_THE_BALL.items() if group["hyperball"] else ():
            if group[name] != allowed:
                return (
                    f"hyperball=True keeps norms of matrices, which {name}={group[name]!r} contradicts: leave it out, "
                    "or give its group hyperball=False"
                )
        if group["second_moment"] == "adagrad" and group["state_dtype"] == "bfloat16":
            return (
                'state_dtype="bfloat16" loses what is added to a sum above 256 times as large, a quarter of which is '
                'left after 10,000 steps: with second_moment="adagrad" use state_dtype="float32" or "int8"'
            )
        return super().unsupported_reason(group, param)

    def moment_dtypes(self, group: Group, param: Tensor) -> dict[str, torch.dtype]:
        """The dtypes of both moments, and of the running maximum of amsgrad."""
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * (group["second_moment"] == "amsgrad")
        dtypes = dict.fromkeys(names, moments_dtype(param, group["state_dtype"]))
        if group["state_dtype"] in BLOCK_DTYPES:
            dtypes["exp_avg_sq"] = torch.uint8
        return dtypes

    def moments(self, group: Group, param: Tensor) -> StateSpec:
        """Both moments, and the norm that a matrix keeps, which is measured where it is 0.

        The running maximum of amsgrad starts as the second moment, in a state that has none.
        """
        spec = super().moments(group, param)
        if maximum := spec.get("max_exp_avg_sq"):
            spec = {**spec, "max_exp_avg_sq": replace(maximum, starts_as="exp_avg_sq")}
        if group["hyperball"] and self.adapts(group, param):
            wide = moments_dtype(param, None)
            # Each rank has the radii of all slices, also of slices on other ranks, whose metrics it reports.
            slices = len(param) if group["stacked"] else None
            spec = {**spec, "radius": StateTensorSpec(wide, (), numel=slices, starts_as=ZEROS)}
        return spec

    def has_trust_ratio(self, group: Group) -> bool:
        """Adam has no trust ratio."""
        return not group["adam"]

    def adapts(self, group: Group, param: Tensor) -> bool:
        """Hyperball keeps the norms of matrices alone: other parameters take steps of AdamW."""
        return not group["hyperball"] or param.dim() - group["stacked"] >= 2

    def kernel_options(self, group: Group, variant: Variant) -> LambOptions:
        """The options of the group, and whether the bucket has a trust ratio, or norms that are kept."""
        options = super().kernel_options(group, variant)
        hyperball = group["hyperball"] and options.adapt
        if hyperball and options.weight_decay != 0:
            raise ValueError(
                f"hyperball=True keeps norms of matrices, against weight_decay={options.weight_decay:g}: "
                "set weight_decay=0 in their group, or name them in exclude_from_weight_decay"
            )
        if largest := group["corrected_weight_decay"]:
            options = replace(options, weight_decay=options.weight_decay * share_of(options.lr, largest))
        return replace(options, hyperball=True) if hyperball else options

    def limits_variants(self, group: Group) -> bool:
        """Hyperball cannot decay a matrix."""
        return bool(group["hyperball"])


class Lamb(KernelOptimizer):
    r"""LAMB, layer-wise adaptive moments for large batches, in one fused pass.

    With Adam's step r, the update is u = r + weight_decay * x. Each layer moves by -lr * q * u, where q is its trust
    ratio ||x|| / ||u||, or 1 where either norm is 0. You et al., "Large Batch Optimization for Deep Learning: Training
    BERT in 76 minutes", arXiv:1904.00962v5, Algorithm 2. Version 3 of the paper has no bias correction.

    Args:
        params: Tensors, (name, tensor) pairs such as `model.named_parameters()`, or groups. A group is a dict with
            `params` and any option below that is not marked *whole optimizer*. It may have three more keys: `adapt`
            (False: no trust ratio), `stacked` (True: dim 0 stacks independent layers, each with its own trust ratio)
            and `grad_centralization` (True: subtract the mean over dims 1 to the last from gradients of 2 or more dims;
            "conv": from gradients of 3 or more).
        lr: Learning rate, at least 0: a number; a tensor of one element, which is read at each step, and of which each
            group but the first has a copy; an iterable with one value for each step; or a schedule of
            `bighorn.schedules`, which is called with the step, 0 for the first.
            `group["lr"]` holds the value of the last step. Default: 1e-3.
        betas: Decay of the averages of the gradient and of its square, each in [0, 1). Default: (0.9, 0.999).
        eps: Added to the root of the second moment, at least 0. With 0, an element whose gradients have all been 0
            divides by 0. Default: 1e-6.
        weight_decay: At least 0: a number, an iterable or a schedule. Default: 0.0.
        adam: Use a trust ratio of 1. This is AdamW with decay_mode="decoupled", and Adam with "l2". Default: False.
        hyperball: Keep the norm of each matrix, or of each slice of a stacked one, instead of using a trust ratio: x
            moves by lr times its norm, and is then scaled to the norm that it had at the first step. Parameters of less
            than 2 dims and parameters in `exclude_from_layer_adaptation` take AdamW's step. Matrices have no weight
            decay, and none may be all zeros at its first step. Wen et al., arXiv:2606.16899v1. Default: False.
        bias_correction: True: correct both moments, as in v5 of the paper. False: correct neither, as in v3. "lr":
            multiply the learning rate by sqrt(1 - beta2^t) / (1 - beta1^t), outside the ratio (DeepSpeed). Default:
            True.
        grad_averaging: False: add the gradient to the first moment without the factor 1 - beta1. Default: True.
        decay_mode: "ratio": decay inside u, as in the paper. "decoupled": multiply x by 1 - lr * weight_decay first.
            "l2": add weight_decay * x to the gradient. Default: "ratio".
        corrected_weight_decay: Multiply decoupled decay by lr / largest lr. The largest lr is this number; with True it
            is the number given as `lr`. No step may have a larger one (arXiv:2506.02285; timm). Default: False.
        always_adapt: False: no trust ratio if weight_decay is 0 (apex, timm). Default: True.
        weight_norm_bounds: (low, high) that ||x|| is clamped to in the ratio. Default: None.
        trust_ratio_bounds: (low, high) that the ratio is clamped to; (0, 1) is LAMBC. Default: None.
        max_grad_norm: Clip the 2-norm of all gradients of all groups to this value. *Whole optimizer.* Default: None.
        skip_nonfinite: Skip a step whose gradients are not finite. Also skip one whose 2-norm is above 2^53, beyond
            which squares can overflow float32, unless max_grad_norm clips it. `telemetry()` counts skipped steps.
            Without this option, such a step can turn a whole parameter into NaN. *Whole optimizer.* Default: False.
        second_moment: "adam", "amsgrad" (its running maximum) or "adagrad" (a sum, uncorrected, not in
            bfloat16). Default: "adam".
        cautious: Set the elements of r whose sign differs from the gradient's to 0, and divide the others by the share
            that is kept, at least 0.001. Default: False.
        maximize: Maximize the objective instead of minimizing it. Default: False.
        exclude_from_weight_decay: The parameters without weight decay: regular expressions that are searched for in
            parameter names, "ndim<2" (biases and the scales of norms), a list of both, or a callable (name, param)
            -> bool. Names do not include wrappers: use `0.bias`, not DistributedDataParallel's `module.0.bias` or
            torch.compile's `_orig_mod.0.bias`. *Whole optimizer.* Default: None.
        exclude_from_layer_adaptation: The parameters without a trust ratio, in the same forms. *Whole optimizer.*
            Default: None.
        state_dtype: The dtype of both moments: torch.float32, torch.bfloat16, "int8", "int4", or None for float32
            (float64 for float64 parameters). "int8" and "int4" store blocks of 256 elements in a row of dim 0, each
            block with a scale. With bfloat16 the second moment stops following small gradients. With "int4", the second
            moment is stored in 8 bits; the first is relative to its root, which needs betas[0]**2 < betas[1], and falls
            back to 8 bits for odd row lengths. Default: None.
        min_8bit_size: The fewest elements of a tensor that is stored in "int8" or "int4". Smaller tensors, and tensors
            of less than 2 dims, keep float32. Default: 4096.
        weight_rounding: The rounding of bfloat16 and float16 parameters: "nearest" loses small steps; "stochastic" is
            unbiased; "kahan" and "kahan8" keep 16 and 8 more bits in the state; "master" keeps a float32 copy in the
            state. It has no effect on parameters of 32 and 64 bits. Default: "nearest".
        rounding_seed: The seed of the random bits of "stochastic", "int8" and "int4". The bits also depend on the step,
            the parameter's name (or its indices in `param_groups`) and the element, and on nothing else. Default: 0.
        grad_norm_group: The process group for the norm of max_grad_norm and skip_nonfinite, if each rank has only a
            part of the model's parameters. This is so for pipeline stages, for experts on their own meshes, and for
            ZeroRedundancyOptimizer, where `bighorn.shard_update` sets it. A distributed parameter counts once, on the
            first rank of the group that holds it; each rank counts its plain parameters. *Whole optimizer.*
            Default: None.
        names: A module or a mapping of names to parameters, for exclusions if `params` have no names.
            *Whole optimizer.* Default: None.
        backend: "auto", or one backend without a fallback: "cpu" (the C library), "triton" (GPUs), "foreach" (any
            device) or "reference" (any device, slow). *Whole optimizer.* Default: "auto".

    Raises:
        TypeError: An unknown option, or a value of a wrong type.
        ValueError: A value out of range, exclusions that match no name, no parameters, a parameter given twice,
            flattened or not floating-point, or a backend that cannot serve a parameter.

    Example:
        >>> import torch
        >>> from bighorn import Lamb
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Lamb(model.named_parameters(), lr=0.01, weight_decay=0.01, exclude_from_weight_decay=["bias"])
        >>> model(torch.ones(3, 4)).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.telemetry().names
        ('weight', 'bias')
    """

    algorithm = LambAlgorithm()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | Iterable[float] | StepFunction = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float | Iterable[float] | StepFunction = 0.0,
        *,
        adam: bool = False,
        hyperball: bool = False,
        bias_correction: BiasCorrection = True,
        grad_averaging: bool = True,
        decay_mode: DecayMode = "ratio",
        corrected_weight_decay: bool | float = False,
        always_adapt: bool = True,
        weight_norm_bounds: Bounds | None = None,
        trust_ratio_bounds: Bounds | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        second_moment: SecondMoment = "adam",
        cautious: bool = False,
        maximize: bool = False,
        exclude_from_weight_decay: Exclusion | None = None,
        exclude_from_layer_adaptation: Exclusion | None = None,
        state_dtype: torch.dtype | StateDtype | None = None,
        min_8bit_size: int = MIN_8BIT_SIZE,
        weight_rounding: Rounding = "nearest",
        rounding_seed: int = 0,
        grad_norm_group: Any = None,
        names: Names | None = None,
        backend: str = "auto",
        **unknown: NoReturn,
    ) -> None:
        arguments = {**locals()}
        if corrected_weight_decay is True:
            largest = lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr
            with about("corrected_weight_decay=True takes lr for the largest: give the peak of a schedule instead"):
                arguments["corrected_weight_decay"] = positive("lr", largest)
        super().__init__(params, arguments, unknown)

    def telemetry(self) -> LambTelemetry:
        """Return the norms and trust ratios of the last step, as tensors on the parameters' device.

        They are empty before the first step, and after parameters were added or a state was loaded.
        """
        return LambTelemetry(**self._metrics())

    @classmethod
    def like(cls, name: presets.LambPreset, params: ParamsT, **overrides: Any) -> Lamb:
        """Return the LAMB of another package or of a version of the paper: a row of `bighorn.PRESETS`.

        Args:
            name: The preset; `bighorn.PRESETS` lists them.
            params: Parameters in any form that `Lamb` takes.
            **overrides: Options of `Lamb`, which override the preset's.

        Raises:
            TypeError: As for `Lamb`.
            ValueError: As for `Lamb`, or there is no such preset.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(4, 2)
            >>> optimizer = Lamb.like("timm", model.parameters(), lr=0.01)
            >>> optimizer.defaults["weight_decay"], optimizer.defaults["always_adapt"]
            (0.01, False)
        """
        params = listed(params)  # some presets iterate over them as well
        return cls(params, **presets.options(name, params, overrides))
