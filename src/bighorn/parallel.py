"""Data-parallel training whose optimizer starts before the last gradients have come over the wire.

DistributedDataParallel sends gradients in buckets, but its `backward()` returns only when the last one has arrived, and
then the optimizer starts. Here `backward()` returns at once, and the step takes the buckets as they arrive. The idea is
the tailing optimisation of Ascend's NPUOptimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.optimizer import _global_optimizer_pre_hooks

Parts = list[list[Tensor]]
Wait = Callable[[int], None]


@runtime_checkable
class StepsInParts(Protocol):
    """An optimizer that can take one step part by part."""

    def step_in_parts(self, parts: Parts, wait: Wait) -> None:
        """Take one step; `wait(i)` returns when the gradients of `parts[i]` may be read, the earlier ones first."""


@dataclass
class Flight:
    """A bucket on the wire. Gradients of its parameters are views of its buffer."""

    work: dist.Work | None
    params: list[Tensor]
    buffer: Tensor
    overflow: Tensor | None
    """Whether this rank's own part of the buffer is not finite: 1.0 or 0.0; None where no scaler asks."""
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.buffer._version

    def wait(self) -> None:
        """Return when the buffer may be read: the host may go on earlier, the device's stream not."""
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} waited in vain for the gradients of the other ranks; most likely one of them "
                f"has stopped, and its own output says why ({error})"
            ) from error
        self.work = None

    def check_untouched(self) -> None:
        """Refuse gradients that were changed on the wire: every rank would go on with others."""
        replaced = any(p.grad is not None and not _within(p.grad, self.buffer) for p in self.params)
        if replaced or self.buffer._version != self.version:
            raise RuntimeError(
                "gradients were changed while they were on the wire (clip_grad_norm_ and the like between backward() "
                "and step()): call overlap.synchronize() before that"
            )


class TailOverlap:
    """Overlaps an optimizer's step with the all-reduce of the gradients that it does not need yet.

    It pays where the link between ranks is the slow part. Results are those of `optimizer.step()` after an ordinary
    `backward()`: gradients are averaged by dividing before the sum, and every parameter is stepped once.

    Whatever else looks at gradients between `backward()` and the step needs a `synchronize()` before it, and so does
    `optimizer.step()` itself, which raises otherwise.

    Args:
        ddp_model: The model, on every rank, made with `gradient_as_bucket_view=True`.
        optimizer: One of Bighorn's or of `torch.optim`'s, or any with a method `step_in_parts(parts, wait)`. It holds
            every trainable parameter of the model.
        scaler: Scales the loss; then `step()` stands for `scaler.step(optimizer)`. The verdict is one for all ranks. It
            is taken from gradients before they are reduced, so that it arrives before the last bucket does: the mean of
            finite gradients is finite, since they are divided before they are summed. Default: None.

    Raises:
        TypeError: Something else than a DistributedDataParallel, an Optimizer or a GradScaler.
        ValueError: A model or an optimizer with which it cannot work, on this rank or another, or ranks that differ;
            the message says why.

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
        _agree(ddp_model.process_group, _why_not(ddp_model, optimizer), (type(optimizer).__name__, scaler is not None))
        self.optimizer = optimizer
        self._scaled = _Scaled(self, scaler) if scaler is not None else None
        # Not the model itself: it holds its hook where Python's garbage collector does not see it.
        self._group = ddp_model.process_group
        self._world = dist.get_world_size(self._group)
        self._flights: list[Flight] = []
        self._stepping = False
        # With this the optimizer's own hooks run, once for a whole step.
        self._step_with_hooks = Optimizer.profile_hook_step(self._step_in_parts)
        # A lambda, since DistributedDataParallel refuses annotations that are strings.
        ddp_model.register_comm_hook(None, lambda state, bucket: self._launch(bucket))  # noqa: ARG005
        ddp_model.register_forward_pre_hook(self._before_forward)
        optimizer.register_step_pre_hook(self._before_step)

    # ---- what a training loop calls -------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Take the optimizer's step, bucket by bucket, as gradients arrive. Its hooks run once.

        Without gradients on the wire, and where a pre-hook of the optimizer's may look at them, it is
        `optimizer.step()` (or `scaler.step(optimizer)`).

        Args:
            closure: Not supported, since its `backward()` would send gradients again. Default: None.

        Raises:
            ValueError: A closure.
            RuntimeError: Another rank has stopped; gradients were changed on the wire; or those of the last step had
                overflowed as they were summed.
        """
        if closure is not None:
            _refuse_closure()
        for flight in self._flights:
            flight.check_untouched()
        if len(self.optimizer._optimizer_step_pre_hooks) > 1 or _global_optimizer_pre_hooks:
            self.synchronize()
        if self._scaled is not None:
            self._scaled.step_all(bool(self._flights))
        elif self._flights:
            self._step_flights()
        else:
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those on the wire too.

        Args:
            set_to_none: As of `optimizer.zero_grad`. Default: True.
        """
        self.synchronize()
        self.optimizer.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Wait for all gradients, so that every `.grad` is the average; needed before anything but `step()` uses them.

        A scaler's gradients are then for the scaler: `scaler.unscale_(optimizer)`, if at all, before `step()`.
        """
        for flight in self._flights:
            flight.check_untouched()
            flight.wait()
        self._flights.clear()

    # ---- where torch calls ------------------------------------------------------------------------------------

    def _launch(self, bucket: Any) -> Future[Tensor]:
        """The communication hook: start to average a bucket, and let `backward()` go on as if it were done."""
        buffer = bucket.buffer()
        if any(flight.buffer.data_ptr() == buffer.data_ptr() for flight in self._flights):
            raise RuntimeError(
                "a second backward() has added to gradients that are on the wire: call overlap.synchronize() between "
                "the two, or run the first one under no_sync()"
            )
        overflow = None
        if self._scaled is None:
            buffer.div_(self._world)
        else:
            overflow = torch.zeros((), device=buffer.device)
            _unscale(buffer, overflow, torch.full((), 1 / self._world, device=buffer.device))
            if bucket.is_last():
                self._scaled.launch_verdict([*[f.overflow for f in self._flights if f.overflow is not None], overflow])
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._flights.append(Flight(work, bucket.parameters(), buffer, overflow))
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.device.type != "cpu" else None)
        future.set_result(buffer)
        return future

    def _before_forward(self, model: Module, _: Any) -> None:
        """Gradients that were sent but not stepped will be added to: they must have arrived."""
        if cast(DistributedDataParallel, model)._join_config.enable:
            raise RuntimeError("TailOverlap does not work under join(): give every rank the same number of batches")
        self.synchronize()

    def _before_step(self, _: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse an `optimizer.step()`, whoever calls it, that would use gradients on the wire."""
        if any(argument is not None for argument in (*args[1:], kwargs.get("closure"))):
            _refuse_closure()
        if self._flights and not self._stepping:
            raise RuntimeError(
                "optimizer.step() was called while gradients are on the wire: call overlap.step(), or "
                "overlap.synchronize() before anything else that uses gradients; a GradScaler's unscale_() and step() "
                "are such, unless it is passed as TailOverlap's scaler"
            )

    # ---- the step -----------------------------------------------------------------------------------------------

    def _step_flights(self) -> None:
        self._stepping = True
        try:
            self._step_with_hooks(self.optimizer)
        finally:
            self._stepping = False
        self._flights.clear()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for

    def _step_in_parts(self, optimizer: Optimizer) -> None:
        sent = [[p for p in flight.params if p.grad is not None] for flight in self._flights]
        on_wire = {p for part in sent for p in part}
        here = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p not in on_wire
        ]

        def wait(part: int) -> None:
            if part > 0 and self._flights[part - 1].work is not None:
                self._flights[part - 1].wait()
                if self._scaled is not None:
                    self._scaled.on_arrival(self._flights[part - 1].buffer)

        if isinstance(optimizer, StepsInParts):
            optimizer.step_in_parts([here, *sent], wait)
        else:
            _step_in_parts(optimizer, [here, *sent], wait)


class _Scaled:
    """What a GradScaler steps in the optimizer's place: it is shown the verdict of all ranks, not their gradients."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor
    """Set by the GradScaler during its step, as is `found_inf`."""
    found_inf: Tensor

    def __init__(self, overlap: TailOverlap, scaler: GradScaler) -> None:
        self.overlap = overlap
        self.scaler = scaler
        self.param_groups: list[dict[str, Any]] = []
        self.verdict: tuple[dist.Work, Tensor] | None = None
        self.inv_scale: Tensor | None = None
        self.late: Tensor | None = None
        self.latch: _Latch | None = None

    def launch_verdict(self, overflows: list[Tensor]) -> None:
        """Ask all ranks whether any gradient of any of them is not finite."""
        verdict = torch.stack([overflow.to(overflows[-1].device) for overflow in overflows]).amax()
        work = dist.all_reduce(verdict, dist.ReduceOp.MAX, self.overlap._group, async_op=True)
        self.verdict = work, verdict

    def step_all(self, on_wire: bool) -> None:
        """Step as `scaler.step(optimizer)` does."""
        if self.latch is not None and self.latch.is_set():
            self.overlap.synchronize()  # a process that ends with gradients on the wire may be aborted by gloo
            raise RuntimeError(
                "gradients that were finite on every rank overflowed as they were summed, at the top of their dtype, "
                "and the last step has used them: go back to a checkpoint, and set a lower scale"
            )
        if not on_wire or self.verdict is None:
            self.scaler.step(self.overlap.optimizer)
            return
        if self.scaler._per_optimizer_states.get(id(self.overlap.optimizer), {}).get("found_inf_per_device"):
            raise RuntimeError(
                "scaler.unscale_(optimizer) was called while gradients were on the wire: call overlap.synchronize() "
                "before it"
            )
        work, verdict = self.verdict
        work.wait()
        shown = torch.zeros_like(verdict)
        shown.grad = torch.where(verdict > 0, torch.inf, 0.0)
        self.param_groups = [{"params": [shown], "param_names": ["a gradient on one of the ranks"]}]
        self.scaler.step(cast(Optimizer, self))

    def step(self) -> None:
        """Called by the scaler."""
        optimizer = self.overlap.optimizer
        fused = any(getattr(optimizer, name, False) for name in ("_step_supports_amp_scaling", "takes_grad_scale"))
        # As in GradScaler, only an optimizer that cannot skip by itself makes the host wait.
        if not fused and self.found_inf.item():
            self.overlap.synchronize()
            return
        device = self.found_inf.device
        self.late = torch.zeros((), device=device)
        self.inv_scale = torch.ones((), device=device) if fused else self.grad_scale.double().reciprocal().float()
        if fused:
            vars(optimizer).update(grad_scale=self.grad_scale, found_inf=self.found_inf)
        try:
            self.overlap._step_flights()
        finally:
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)
        self.latch = _Latch(self.late * (self.found_inf == 0))

    def on_arrival(self, buffer: Tensor) -> None:
        """Unscale what has come, unless the optimizer does, and note where it is not finite."""
        assert self.late is not None
        assert self.inv_scale is not None
        late = self.late.to(buffer.device)
        _unscale(buffer, late, self.inv_scale.to(buffer.device))
        self.late = torch.maximum(self.late, late.to(self.late.device))


class _Latch:
    """A device's flag that the host reads at the next step, when it has long been computed."""

    def __init__(self, flag: Tensor) -> None:
        self.flag = flag.to("cpu", non_blocking=True)
        self.event: torch.Event | None = None
        if flag.device.type != "cpu":
            self.event = torch.Event(flag.device)
            self.event.record()

    def is_set(self) -> bool:
        """Waits for the last step's end, not for this one's: a query could tell ranks apart."""
        if self.event is not None:
            self.event.synchronize()
        return bool(self.flag)


def _step_in_parts(optimizer: Optimizer, parts: Parts, wait: Wait) -> None:
    """One step of an optimizer whose parameters do not know of each other: it sees one part's gradients at a time."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # by Optimizer, for the hooks that have run already
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
            for p in part:
                p.grad = None
    finally:
        for p, grad in grads.items():
            p.grad = grad


def _unscale(buffer: Tensor, overflow: Tensor, inv_scale: Tensor) -> None:
    """Multiply, and set `overflow` where a value is not finite: both in one pass, GradScaler's own."""
    torch._amp_foreach_non_finite_check_and_unscale_([buffer], overflow, inv_scale)


def _within(grad: Tensor, buffer: Tensor) -> bool:
    return not grad.numel() or buffer.data_ptr() <= grad.data_ptr() < buffer.data_ptr() + buffer.nbytes


# ---- what is refused ------------------------------------------------------------------------------------------------


def _refuse_closure() -> None:
    raise ValueError(
        "closure is not supported with TailOverlap, since its backward() would send gradients again: call the closure, "
        "then overlap.step() without it"
    )


def _check_types(model: object, optimizer: object, scaler: object) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"ddp_model must be a torch.nn.parallel.DistributedDataParallel, not {type(model).__name__}: wrap the "
            "model in one, with gradient_as_bucket_view=True, and pass that itself, not what torch.compile makes of it"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def _agree(group: Any, reason: str | None, setup: tuple[object, ...]) -> None:
    """Refuse on every rank what one rank refuses: the others would wait for it."""
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


def _why_not(model: DistributedDataParallel, optimizer: Optimizer) -> str | None:
    """Why the two cannot be overlapped, and what to do about it, or None."""
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
    if (reason := _why_whole(optimizer)) is not None:
        return f"optimizer is {type(optimizer).__name__}, which cannot step part of its parameters: {reason}"
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name, param in model.module.named_parameters():
        if param.requires_grad and name not in model.parameters_to_ignore and param not in held:
            return (
                f"optimizer does not hold the trainable parameter {name}, so something else would use its gradient "
                "while it is on the wire: add it to the optimizer, or freeze it before the model is wrapped"
            )
    return None


def _why_whole(optimizer: Optimizer) -> str | None:
    """Why an optimizer must see all gradients at once, or None."""
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
