"""LARS: its options, and their values for a bucket. The mathematics is in `_kernels/reference/lars.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bighorn._arguments import StepFunction
from bighorn._kernels.options import Denominator, LarsOptions
from bighorn._kernels.rounding import Rounding
from bighorn._names import Exclusion, Names, listed
from bighorn._optim import presets
from bighorn._optim.lamb import LambTelemetry
from bighorn._optim.layerwise import LayerwiseAlgorithm
from bighorn._optim.optimizer import KernelOptimizer
from bighorn._optim.state import MIN_8BIT_SIZE, StateDtype


class LarsTelemetry(LambTelemetry):
    """The metrics of the last step, as `LambTelemetry`: `update_norm` is the ratio's denominator without eps."""


class LarsAlgorithm(LayerwiseAlgorithm[LarsOptions]):
    """The options, state tensors and kernel options of `Lars`."""

    name = "lars"
    class_name = "Lars"
    slow_layers_hint = (
        "LARS's trust ratio of each, 1 in its first step, stays below {below:g} since: that step was too large. "
        'Exclude biases and norms, with exclude_from_layer_adaptation="ndim<2"'
    )
    kernel_options_type = LarsOptions


class Lars(KernelOptimizer):
    r"""LARS, momentum with a learning rate that is multiplied by a trust ratio in each layer.

    With u = g + weight_decay * x, each layer has the ratio q = trust_coefficient * ||x|| / (||g|| + weight_decay *
    ||x|| + eps), 1 where ||x|| or ||g|| is 0. The momentum is m = momentum * m + lr * q * u, and x moves by -m. You,
    Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888v3, Algorithm 1. The state is
    one number per parameter, half of Adam's.

    Args:
        params: Tensors, (name, tensor) pairs such as `model.named_parameters()`, or groups. A group is a dict with
            `params` and any option below that is not marked *whole optimizer*. It may have three more keys, as in
            `bighorn.Lamb`: `adapt`, `stacked` and `grad_centralization`.
        lr: Learning rate, at least 0: a number; a tensor of one element, which is read at each step, and of which each
            group but the first has a copy; an iterable with one value for each step; or a schedule of
            `bighorn.schedules`, which is called with the step, 0 for the first.
            The trust coefficient multiplies it in layers with a ratio: use a larger rate than for SGD. Default: 1.0.
        momentum: Decay of the sum of past steps, in [0, 1). Default: 0.9.
        weight_decay: At least 0: a number, an iterable or a schedule. Default: 0.0.
        nesterov: Move x by -(momentum * m + lr * q * u), Nesterov's momentum. Default: False.
        trust_coefficient: The factor of the trust ratio, above 0. Default: 1e-3.
        eps: Added to the denominator of the trust ratio, at least 0. Default: 1e-8.
        denominator: "sum": ||g|| + weight_decay * ||x||, as in the paper. "joint": ||g + weight_decay * x|| (optax,
            SimCLR). Default: "sum".
        trust_clip: Clip the trust ratio divided by lr to 1, so that a layer's learning rate is at most lr (LARC of apex
            and timm). Default: False.
        lr_in_momentum: True: the momentum sums lr * q * u, as in the paper. False: it sums q * u, and x moves by
            -lr * m (torch.optim.SGD, timm). Both are the same while lr is constant. Default: True.
        always_adapt: False: no trust ratio if weight_decay is 0 (timm). Default: True.
        max_grad_norm: Clip the 2-norm of all gradients of all groups to this value. *Whole optimizer.* Default: None.
        skip_nonfinite: As for `bighorn.Lamb`: write nothing in a step whose gradients are not finite. *Whole
            optimizer.* Default: False.
        maximize: Maximize the objective instead of minimizing it. Default: False.
        exclude_from_weight_decay: The parameters without weight decay, as for `bighorn.Lamb`: regular expressions,
            "ndim<2" (biases and the scales of norms), or a callable (name, param) -> bool. *Whole optimizer.* Default:
            None.
        exclude_from_layer_adaptation: The parameters without a trust ratio, in the same forms. *Whole optimizer.*
            Default: None.
        state_dtype: The dtype of the momentum: torch.float32, torch.bfloat16, "int8", "int4", or None for float32
            (float64 for float64 parameters). "int8" and "int4" store blocks of 256 elements in a row of dim 0, each
            block with a scale. With "int4", odd row lengths fall back to 8 bits. Default: None.
        min_8bit_size: The fewest elements of a tensor that is stored in "int8" or "int4". Smaller tensors, and tensors
            of less than 2 dims, keep float32. Default: 4096.
        weight_rounding: The rounding of bfloat16 and float16 parameters, as for `bighorn.Lamb`: "nearest",
            "stochastic", "kahan", "kahan8" or "master". Default: "nearest".
        rounding_seed: The seed of the random bits of "stochastic", "int8" and "int4". Default: 0.
        grad_norm_group: As for `bighorn.Lamb`. *Whole optimizer.* Default: None.
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
        >>> from bighorn import Lars
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Lars(model.named_parameters(), weight_decay=1e-4, exclude_from_layer_adaptation=["bias"])
        >>> model(torch.ones(3, 4)).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.telemetry().names
        ('weight', 'bias')
    """

    algorithm = LarsAlgorithm()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | Iterable[float] | StepFunction = 1.0,
        momentum: float = 0.9,
        weight_decay: float | Iterable[float] | StepFunction = 0.0,
        *,
        nesterov: bool = False,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        denominator: Denominator = "sum",
        trust_clip: bool = False,
        lr_in_momentum: bool = True,
        always_adapt: bool = True,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
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
        super().__init__(params, locals(), unknown)

    def telemetry(self) -> LarsTelemetry:
        """Return the norms and trust ratios of the last step, as tensors on the parameters' device.

        They are empty before the first step, and after parameters were added or a state was loaded.
        """
        return LarsTelemetry(**self._metrics())

    @classmethod
    def like(cls, name: presets.LarsPreset, params: ParamsT, **overrides: Any) -> Lars:
        """Return the LARS of another package or of the paper: a row of `bighorn.LARS_PRESETS`.

        Args:
            name: The preset; `bighorn.LARS_PRESETS` lists them.
            params: Parameters in any form that `Lars` takes.
            **overrides: Options of `Lars`, which override the preset's.

        Raises:
            TypeError: As for `Lars`.
            ValueError: As for `Lars`, or there is no such preset.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(4, 2)
            >>> optimizer = Lars.like("timm", model.parameters(), lr=0.5)
            >>> optimizer.defaults["lr_in_momentum"], optimizer.defaults["always_adapt"]
            (False, False)
        """
        params = listed(params)  # some presets iterate over them as well
        return cls(params, **presets.options(name, params, overrides, presets.LARS_PRESETS))
