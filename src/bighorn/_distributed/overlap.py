"""TailOverlap: the methods for a training loop, and the hooks that torch calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from bighorn._distributed.grad_scaler import Scaled, unscale
from bighorn._distributed.sharding import described_option
from bighorn._distributed.step_in_parts import BighornOptimizer, step_in_parts, whole_step_reason


@dataclass
class InFlightBucket:
    """A bucket of gradients in flight. The gradients of its parameters are views of its buffer."""

    work: dist.Work | None
    params: list[Tensor]
    buffer: Tensor
    overflow: Tensor | None
    """1.0 if this rank's own values in the buffer are not finite, else 0.0; None without a scaler."""
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.buffer._version

    def wait(self) -> None:
        """Return when the buffer may be read. The host may continue earlier, but the device's stream waits."""
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()}: gradient all-reduce failed; another rank probably exited, see its log "
                f"({error})"
            ) from error
        self.work = None

    def check_untouched(self) -> None:
        """Raise if gradients were changed in flight, since every rank would continue with different ones."""
        replaced = any(p.grad is not None and not within(p.grad, self.buffer) for p in self.params)
        if replaced or self.buffer._version != self.version:
            raise RuntimeError(
                "gradients were changed while they were in flight (by clip_grad_norm_ and the like between backward() "
                "and step(), or by a step that has failed after it unscaled some): call overlap.synchronize() before "
                "that; overlap.zero_grad() forgets these"
            )


def within(grad: Tensor, buffer: Tensor) -> bool:
    """Whether the memory of a gradient is inside a buffer."""
    return not grad.numel() or buffer.data_ptr() <= grad.data_ptr() < buffer.data_ptr() + buffer.nbytes


class TailOverlap:
    """Overlaps an optimizer's step with the all-reduce of gradients that have not arrived yet.

    It helps if the link between ranks is the bottleneck. The results equal `optimizer.step()` after an ordinary
    `backward()`: each rank divides its gradients before they are summed, and every parameter takes one step.

    Call `synchronize()` before any other code uses gradients between `backward()` and the step. `optimizer.step()`
    raises an error without it.

    Args:
        ddp_model: The model, on every rank, made with `gradient_as_bucket_view=True`.
        optimizer: An optimizer of Bighorn or of `torch.optim`, or any with a method `step_in_parts(parts, wait)`. It
            holds every trainable parameter of the model.
        scaler: The scaler of the loss. Call `step()` instead of `scaler.step(optimizer)`. All ranks have the same
            found_inf. It is computed from gradients before they are reduced, and so arrives before the last bucket.
            The mean of finite gradients is finite, since they are divided before they are summed. Default: None.

    Raises:
        TypeError: An argument is not a DistributedDataParallel, an Optimizer or a GradScaler.
        ValueError: A model or an optimizer that is not supported, on this rank or another, or ranks that differ; the
            message gives the reason.

    Source: NPUOptimizer's `is_tailing_optimization`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(3, 1), gradient_as_bucket_view=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> overlap = TailOverlap(model, optimizer)
        >>> for _ in range(3):
        ...     model(torch.ones(4, 3)).mean().backward()
        ...     overlap.step()
        ...     overlap.zero_grad()
        >>> int(optimizer.state[model.module.bias]["step"])
        3
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, ddp_model: DistributedDataParallel, optimizer: Optimizer, *, scaler: GradScaler | None = None
    ) -> None:
        _check_types(ddp_model, optimizer, scaler)
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        reason = _unsupported_reason(ddp_model, optimizer)
        lines = [f"optimizer={type(optimizer).__name__}", f"scaler={scaler and type(scaler).__name__}"]
        if reason is None:
            lines += _described(optimizer, {p for p in ddp_model.parameters() if p.requires_grad})
        _agree(ddp_model.process_group, reason, lines)
        self.optimizer = optimizer
        self._scaled = Scaled(self, scaler) if scaler is not None else None
        # No reference to the model itself, which references its hook where Python's garbage collector does not see it.
        self._group = ddp_model.process_group
        self._world = dist.get_world_size(self._group)
        self._in_flight: list[InFlightBucket] = []
        self._stepping = False
        # This wrapper runs the optimizer's own hooks, once for a whole step.
        self._step_with_hooks = Optimizer.profile_hook_step(self._step_in_parts)
        # This is a lambda, since DistributedDataParallel refuses annotations that are strings.
        ddp_model.register_comm_hook(None, lambda state, bucket: self._launch(bucket))  # noqa: ARG005
        ddp_model.register_forward_pre_hook(self._before_forward)
        optimizer.register_step_pre_hook(self._before_step)

    # ---- methods for a training loop ------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Take the optimizer's step, bucket by bucket, as gradients arrive. Its hooks run once.

        Without gradients in flight, or if a pre-hook of the optimizer may read them, this is `optimizer.step()` (or
        `scaler.step(optimizer)`).

        Args:
            closure: It is not supported, since its `backward()` would send gradients again. Default: None.

        Raises:
            ValueError: A closure is given.
            RuntimeError: Another rank has stopped; gradients were changed in flight; or gradients of the last step
                overflowed in the sum over ranks.
        """
        if closure is not None:
            _refuse_closure()
        for flight in self._in_flight:
            flight.check_untouched()
        hooked = len(self.optimizer._optimizer_step_pre_hooks) > 1 or _global_optimizer_pre_hooks
        # Gradients that are in no bucket are not in the scaler's verdict.
        if hooked or (self._scaled is not None and self._not_in_flight()):
            self.synchronize()
        if self._scaled is not None:
            self._scaled.step_all(bool(self._in_flight))
        elif self._in_flight:
            self._step_in_flight()
        else:
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, including those in flight, even if they were changed.

        Args:
            set_to_none: As in `optimizer.zero_grad`. Default: True.
        """
        self._land()
        self.optimizer.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Wait for all gradients, so that every `.grad` is the average. All code except `step()` needs this.

        With a scaler the gradients are still scaled: call `scaler.unscale_(optimizer)`, if at all, before `step()`.
        """
        for flight in self._in_flight:
            flight.check_untouched()
        self._land()

    def _land(self) -> None:
        for flight in self._in_flight:
            flight.wait()
        self._in_flight.clear()

    # ---- hooks that torch calls -------------------------------------------------------------------------------

    def _launch(self, bucket: Any) -> Future[Tensor]:
        """Communication hook: start to average a bucket, and let `backward()` continue as if it had ended."""
        buffer = bucket.buffer()
        if any(flight.buffer.data_ptr() == buffer.data_ptr() for flight in self._in_flight):
            raise RuntimeError(
                "a second backward() has added to gradients that are in flight: call overlap.synchronize() between "
                "the two, or run the first one under no_sync()"
            )
        overflow = None
        if self._scaled is None:
            buffer.div_(self._world)
        else:
            overflow = torch.zeros((), dtype=torch.float32, device=buffer.device)
            unscale(buffer, overflow, torch.full_like(overflow, 1 / self._world))
            if bucket.is_last():
                self._scaled.verdict = self._scaled.launch_verdict(overflow)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._in_flight.append(InFlightBucket(work, bucket.parameters(), buffer, overflow))
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.device.type != "cpu" else None)
        future.set_result(buffer)
        return future

    def _before_forward(self, model: Module, _: Any) -> None:
        """Forward pre-hook: wait for gradients that were sent and not stepped, since backward will add to them."""
        if cast(DistributedDataParallel, model)._join_config.enable:
            raise RuntimeError("TailOverlap does not work under join(): give every rank the same number of batches")
        self.synchronize()

    def _before_step(self, _: Optimizer, args: Any, kwargs: Any) -> None:
        """Step pre-hook: refuse any `optimizer.step()` that would use gradients in flight."""
        if any(argument is not None for argument in (*args[1:], kwargs.get("closure"))):
            _refuse_closure()
        if self._in_flight and not self._stepping:
            raise RuntimeError(
                "optimizer.step() was called while gradients are in flight: call overlap.step(), or "
                "overlap.synchronize() before anything else that uses gradients; a GradScaler's unscale_() and step() "
                "are such, unless it is passed as TailOverlap's scaler"
            )

    # ---- the step -----------------------------------------------------------------------------------------------

    def _step_in_flight(self) -> None:
        self._stepping = True
        try:
            self._step_with_hooks(self.optimizer)
        finally:
            self._stepping = False
        self._in_flight.clear()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check it

    def _step_in_parts(self, optimizer: Optimizer) -> None:
        sent = [[p for p in flight.params if p.grad is not None] for flight in self._in_flight]
        parts = [self._not_in_flight(), *sent]

        def wait(part: int) -> None:
            if part > 0 and self._in_flight[part - 1].work is not None:
                self._in_flight[part - 1].wait()
                if self._scaled is not None:
                    self._scaled.on_arrival(self._in_flight[part - 1].buffer)

        step_in_parts(optimizer, parts, wait)

    def _not_in_flight(self) -> list[Tensor]:
        """The optimizer's parameters whose gradients are not in flight, since the model does not hold them."""
        in_flight = {p for flight in self._in_flight for p in flight.params}
        params = itertools.chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        return [p for p in params if p.grad is not None and p not in in_flight]


# ---- checks -------------------------------------------------------------------------------------------------


def _refuse_closure() -> None:
    raise ValueError(
        "closure is not supported with TailOverlap, since its backward() would send gradients again: call the closure, "
        "then overlap.step() without it"
    )


def _check_types(model: object, optimizer: object, scaler: object) -> None:
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


def _agree(group: Any, reason: str | None, lines: list[str]) -> None:
    """Raise on every rank if one has a reason, or if lines differ: the others would wait for it, or drift apart."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (reason, lines), group)
    if reason is not None:
        raise ValueError(reason)
    for rank, (other_reason, _) in enumerate(answers):
        if other_reason is not None:
            raise ValueError(f"on rank {rank} of the model's process group: {other_reason}")
    for rank, (_, other_lines) in enumerate(answers):
        for line, other_line in itertools.zip_longest(lines, other_lines, fillvalue="nothing more"):
            if line != other_line:
                raise ValueError(
                    f"ranks differ: {line} here, {other_line} on rank {rank} of the model's process group: make the "
                    "optimizer and its scaler in the same way on every rank"
                )


def _described(optimizer: Optimizer, params: set[Tensor]) -> list[str]:
    """Return lines about the options of the parameters that ranks share, which are the same on every rank."""
    if isinstance(optimizer, BighornOptimizer):
        return optimizer.agreement(params)
    lines = []
    for index, group in enumerate(optimizer.param_groups):
        what, shared = f"param_groups[{index}]", [p for p in group["params"] if p in params]
        lines += [f"{what}: {name}={described_option(group.get(name))}" for name in optimizer.defaults if shared]
        lines += [f"{what}: a parameter of shape {tuple(p.shape)}" for p in shared]
    return lines


def _unsupported_reason(model: DistributedDataParallel, optimizer: Optimizer) -> str | None:
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
