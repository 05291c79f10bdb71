"""CAME: its options, and their values for a bucket. The mathematics is in `_kernels/reference/came.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bighorn._arguments import Check, StepFunction, choice, count, dtype_among
from bighorn._kernels.options import CameOptions, Factor
from bighorn._kernels.rounding import Rounding
from bighorn._names import Exclusion, Names, listed
from bighorn._optim import presets
from bighorn._optim.algorithm import SHARED, Algorithm, Group, Variant
from bighorn._optim.optimizer import KernelOptimizer
from bighorn._optim.reports import Table
from bighorn._optim.state import (
    MIN_8BIT_SIZE,
    MOMENT_DTYPES,
    StateDtype,
    StateSpec,
    StateTensorSpec,
    all_dims,
    moments_dtype,
    moments_spec,
)

HALF_MAX = torch.finfo(torch.float16).max

FactorRule = Literal["matrix", "last_two", "linear"]
"""The rules by which tensors are factored. Kernels receive "linear" as "matrix", of which it has fewer tensors."""


@dataclass(frozen=True, repr=False)
class CameTelemetry(Table):
    """The metrics of the last step, with one entry per parameter (per slice of a stacked one); it prints as a table.

    Attributes:
        names: The parameters' names, or their indices in `param_groups`.
        update_rms: The root mean square of u before it was clipped, `[names]`, float32, on the parameters' device.
        clip_factor: The factor by which clipping multiplied u, at most 1, likewise.
        confidence: The mean of the factors that multiplied the momentum, likewise; 1 for an unfactored parameter.
        lr: The learning rate of the step, likewise.
        skipped: The number of steps that wrote nothing because gradients were not finite, since the optimizer was made,
            copied or loaded; 0-dim, int64.
    """

    names: tuple[str, ...]
    update_rms: Tensor
    clip_factor: Tensor
    confidence: Tensor
    lr: Tensor
    skipped: Tensor


class CameAlgorithm(Algorithm[CameOptions]):
    """The options, state tensors and kernel options of `Came`."""

    name = "came"
    class_name = "Came"
    exchanged: ClassVar[Mapping[str, str]] = {
        f"exp_avg_{of}_{line}": f"exp_avg_{of}_{other}"
        for of in ("sq", "res")
        for line, other in (("row", "col"), ("col", "row"))
    }
    kernel_options_type = CameOptions
    group_options: ClassVar[Mapping[str, Check]] = {
        **SHARED,
        "factor": choice(*get_args(FactorRule)),
        "state_dtype": dtype_among(MOMENT_DTYPES),
        "min_8bit_size": count,
    }

    def unsupported_reason(self, group: Group, param: Tensor) -> str | None:
        """The reason why a parameter cannot be optimized, or None; a momentum in float16 must not overflow."""
        if (
            group["state_dtype"] == "float16"
            and (most := group["clip_threshold"] * math.sqrt(param.numel())) > HALF_MAX
        ):
            return (
                f'state_dtype="float16" holds {HALF_MAX:g} at most, and clip_threshold={group["clip_threshold"]:g} '
                f'allows a momentum of {most:.3g} in {param.numel()} elements: use state_dtype="bfloat16"'
            )
        return super().unsupported_reason(group, param)

    def shape_of(self, group: Group, param: Tensor) -> tuple[bool, int]:
        """Whether a parameter is factored, and how many leading dims must be the outermost in memory.

        With `factor="last_two"` every matrix is factored, with "linear" every matrix of 2 dims or of a 1x1 convolution,
        else only one that is larger than its factors.
        """
        stacked = int(group["stacked"])
        shape = param.shape[stacked:]
        if group["factor"] == "last_two":
            factored, leading = len(shape) >= 2 and param.numel() > 0, param.dim()
        elif group["factor"] == "linear":
            matrix = len(shape) == 2 or (len(shape) == 4 and math.prod(shape[2:]) == 1)
            factored, leading = matrix and param.numel() > 0, stacked + 1
        else:
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (0, 0)
            factored, leading = 2 * (rows + columns) < rows * columns, stacked + 1
        return factored, leading if factored else stacked

    def moments(self, group: Group, param: Tensor) -> StateSpec:
        """The momentum, and averages of rows and columns, or the whole second moment of an unfactored parameter."""
        stacked, wide = int(group["stacked"]), moments_dtype(param, None)
        dims = all_dims(param)
        dtypes = {"exp_avg": moments_dtype(param, group["state_dtype"])}
        factored, of_last_two = self.shape_of(group, param)[0], group["factor"] == "last_two"
        spec = moments_spec(param, dtypes, group, self.forms, matrices=factored and of_last_two)
        if not factored:
            return {**spec, "exp_avg_sq": StateTensorSpec(wide, dims)}
        if of_last_two:
            row, col = dims[:-1], (*dims[:-2], dims[-1])
        else:
            row, col = dims[: stacked + 1], (*dims[:stacked], *dims[stacked + 1 :])
        averages = {"row": StateTensorSpec(wide, row), "col": StateTensorSpec(wide, col)}
        return {**spec, **{f"exp_avg_{of}_{name}": kept for of in ("sq", "res") for name, kept in averages.items()}}

    def kernel_options(self, group: Group, variant: Variant) -> CameOptions:
        """The options of the group, with the rule by which the bucket is factored."""
        factor: Factor = "last_two" if group["factor"] == "last_two" else "matrix"
        return CameOptions(factor=factor if variant.factored else None, **self.shared_options(group, variant))


class Came(KernelOptimizer):
    r"""CAME, which combines Adafactor's memory with a confidence-guided momentum.

    The second moment of a matrix is stored as one average per row and one per column. The step is the momentum divided
    by its recent distance from the update, the instability, which is stored in the same way. Luo et al., "CAME:
    Confidence-guided Adaptive Memory Efficient Optimization", arXiv:2307.02047v2, Algorithm 2, as came-pytorch computes
    it. The state is slightly more than one number per parameter; Adam's is two.

    Args:
        params: Tensors, (name, tensor) pairs such as `model.named_parameters()`, or groups. A group is a dict with
            `params` and any option below that is not marked *whole optimizer*. It may have two more keys: `stacked`
            (True: dim 0 stacks independent layers, each with its own factors and clip) and `grad_centralization` (True:
            subtract the mean over dims 1 to the last from gradients of 2 or more dims; "conv": from gradients of 3 or
            more).
        lr: Learning rate, at least 0: a number; a tensor of one element, which is read at each step, and of which each
            group but the first has a copy; an iterable with one value for each step; or a schedule of
            `bighorn.schedules`, which is called with the step, 0 for the first.
            Required unless every group has one. Default: None.
        betas: Decay of the averages of u, of the squared gradient, and of the instability. The first is in (0, 1), the
            others in [0, 1). With 0 for the first, the momentum would equal u, the instability would be 0, and eps
            alone would divide the step. Default: (0.9, 0.999, 0.9999).
        eps: Added to the squared gradient and to the instability, each at least 1.2e-38. Default: (1e-30, 1e-16).
        weight_decay: At least 0: a number, an iterable or a schedule. x is multiplied by 1 - lr * weight_decay.
            Default: 0.0.
        clip_threshold: The largest root mean square of u, above 0. Default: 1.0.
        factor: "matrix": treat a tensor of more than 2 dims as a matrix of dim 0 by all other dims, and do not factor
            it if its factors would not be smaller. "last_two": the published rule, one matrix for each index of the
            leading dims. "linear": SANA's rule, only matrices and 1x1 convolutions. Default: "matrix".
        decay_rate: If given, 1 - t ** -decay_rate replaces betas[1] at step t; mindformers uses 0.8. Default: None.
        scale_parameter: Multiply lr by the root mean square of x, at least scale_eps. Default: False.
        scale_eps: The least factor of scale_parameter, above 0. Default: 1e-3.
        bias_correction: Correct the averages of the instability for their start at 0. With True use AdamW's learning
            rate. The published rule does not correct them: its first step is about 11 times lr, and on two tasks its
            best learning rate was 0.1 and 0.4 times AdamW's. Default: False.
        cautious: Set the elements of the step whose sign differs from the gradient's to 0, and divide the others by the
            share that is kept, at least 0.001, before weight decay. Liang et al., "Cautious Optimizers: Improving
            Training with One Line of Code", arXiv:2411.16085v4, Algorithm 1. Default: False.
        max_grad_norm: Clip the 2-norm of all gradients of all groups to this value. *Whole optimizer.* Default: None.
        skip_nonfinite: Skip a step whose gradients are not finite. Also skip one whose 2-norm is above 2^53, beyond
            which squares can overflow float32, unless max_grad_norm clips it. `telemetry()` counts skipped steps.
            Without this option, such a step can turn a whole parameter into NaN. *Whole optimizer.* Default: False.
        maximize: Maximize the objective instead of minimizing it. Default: False.
        exclude_from_weight_decay: The parameters without weight decay: regular expressions that are searched for in
            parameter names, "ndim<2" (biases and the scales of norms), a list of both, or a callable (name, param)
            -> bool. Names do not include wrappers: use `0.bias`, not DistributedDataParallel's `module.0.bias` or
            torch.compile's `_orig_mod.0.bias`. *Whole optimizer.* Default: None.
        state_dtype: The dtype of the momentum: torch.float32, torch.bfloat16, torch.float16, "int8", "int4", or None
            for float32 (float64 for float64 parameters). "int8" and "int4" store blocks of 256 elements in a row of a
            matrix, each block with a scale. With "int4", odd row lengths fall back to 8 bits. Averages of rows and
            columns are at least float32. Default: None.
        min_8bit_size: The fewest elements of a tensor that is stored in "int8" or "int4". Smaller tensors, and tensors
            of less than 2 dims, keep float32. So do convolutions with factor="last_two", whose rows have fewer than 8
            elements. Default: 4096.
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
        ValueError: A value out of range, no lr, exclusions that match no name, no parameters, a parameter given twice,
            flattened or not floating-point, or a backend that cannot serve a parameter.

    Example:
        >>> import torch
        >>> from bighorn import Came
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = Came(model.named_parameters(), lr=2e-4, weight_decay=0.01)
        >>> model(torch.ones(3, 64)).square().sum().backward()
        >>> optimizer.step()
        >>> {name: tuple(value.shape) for name, value in optimizer.state[model.weight].items() if name != "step"}
        {'exp_avg': (32, 64), 'exp_avg_sq_row': (32,), 'exp_avg_sq_col': (64,), 'exp_avg_res_row': (32,),
         'exp_avg_res_col': (64,)}
    """

    algorithm = CameAlgorithm()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | Iterable[float] | StepFunction | None = None,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        weight_decay: float | Iterable[float] | StepFunction = 0.0,
        *,
        clip_threshold: float = 1.0,
        factor: FactorRule = "matrix",
        decay_rate: float | None = None,
        scale_parameter: bool = False,
        scale_eps: float = 1e-3,
        bias_correction: bool = False,
        cautious: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        maximize: bool = False,
        exclude_from_weight_decay: Exclusion | None = None,
        state_dtype: torch.dtype | StateDtype | Literal["float16"] | None = None,
        min_8bit_size: int = MIN_8BIT_SIZE,
        weight_rounding: Rounding = "nearest",
        rounding_seed: int = 0,
        grad_norm_group: Any = None,
        names: Names | None = None,
        backend: str = "auto",
        **unknown: NoReturn,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "lr" or value is not None}
        super().__init__(params, arguments, unknown)

    def telemetry(self) -> CameTelemetry:
        """Return the metrics of the last step, as tensors on the parameters' device.

        They are empty before the first step, and after parameters were added or a state was loaded.
        """
        return CameTelemetry(**self._metrics())

    @classmethod
    def like(cls, name: presets.CamePreset, params: ParamsT, **overrides: Any) -> Came:
        """Return the CAME of another package: a row of `bighorn.CAME_PRESETS`.

        Args:
            name: The preset; `bighorn.CAME_PRESETS` lists them.
            params: Parameters in any form that `Came` takes.
            **overrides: Options of `Came`, which override the preset's.

        Raises:
            TypeError: As for `Came`.
            ValueError: As for `Came`, or there is no such preset.

        Example:
            >>> import torch
            >>> model = torch.nn.Conv2d(8, 16, 1)
            >>> optimizer = Came.like("sana", model.parameters(), lr=1e-4)
            >>> optimizer.defaults["factor"]
            'linear'
        """
        params = listed(params)
        return cls(params, **presets.options(name, params, overrides, presets.CAME_PRESETS))
