"""`offload`: an optimizer whose state and arithmetic are in the host's memory."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from bighorn.offloading import refusals
from bighorn.offloading.copies import AcceleratorCopies, Copies
from bighorn.offloading.optimizer import OffloadedOptimizer


def offload(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    overlap: Literal["copies", "backward", "forward"] = "copies",
    accumulate: Literal["device", "host"] = "device",
    masters: bool = False,
    max_grad_norm: float | None = None,
    scaler: GradScaler | None = None,
    bucket_mb: float = 10.0,
    copies: Copies | None = None,
) -> OffloadedOptimizer:
    """Keep an optimizer's state in the host's memory, and step there, beside the passes of a model on a device.

    Weights stay on the device. Gradients leave it in buckets while `backward()` runs, and are freed there; the CPU
    steps weights of its own, and sends them back. The training loop does not change, and its results are those of the
    same optimizer on the CPU, bit for bit. The returned optimizer takes the place of the one passed, also for
    schedulers and checkpoints, whose contents are as if nothing were offloaded.

    After `backward()`, gradients no longer exist on the device, so that `clip_grad_norm_` finds none.

    Args:
        model: A model on a device; with FSDP2, call this after `fully_shard`.
        optimizer: A Lamb, a Came or an optimizer of `torch.optim` over the model's parameters. It may have state.
        overlap: What runs beside other work of the device. With "copies", gradients travel during `backward()`, and
            `step()` steps each bucket while the weights of the one before travel back; after any error of its own,
            everything is as before. "backward" also steps during `backward()`, as far as gradients have arrived; an
            error can then leave some parameters stepped, and the optimizer says which. It cannot be combined with a
            clip, skip_nonfinite or a scaler, which need all gradients first, and it reads options when the pass begins.
            With "forward", `step()` returns at once, and the forward and the `state_dict()` of each module wait for its
            weights; any other code that reads weights must call `synchronize()` first. Default: "copies".
        accumulate: Where the gradients of several `backward()` calls are added up: on the "device", which keeps them
            there, inside `accumulate()`; or on the "host", in float32, where each call sends its own. Default:
            "device".
        masters: Step float32 masters of 16-bit weights, which are in `state_dict()` as "master". For Lamb and Came this
            computes what their `weight_rounding="master"` does. Default: False.
        max_grad_norm: Clip as `clip_grad_norm_` does, for an optimizer of `torch.optim`; Lamb and Came have this option
            themselves. Default: None.
        scaler: The scaler of the loss, for which `step()` then replaces `scaler.step(optimizer)`. Default: None.
        bucket_mb: The size of a bucket in millions of bytes; gradients of two are on the device. Default: 10.0.
        copies: The copies of a device that torch has no streams for. Default: None.

    Raises:
        TypeError: An argument of a wrong type.
        ValueError: An option out of range, parameters on the CPU or on several devices, or a model or optimizer that
            is not supported. The message gives the remedy, and nothing has changed.

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
    refusals.check_types(model, optimizer, scaler)
    refusals.check_options(overlap, accumulate, masters, max_grad_norm, bucket_mb)
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError("optimizer was offloaded already: use it as it is")
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = refusals.device_of(params, stands_in=copies is not None)
    reason = refusals.unsupported_reason(
        model,
        optimizer,
        overlap,
        accumulate,
        masters=masters,
        clips=max_grad_norm is not None,
        scales=scaler is not None,
    )
    if reason is not None:
        raise ValueError(f"the optimizer cannot be offloaded: {reason}")
    return OffloadedOptimizer(
        model,
        optimizer,
        AcceleratorCopies(device) if copies is None else copies,
        overlap=overlap,
        accumulate=accumulate,
        masters=masters,
        max_grad_norm=max_grad_norm,
        scaler=scaler,
        bucket_bytes=int(bucket_mb * 1e6),
    )
