"""The checks of offload: models, optimizers and options that are not supported, with the remedies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bighorn.distributed import sharding
from bighorn.distributed.gradient_release import StepsAhead
from bighorn.distributed.refusals import whole_step_reason

OVERLAPS = ("copies", "backward", "forward")
ACCUMULATES = ("device", "host")


def check_types(model: object, optimizer: object, scaler: object) -> None:
    """Raise for an argument of the wrong type."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or a LossScaler, not {type(scaler).__name__}")


def check_options(
    overlap: object, accumulate: object, masters: object, max_grad_norm: object, bucket_mb: object
) -> None:
    """Raise for an option that is out of range."""
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap={overlap!r} must be one of {', '.join(map(repr, OVERLAPS))}")
    if accumulate not in ACCUMULATES:
        raise ValueError(f"accumulate={accumulate!r} must be one of {', '.join(map(repr, ACCUMULATES))}")
    if not isinstance(masters, bool):
        raise TypeError(f"masters={masters!r} must be True or False")
    for name, value in {"max_grad_norm": max_grad_norm, "bucket_mb": bucket_mb}.items():
        if value is None and name == "max_grad_norm":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}={value!r} must be a number")
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} must be positive and finite")


def device_of(params: Sequence[Tensor], stands_in: bool) -> torch.device:
    """Return the device of all parameters; `stands_in`: copies were given, so that the CPU may stand for a device.

    Raises:
        ValueError: They are on the CPU, or on several devices.
    """
    devices = sorted({str(sharding.local(param).device) for param in params})
    if not devices:
        raise ValueError("optimizer holds no parameters")
    if len(devices) > 1:
        raise ValueError(
            f"optimizer holds parameters on {' and '.join(devices)}: make an optimizer for each device, and offload "
            "each of them"
        )
    device = torch.device(devices[0])
    if device.type == "meta" or (device.type == "cpu" and not stands_in):
        raise ValueError(
            f"the parameters are on {device}, so there is nothing to offload: move the model to its device, "
            'model.to("cuda"), then make the optimizer and offload it; to step on the CPU with gradients there, as '
            "with FSDP2's CPUOffloadPolicy, use the optimizer as it is"
        )
    return device


def unsupported_reason(
    model: nn.Module, optimizer: Optimizer, overlap: str, accumulate: str, *, masters: bool, clips: bool, scales: bool
) -> str | None:
    """The reason why an optimizer of a model cannot be offloaded like that, with the remedy, or None."""
    return (
        _model_reason(model, optimizer)
        or _masters_reason(optimizer, masters)
        or _optimizer_reason(optimizer, accumulate, clips=clips, scales=scales)
        or _overlap_reason(optimizer, overlap, clips=clips, scales=scales)
    )


def _optimizer_reason(optimizer: Optimizer, accumulate: str, *, clips: bool, scales: bool) -> str | None:
    if (reason := whole_step_reason(optimizer)) is not None:
        return f"optimizer is {type(optimizer).__name__}, which cannot step a part of its parameters: {reason}"
    for name in ("capturable", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            return f"optimizer was made with {name}=True, which steps on the CPU do not support: leave it out"
    if clips and isinstance(optimizer, StepsAhead):
        return f"max_grad_norm is an option of {type(optimizer).__name__} itself: give it to the optimizer"
    if accumulate == "host" and (clips or scales):
        return (
            'accumulate="host" adds up gradients where the device does not see them, so that neither max_grad_norm of '
            'offload() nor a scaler can be used: use accumulate="device", or max_grad_norm of Lamb or Came'
        )
    if clips and any(sharding.is_sharded(param) for group in optimizer.param_groups for param in group["params"]):
        return "max_grad_norm of offload() knows the norms of this rank's shards only: use that of Lamb or Came"
    return None


def _model_reason(model: nn.Module, optimizer: Optimizer) -> str | None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return DDP
    held = {param for group in optimizer.param_groups for param in group["params"]}
    if held.isdisjoint(model.parameters()):
        return "optimizer holds none of the model's parameters: make it from the parameters of this very model"
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            return f"{name or 'the model'} has sparse gradients: make it with sparse=False"
    for name, param in model.named_parameters():
        if param in held and getattr(param, "_post_accumulate_grad_hooks", None):
            return (
                f"{name} has a hook for its gradient already (release_gradients, another offload, or your own), which "
                "would find none: leave it out"
            )
    return None


def _masters_reason(optimizer: Optimizer, masters: bool) -> str | None:
    for group in optimizer.param_groups if masters else ():
        if group.get("weight_rounding", "nearest") != "nearest":
            return (
                f"masters=True and weight_rounding={group['weight_rounding']!r} both say how 16-bit weights are kept: "
                "leave weight_rounding out"
            )
        if any(param in optimizer.state for param in group["params"]):
            return "masters=True is for an optimizer without state: offload it first, then load the checkpoint"
    return None


def _overlap_reason(optimizer: Optimizer, overlap: str, *, clips: bool, scales: bool) -> str | None:
    if overlap != "copies" and any(
        sharding.is_sharded(param) for group in optimizer.param_groups for param in group["params"]
    ):
        return (
            f"overlap={overlap!r} would send sums between ranks from two threads, since parameters are sharded: use "
            'overlap="copies"'
        )
    if overlap != "backward":
        return None
    if clips or scales:
        what = "a scaler" if scales else "max_grad_norm"
        return f'{what} needs all gradients before overlap="backward" steps the first: use "copies" or "forward"'
    reason = optimizer.whole_step_reason() if isinstance(optimizer, StepsAhead) else None
    return None if reason is None else f'overlap="backward" is not possible: {reason}; or use "copies" or "forward"'


DDP = (
    "DistributedDataParallel averages gradients after they are there, so that every rank would step with its own: use "
    "fully_shard, which hands over averages"
)


def refuse_inner_step() -> NoReturn:
    """Raise for a step of the optimizer itself, past its wrapper."""
    raise RuntimeError(
        "this optimizer was offloaded, and has no gradients of its own: call step() of what offload() returned"
    )


def refuse_scaler() -> NoReturn:
    """Raise for a scaler that steps the wrapper."""
    raise RuntimeError(
        "a scaler finds no gradients here, since they are in the host's memory: pass it to offload(..., "
        "scaler=scaler), and call optimizer.step() in place of scaler.step(optimizer)"
    )


def refuse_second_gradient(label: str) -> NoReturn:
    """Raise for a second gradient before the step."""
    raise RuntimeError(
        f"{label} has a second gradient, and the first has left the device: run all but the last backward() before a "
        'step inside optimizer.accumulate(), or use accumulate="host"; to forget the first, as after a backward() that '
        "has failed, call optimizer.zero_grad()"
    )
