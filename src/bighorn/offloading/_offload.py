"""`offload`: an optimizer whose state and arithmetic are in the host's memory, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bighorn import _arguments as arguments
from bighorn._distributed import sharding
from bighorn._distributed.step_in_parts import BighornOptimizer, whole_step_reason
from bighorn.offloading._copies import AcceleratorCopies, Copies
from bighorn.offloading._optimizer import OffloadedOptimizer

DDP = (
    "DistributedDataParallel averages gradients after they are there, so that every rank would step with its own: use "
    "fully_shard, which hands over averages"
)


def offload(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    masters: bool = False,
    max_grad_norm: float | None = None,
    scaler: GradScaler | None = None,
    bucket_mb: float = 10.0,
    copies: Copies | None = None,
) -> OffloadedOptimizer:
    """Keep an optimizer's state in host memory, and step on the CPU while the device runs the model.

    Weights stay on the device. Gradients are copied to the host in buckets while `backward()` runs, and freed on the
    device. `step()` steps each bucket on the CPU while it copies back the new weights of the bucket before. The
    training loop does not change. Use the returned optimizer in place of the one passed, also for schedulers and
    checkpoints; checkpoints do not differ.

    Results are bitwise identical to the same optimizer on the CPU with the same gradients, also with `max_grad_norm`
    below. The exception is Lamb's and Came's own `max_grad_norm` and `skip_nonfinite`: the device sums the squares of
    all gradients in float64, but in another order, so the norm differs by a relative 1e-15.

    After `backward()` no gradients are left on the device, so `clip_grad_norm_` clips nothing. Copies of the model, by
    deepcopy or pickle, are not offloaded.

    Args:
        model: A model on a device; with FSDP2, call this after `fully_shard`.
        optimizer: A Lamb, Came or Lars, or one of `torch.optim` over the model's parameters. It may have state.
        masters: Step float32 masters of 16-bit weights; `state_dict()` has them as "master". For Lamb and Came this
            equals `weight_rounding="master"`. Default: False.
        max_grad_norm: Clip as `clip_grad_norm_(params, max_grad_norm)` does, for an optimizer of `torch.optim`, with
            the parameters in its order. A gradient that is not finite makes every gradient NaN, or 0, as in torch.
            With masters, gradients are float32 before they are clipped. Use Lamb's and Came's own option instead.
            Default: None.
        scaler: The scaler of the loss. Call `step()` instead of `scaler.step(optimizer)`. Default: None.
        bucket_mb: The size of a bucket in millions of bytes. Gradients of two buckets are on the device. Default: 10.0.
        copies: The copies of a device that torch has no streams for. Default: None.

    Raises:
        TypeError: An argument of a wrong type.
        ValueError: An option out of range, parameters on the CPU or on several devices, or a model or optimizer that
            is not supported. The message gives the remedy; model and optimizer are unchanged.

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv:2101.06840v1, section 4.

    Example:
        >>> import torch
        >>> from bighorn import Lamb, offload
        >>> model = torch.nn.Linear(64, 32)  # not on a device
        >>> optimizer = Lamb(model.parameters(), lr=0.01)
        >>> try:
        ...     offload(model, optimizer)
        ... except ValueError as error:
        ...     print(str(error).partition(":")[0])
        the parameters are on cpu, so there is nothing to offload
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or a LossScaler, not {type(scaler).__name__}")
    arguments.flag("masters", masters)
    arguments.max_norm("max_grad_norm", max_grad_norm)
    arguments.positive("bucket_mb", bucket_mb)
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError("optimizer was offloaded already: use it as it is")
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = device_of(params, stands_in=copies is not None)
    reason = unsupported_reason(model, optimizer, masters=masters, clips=max_grad_norm is not None)
    if reason is not None:
        raise ValueError(f"the optimizer cannot be offloaded: {reason}")
    return OffloadedOptimizer(
        model,
        optimizer,
        AcceleratorCopies(device) if copies is None else copies,
        masters=masters,
        max_grad_norm=max_grad_norm,
        scaler=scaler,
        bucket_bytes=int(bucket_mb * 1e6),
    )


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


def unsupported_reason(model: nn.Module, optimizer: Optimizer, *, masters: bool, clips: bool) -> str | None:
    """The reason why an optimizer of a model cannot be offloaded like that, with the remedy, or None."""
    return (
        _model_reason(model, optimizer)
        or _masters_reason(optimizer, masters)
        or _optimizer_reason(optimizer, clips)
        or _sharded_reason(optimizer, clips)
    )


def _optimizer_reason(optimizer: Optimizer, clips: bool) -> str | None:
    if (reason := whole_step_reason(optimizer)) is not None:
        return f"optimizer is {type(optimizer).__name__}, which cannot step a part of its parameters: {reason}"
    for name in ("capturable", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            return f"optimizer was made with {name}=True, which steps on the CPU do not support: leave it out"
    if clips and isinstance(optimizer, BighornOptimizer):
        return f"max_grad_norm is an option of {type(optimizer).__name__} itself: give it to the optimizer"
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


def _sharded_reason(optimizer: Optimizer, clips: bool) -> str | None:
    if clips and any(sharding.is_sharded(param) for group in optimizer.param_groups for param in group["params"]):
        return "max_grad_norm of offload() knows the norms of this rank's shards only: use Lamb's or Came's own"
    return None
