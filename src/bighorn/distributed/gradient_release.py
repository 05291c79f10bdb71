"""Gradient release: every parameter steps inside backward, as soon as its gradient is there, and the gradient goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


@runtime_checkable
class StepsAhead(Protocol):
    """An optimizer that can step a parameter before the gradients of the others are there."""

    def step_param(self, param: Tensor) -> None:
        """Step one parameter and drop its gradient; a later `step()` ends the step."""

    def whole_step_reason(self) -> str | None:
        """Why every gradient must be there first, or None."""


class Release:
    """What `release_gradients` has set up."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = list(handles)

    def remove(self) -> None:
        """Keep gradients again, from the next backward on."""
        for handle in self._handles:
            handle.remove()


def release_gradients(model: nn.Module, optimizer: Optimizer) -> Release:
    """Step each parameter inside `backward()`, as soon as its gradient is there, and free the gradient.

    So there is never more than a layer's gradients, where an ordinary step needs them all. The loop stays as it is, and
    so do its results, bit for bit: `optimizer.step()` after each `backward()` ends the step, which counts it for
    schedules, runs the optimizer's hooks, and steps what has got its gradient in another way.

    It works with one process, and with FSDP2, whose reduced gradients it takes (after `fully_shard`, with an optimizer
    over the sharded parameters). There each parameter costs its own collectives, where an ordinary step needs one or
    two for all of them. Gradients that `backward()` has used are gone: `clip_grad_norm_` finds none.

    Args:
        model: Whose trainable parameters the optimizer holds, all of them.
        optimizer: A Lamb or a Came.

    Returns:
        A handle; its `remove()` undoes it.

    Raises:
        TypeError: Something else than a Module or an Optimizer.
        ValueError: A global clip or skip_nonfinite, which need every gradient first; DistributedDataParallel, which
            averages gradients later; hooks of others that would find no gradients; a trainable parameter that the
            optimizer does not hold; or another optimizer.

    Later, a second `backward()` before `optimizer.step()` raises a RuntimeError (gradients cannot be added up), and so
    does the step of a GradScaler or LossScaler (by then parameters have taken a step with scaled gradients), and a
    `forward()` inside a DistributedDataParallel.

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
        >>> model.weight.grad is None, int(optimizer.state[model.weight]["step"])
        (True, 3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    held = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if not isinstance(optimizer, StepsAhead):
        raise ValueError(f"optimizer is {type(optimizer).__name__}, which has no step_param(param): use Lamb or Came")
    if (reason := optimizer.whole_step_reason() or _why_not(model, optimizer, set(held))) is not None:
        raise ValueError(f"gradients cannot be released: {reason}")
    # Weak: Python's garbage collector does not see what a parameter's hooks hold (torch 2.13).
    step_param = weakref.WeakMethod(optimizer.step_param)

    def release(param: Tensor) -> None:
        if (step := step_param()) is not None:
            step(param)

    hooks = [param.register_post_accumulate_grad_hook(release) for param in held]
    return Release([*hooks, model.register_forward_pre_hook(_refuse_ddp)])


def _why_not(model: nn.Module, optimizer: Optimizer, held: set[Tensor]) -> str | None:
    """Why gradients of this model must stay, and what to do about it, or None."""
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
    """Raise inside the forward of a DistributedDataParallel that was made around the model later."""
    if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
        raise RuntimeError(f"gradients cannot be released: {DDP}")
