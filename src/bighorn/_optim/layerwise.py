"""What the optimizers with a trust ratio have in common: options, state tensors and kernel options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from bighorn._arguments import Check, count, dtype_among, flag
from bighorn._kernels.options import Options
from bighorn._optim.algorithm import SHARED, Algorithm, Group, Variant
from bighorn._optim.state import StateDtype, StateSpec, moments_dtype, moments_spec


class LayerwiseAlgorithm(Algorithm[Options]):
    """The options, state tensors and kernel options of an optimizer with a trust ratio; one moment by default."""

    group_options: ClassVar[Mapping[str, Check]] = {
        **SHARED,
        "always_adapt": flag,
        "adapt": flag,
        "state_dtype": dtype_among(get_args(StateDtype)),
        "min_8bit_size": count,
    }
    group_only: ClassVar[Mapping[str, Any]] = {"adapt": True, **Algorithm.group_only}

    def moment_dtypes(self, group: Group, param: Tensor) -> dict[str, torch.dtype]:
        """The dtype of each moment, or of its codes."""
        return {"exp_avg": moments_dtype(param, group["state_dtype"])}

    def moments(self, group: Group, param: Tensor) -> StateSpec:
        """The moments, in one dtype or in blocks."""
        return moments_spec(param, self.moment_dtypes(group, param), group, self.forms)

    def kernel_options(self, group: Group, variant: Variant) -> Options:
        """The options of the group, and whether the bucket has a trust ratio."""
        shared = self.shared_options(group, variant)
        adapt = group["adapt"] and variant.adapts and (group["always_adapt"] or shared["weight_decay"] != 0)
        options: Options = self.kernel_options_type(adapt=adapt and self.has_trust_ratio(group), **shared)
        return options

    def has_trust_ratio(self, group: Group) -> bool:
        """Whether the algorithm's own options leave a group its trust ratio."""
        del group
        return True
