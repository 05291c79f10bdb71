"""Gradient release: backward steps each parameter as soon as its gradient is complete, and frees the gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bighorn._distributed.step_in_parts import BighornOptimizer


class Release:
    """The handle that `release_gradients` returns."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._accumulates = False

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients inside this context; the next `backward()` outside it steps.

        From the first `backward()` on, the accumulated gradients need their usual memory.
        """
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def remove(self) -> None:
        """Keep gradients again, from the next backward on."""
        for handle in self._handles:
            handle.remove()


def release_gradients(model: nn.Module, optimizer: Optimizer) -> Release:
    """Step each parameter inside `backward()`, as soon as its gradient is complete, and free the gradient.

    Only the gradients of one layer exist at a time. The training loop does not change, and results are bitwise
    identical. Call `optimizer.step()` after each `backward()`: it ends the step, advances schedules, runs the
    optimizer's hooks, and steps parameters whose gradients came in another way.

    It works with one process and with FSDP2: call it after `fully_shard`, with an optimizer over the sharded
    parameters. With FSDP2 each parameter needs its own collectives; an ordinary step needs one or two for all
    parameters. After `backward()` no gradients are left, so `clip_grad_norm_` clips nothing.

    Args:
        model: A model; the optimizer holds all of its trainable parameters.
        optimizer: A Lamb, a Came or a Lars.

    Returns:
        A handle; its `remove()` undoes it, and its context `accumulate()` keeps gradients meanwhile.

    Raises:
        TypeError: An argument is not a Module or an Optimizer.
        ValueError: The optimizer clips or has skip_nonfinite, which need every gradient first. The model is in
            DistributedDataParallel, which averages gradients later. Other hooks need the gradients. The optimizer does
            not hold all trainable parameters, or is of another package.

    Later, these raise a RuntimeError: a second `backward()` before `optimizer.step()`, a step of a GradScaler or
    LossScaler (parameters have already taken a step with scaled gradients), and a `forward()` inside a
    DistributedDataParallel.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources",
    arXiv:2306.09782v2, Algorithm 1, here with an optimizer that has state.

    Example:
        >>> import torch
        >>> from bighorn import Came, release_gradients
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = Came(model.named_parameters(), lr=2e-4)
        >>> release = release_gradients(model, optimizer)
        >>> for _ in range(3):
        ...     model(torch.ones(3, 64)).square().sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> model.weight.grad is None, int(optimizer.state[model.weight]["step"])
        (True, 3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    held = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if not isinstance(optimizer, BighornOptimizer):
        kind = type(optimizer).__name__
        raise ValueError(f"optimizer is {kind}, which has no step_param(param): use Lamb, Came or Lars")
    if (reason := optimizer.whole_step_reason() or _unsupported_reason(model, optimizer, set(held))) is not None:
        raise ValueError(f"gradients cannot be released: {reason}")
    # A weak reference: Python's garbage collector does not see what a parameter's hooks reference (torch 2.13).
    step_param, handle = weakref.WeakMethod(optimizer.step_param), Release()

    def release(param: Tensor) -> None:
        if not handle._accumulates and (step := step_param()) is not None:
            step(param)

    handle._handles = [param.register_post_accumulate_grad_hook(release) for param in held]
    handle._handles.append(model.register_forward_pre_hook(_refuse_ddp))
    return handle


def _unsupported_reason(model: nn.Module, optimizer: Optimizer, held: set[Tensor]) -> str | None:
    """The reason why gradients of this model cannot be released, with the remedy, or None."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return DDP
    if optimizer._optimizer_step_pre_hooks:
        return "optimizer has step pre-hooks (TailOverlap's, or your own), which would find none: leave these out"
    for name, param in model.named_parameters():
        if param.requires_grad and param not in held:
            return f"optimizer does not hold the trainable parameter {name}: add it, or freeze it"
        if getattr(param, "_post_accumulate_grad_hooks", None):
            return f"{name} has a hook for its gradient already (another release_gradients?), which would find none"
    return None


DDP = (
    "DistributedDataParallel averages them after they are there, so that every rank would step with its own: use "
    "fully_shard, which hands over averages, or TailOverlap, which steps while they are in flight"
)


def _refuse_ddp(_: nn.Module, __: Any) -> None:
    """Raise in the forward of a DistributedDataParallel that has wrapped the model later."""
    if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
        raise RuntimeError(f"gradients cannot be released: {DDP}")
