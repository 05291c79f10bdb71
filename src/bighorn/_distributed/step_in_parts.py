"""One step of an optimizer, part by part, as gradients arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

Parts = list[list[Tensor]]
Wait = Callable[[int], None]


@runtime_checkable
class StepsInParts(Protocol):
    """An optimizer that can take one step part by part."""

    def step_in_parts(self, parts: Parts, wait: Wait) -> None:
        """Take one step; `wait(i)` returns when the gradients of `parts[i]` may be read, earlier parts first."""


@runtime_checkable
class BighornOptimizer(Protocol):
    """The methods that distributed training and offload call on Bighorn's optimizers alone."""

    def agreement(self, params: set[Tensor]) -> list[str]:
        """Return lines about the options and these parameters, which are the same on ranks that step alike."""

    def on_ranks(self, groups: list[dict[str, Any]], process_group: Any) -> Optimizer:
        """Return a fresh optimizer with the same options for this rank's share of each group."""

    def step_in_parts(
        self, parts: Parts, wait: Wait, stepped: Wait | None, square_sum: Callable[[], Tensor] | None
    ) -> None:
        """Take one step, part by part."""

    def step_param(self, param: Tensor, group: dict[str, Any] | None = None) -> None:
        """Step one parameter and drop its gradient; a later `step()` ends the step."""

    def whole_step_reason(self) -> str | None:
        """The reason why every gradient is needed first, or None."""


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


def step_in_parts(
    optimizer: Optimizer, parts: Parts, wait: Wait, stepped: Callable[[int], None] = lambda _: None
) -> None:
    """Take one step of an optimizer whose parameters are independent, with the gradients of one part at a time.

    `stepped(i)` is called as soon as `parts[i]` has taken the step.
    """
    if isinstance(optimizer, StepsInParts):
        optimizer.step_in_parts(parts, wait)
        for i in range(len(parts)):
            stepped(i)
        return
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's wrapper, whose hooks have run already
        step = step.__wrapped__  # type: ignore[attr-defined]
    grads = {p: p.grad for part in parts for p in part}
    try:
        for p in grads:
            p.grad = None
        for i, part in enumerate(parts):
            wait(i)
            for p in part:
                p.grad = grads[p]
            if part:
                step(optimizer)
            stepped(i)
            for p in part:
                p.grad = None
    finally:
        for p, grad in grads.items():
            p.grad = grad
