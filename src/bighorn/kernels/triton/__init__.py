"""Triton: fused kernels on GPUs. It is imported when a tensor asks for it, and bighorn works without it."""

from torch import Tensor

from bighorn.kernels.bucket import Shard
from bighorn.kernels.options import CameOptions, LambOptions
from bighorn.kernels.triton import came, device, lamb, stepper, trial
from bighorn.kernels.triton.came import Came
from bighorn.kernels.triton.lamb import Lamb

__all__ = ["Came", "Lamb", "why_not", "why_not_shard"]

device.trial_step = trial.lamb_step


def why_not(param: Tensor, options: LambOptions | CameOptions) -> str | None:
    """Why this backend cannot serve such a tensor, or None."""
    return came.why_not(param, options) if isinstance(options, CameOptions) else lamb.why_not(param, options)


def why_not_shard(shard: Shard, options: LambOptions | CameOptions) -> str | None:
    """Why this backend cannot serve a shard of a tensor that it would serve whole, or None."""
    return (
        came.why_not_shard(shard, options)
        if isinstance(options, CameOptions)
        else stepper.why_not_shard(shard, options)
    )
