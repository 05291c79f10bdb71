"""Triton: fused kernels on GPUs. Triton is imported when a tensor needs it, and bighorn works without it."""

from torch import Tensor

from bighorn.kernels.bucket import Shard
from bighorn.kernels.options import AnyOptions, CameOptions
from bighorn.kernels.triton import came, device, layerwise, stepper, trial
from bighorn.kernels.triton.came import Came
from bighorn.kernels.triton.lamb import Lamb
from bighorn.kernels.triton.lars import Lars

__all__ = ["Came", "Lamb", "Lars", "unsupported_reason", "unsupported_shard_reason"]

device.trial_step = trial.lamb_step


def unsupported_reason(param: Tensor, options: AnyOptions) -> str | None:
    """The reason why this backend cannot serve a tensor, or None."""
    if isinstance(options, CameOptions):
        return came.unsupported_reason(param, options)
    return layerwise.unsupported_reason(param, options)


def unsupported_shard_reason(shard: Shard, options: AnyOptions) -> str | None:
    """The reason why this backend cannot serve a shard of a tensor that it would serve whole, or None."""
    if isinstance(options, CameOptions):
        return came.unsupported_shard_reason(shard, options)
    return stepper.unsupported_shard_reason(shard, options)
