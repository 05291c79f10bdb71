"""The checks of TailOverlap: unsupported models, optimizers and scalers, with the remedies."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam

from bighorn.distributed.step_in_parts import StepsInParts


def refuse_closure() -> None:
    """Raise for a closure."""
    raise ValueError(
        "closure is not supported with TailOverlap, since its backward() would send gradients again: call the closure, "
        "then overlap.step() without it"
    )


def check_types(model: object, optimizer: object, scaler: object) -> None:
    """Raise for a model, optimizer or scaler of the wrong type."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"ddp_model must be a torch.nn.parallel.DistributedDataParallel, not {type(model).__name__}: wrap the "
            "model in one, with gradient_as_bucket_view=True, and pass that itself, not what torch.compile makes of it"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def agree(group: Any, reason: str | None, setup: tuple[object, ...]) -> None:
    """Raise on every rank if one rank raises, since the others would wait for it."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (reason, setup), group)
    if reason is not None:
        raise ValueError(reason)
    for rank, (other_reason, other_setup) in enumerate(answers):
        if other_reason is not None:
            raise ValueError(f"on rank {rank} of the model's process group: {other_reason}")
        if other_setup != setup:
            raise ValueError(
                f"ranks differ in (optimizer's class, whether there is a scaler): {setup} here, {other_setup} on rank "
                f"{rank} of the model's process group: give all of them the same"
            )


def unsupported_reason(model: DistributedDataParallel, optimizer: Optimizer) -> str | None:
    """The reason why the model and the optimizer cannot be overlapped, with the remedy, or None."""
    if not model.gradient_as_bucket_view:
        return (
            "ddp_model was made with gradient_as_bucket_view=False, which copies gradients out of the buckets before "
            "they have arrived: make it with gradient_as_bucket_view=True"
        )
    if model.find_unused_parameters:
        return (
            "ddp_model was made with find_unused_parameters=True, which decides whether a gradient exists before it "
            "has arrived: let every parameter take part in the loss, and make it with find_unused_parameters=False"
        )
    if model._comm_hooks or model.mixed_precision is not None:
        return (
            "ddp_model has a communication hook already (another TailOverlap, mixed_precision, or one of your own), "
            "and there can be only one: make a new DistributedDataParallel for TailOverlap"
        )
    if model._delay_all_reduce_params:
        return (
            "ddp_model was made with delay_all_reduce_named_params, which are reduced without a communication hook: "
            "leave these out"
        )
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) is True:
            return f"{name or 'the model'} has sparse gradients, which have no buckets: make it with sparse=False"
    if (reason := whole_step_reason(optimizer)) is not None:
        return f"optimizer is {type(optimizer).__name__}, which cannot step part of its parameters: {reason}"
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name, param in model.module.named_parameters():
        if param.requires_grad and name not in model.parameters_to_ignore and param not in held:
            return (
                f"optimizer does not hold the trainable parameter {name}, so something else would use its gradient "
                "while it is in flight: add it to the optimizer, or freeze it before the model is wrapped"
            )
    return None


def whole_step_reason(optimizer: Optimizer) -> str | None:
    """The reason why an optimizer needs all gradients at once, or None."""
    if isinstance(optimizer, StepsInParts):
        return None
    if isinstance(optimizer, LBFGS):
        return "its direction is one for all of them; use another"
    if isinstance(optimizer, SparseAdam):
        return "it takes sparse gradients, which have no buckets; use another"
    if type(optimizer).__module__.startswith("torch.distributed."):
        return "each of its steps exchanges parameters between ranks; use the optimizer that it wraps"
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return (
            "its step() is not one of torch.optim, so whether it counts steps or keeps sums across parameters is not "
            "known; give it a method step_in_parts(parts, wait), or use one of Bighorn's or of torch.optim"
        )
    return None
