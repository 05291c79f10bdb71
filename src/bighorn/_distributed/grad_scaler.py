"""A GradScaler for gradients that are still in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from bighorn._capabilities import wide
from bighorn._deferred import DeferredScalar

if TYPE_CHECKING:
    from bighorn._distributed.overlap import TailOverlap


class StandIn:
    """A stand-in that a GradScaler steps: its only gradient is not finite if any gradient in flight is not.

    Args:
        scaler: The scaler.
        name: The name of the gradient in the scaler's messages.
        take: A function that takes the step, with the scaler's `grad_scale` and `found_inf`.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor
    """The GradScaler sets `grad_scale` and `found_inf` during its step."""
    found_inf: Tensor

    def __init__(self, scaler: GradScaler, name: str, take: Callable[[Tensor, Tensor], None]) -> None:
        self._scaler, self._name, self._take = scaler, name, take
        self.param_groups: list[dict[str, Any]] = []

    def step_all(self, overflows: Tensor) -> None:
        """Step as `scaler.step(optimizer)` does, given a number that is above 0 if a gradient is not finite."""
        shown = torch.zeros((), dtype=torch.float32, device=overflows.device)
        shown.grad = torch.where(overflows > 0, torch.inf, shown)
        self.param_groups = [{"params": [shown], "param_names": [self._name]}]
        # GradScaler keeps these if a step raises, and multiplies the next scale by the old one.
        vars(self).pop("grad_scale", None)
        vars(self).pop("found_inf", None)
        self._scaler.step(cast(Optimizer, self))

    def step(self) -> None:
        """Take the step; the scaler calls this method."""
        self._take(self.grad_scale, self.found_inf)


class Scaled:
    """The scaler of a TailOverlap, which has the found_inf of all ranks while gradients are in flight."""

    inv_scale: Tensor
    late: Tensor
    """Whether the present step uses sums that have overflowed."""

    def __init__(self, overlap: TailOverlap, scaler: GradScaler) -> None:
        self.overlap = overlap
        self.scaler = scaler
        self.stand_in = StandIn(scaler, "a gradient on one of the ranks", self._take_step)
        self.verdict: tuple[dist.Work, Tensor] | None = None
        self.late_before: DeferredScalar | None = None
        """Whether the last step used sums that had overflowed."""

    def launch_verdict(self, *last: Tensor) -> tuple[dist.Work, Tensor]:
        """Start the all-reduce that computes whether any gradient in flight, or `last`, is not finite on any rank."""
        overflows = [flight.overflow for flight in self.overlap._in_flight if flight.overflow is not None]
        overflows += last
        verdict = torch.stack([overflow.to(overflows[-1].device) for overflow in overflows]).amax(dim=0)
        work = dist.all_reduce(verdict, dist.ReduceOp.MAX, self.overlap._group, async_op=True)
        return work, verdict

    def step_all(self, in_flight: bool) -> None:
        """Step as `scaler.step(optimizer)` does."""
        late, self.late_before = self.late_before, None
        if late is not None and late.read():
            self.overlap.synchronize()  # gloo may abort a process that ends with gradients in flight
            raise RuntimeError(
                "gradients that were finite on every rank overflowed as they were summed, at the top of their dtype, "
                "and the last step has used them: go back to a checkpoint, and set a lower scale"
            )
        if not in_flight:
            self.scaler.step(self.overlap.optimizer)
            return
        if self.scaler._per_optimizer_states.get(id(self.overlap.optimizer), {}).get("found_inf_per_device"):
            raise RuntimeError(
                "scaler.unscale_(optimizer) was called while gradients were in flight: call overlap.synchronize() "
                "before it"
            )
        # DistributedDataParallel names no last bucket in the first step of a static graph.
        self.verdict = self.verdict or self.launch_verdict()
        work, verdict = self.verdict
        work.wait()
        self.stand_in.step_all(verdict)

    def _take_step(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Step with gradients in flight."""
        optimizer = self.overlap.optimizer
        fused = any(getattr(optimizer, name, False) for name in ("_step_supports_amp_scaling", "takes_grad_scale"))
        # As in GradScaler, the host waits only for an optimizer that cannot skip a step itself.
        if not fused and found_inf.item():
            self.overlap.synchronize()
            return
        self.late = torch.zeros_like(found_inf)
        self.inv_scale = torch.ones_like(found_inf) if fused else inverse(grad_scale)
        if fused:
            vars(optimizer).update(grad_scale=grad_scale, found_inf=found_inf)
        try:
            self.overlap._step_in_flight()
        finally:
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)
        self.late_before = DeferredScalar(self.late * (found_inf == 0))

    def on_arrival(self, buffer: Tensor) -> None:
        """Unscale gradients that have arrived, unless the optimizer does so, and record whether they are not finite."""
        late = self.late.to(buffer.device)
        unscale(buffer, late, self.inv_scale.to(buffer.device))
        # torch's function does not (2.13). If the step fails, these gradients must not be unscaled again.
        torch.autograd.graph.increment_version(buffer)
        self.late = torch.maximum(self.late, late.to(self.late.device))


def unscale(buffer: Tensor, overflow: Tensor, inv_scale: Tensor) -> None:
    """Multiply in place, and set `overflow` if a value is not finite, in one pass with GradScaler's own function."""
    torch._amp_foreach_non_finite_check_and_unscale_([buffer], overflow, inv_scale)


def inverse(scale: Tensor) -> Tensor:
    """Return the factor with which a GradScaler unscales gradients."""
    return scale.to(wide(scale.device)).reciprocal().float()
