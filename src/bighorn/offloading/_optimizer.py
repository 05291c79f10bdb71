"""OffloadedOptimizer: the methods for a training loop, and the hooks that torch calls."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.optim import Optimizer

from bighorn._distributed import sharding
from bighorn._distributed.grad_scaler import StandIn
from bighorn._distributed.step_in_parts import BighornOptimizer
from bighorn.offloading._copies import Copies
from bighorn.offloading._params import (
    OffloadedParam,
    SharedOptions,
    load_with_masters,
    offloaded_params,
    with_masters,
)
from bighorn.offloading._step import NUMBER_BYTES, OffloadedStep, StepSetup
from bighorn.offloading._worker import Worker

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OffloadedOptimizer(Optimizer):
    """The optimizer that `offload` returns. Its groups and its `state` have the model's parameters as keys.

    Any attribute that it does not have, such as `telemetry`, is taken from the optimizer that was passed.

    Attributes:
        optimizer: The optimizer that was passed, which steps the host's parameters.
    """

    # With this attribute, a scaler calls step(), whose error gives the remedy.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        copies: Copies,
        *,
        masters: bool,
        max_grad_norm: float | None,
        scaler: GradScaler | None,
        bucket_bytes: int,
    ) -> None:
        self.optimizer, self._copies = optimizer, copies
        self._worker = Worker(optimizer.param_groups[0]["params"][0].device)
        # The stepping thread takes the memory from its NUMA node.
        self._groups = self._worker.run(lambda: offloaded_params(model, optimizer, copies, masters=masters))
        self._params = {id(param.device): param for group in self._groups for param in group}
        params = list(self._params.values())
        self._sharded = any(sharding.is_sharded(param.device) for param in params)
        clips_itself = isinstance(optimizer, BighornOptimizer) and optimizer.whole_step_reason() is not None
        self._setup = StepSetup(
            optimizer,
            params,
            copies,
            bucket_bytes,
            clips_itself and not self._sharded,
            max_grad_norm,
            scaler,
            copies.pinned(NUMBER_BYTES),
        )
        self._current = OffloadedStep(self._setup)
        self._scaled = None if scaler is None else StandIn(scaler, "an offloaded gradient", self._take_step)
        self._accumulates = self._complete = False
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._complete = True
        self._adopt(optimizer)
        self._options = SharedOptions(self.param_groups, optimizer)
        self.read_weights()
        self._register()

    def _adopt(self, optimizer: Optimizer) -> None:
        """Give an optimizer the host's parameters, with the state of the model's, and take its step hooks."""
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            for param in params:
                if state := optimizer.state.pop(param.device, None):
                    optimizer.state[param.host] = param.on_host(state)
            group["params"] = [param.host for param in params]
        for name in STEP_HOOKS:
            setattr(self, name, getattr(optimizer, name))
            setattr(optimizer, name, OrderedDict())
        optimizer.register_step_pre_hook(_refuse_inner_step)

    def _register(self) -> None:
        # A weak reference: Python's garbage collector does not see what a parameter's hooks reference (torch 2.13).
        reference = weakref.ref(self)

        def on_grad(tensor: Tensor) -> None:
            if (optimizer := reference()) is not None:
                optimizer._on_grad(tensor)

        trained = [param.device for param in self._params.values() if param.device.requires_grad]
        handles = [tensor.register_post_accumulate_grad_hook(on_grad) for tensor in trained]  # type: ignore[no-untyped-call]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    # ---- what an optimizer has --------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter of the model, in the host's memory."""
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        if "_current" in self.__dict__:
            self._end_last_step()
            held = self.optimizer.state
            state.update({param.device: held[param.host] for param in self._params.values() if param.host in held})
        return state

    @state.setter
    def state(self, _: object) -> None:
        """Ignore what torch's constructor sets."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer that was passed."""
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._end_last_step()
        return getattr(self.optimizer, name)

    def __getstate__(self) -> NoReturn:
        """Refuse copies, which would share the model's hooks."""
        raise TypeError("an offloaded optimizer can be neither pickled nor copied: save state_dict() instead")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that come later, since all memory was taken at once.

        Args:
            param_group: The group.

        Raises:
            RuntimeError: The optimizer is complete.
        """
        if self._complete:
            raise RuntimeError(
                "no parameters can join an offloaded optimizer, whose memory was taken at once: add the group to the "
                "optimizer before offload()"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that `backward()` has sent.

        If Ctrl-C (KeyboardInterrupt) leaves this method, the step was either not taken, and the gradients are kept, or
        it was taken for all parameters, and the next call of any method raises a RuntimeWarning about it. Call `step()`
        again to have it taken in any case, and never twice; call `zero_grad()` to forget gradients that are kept.

        Args:
            closure: A function that computes the loss and its gradients, and returns the loss. Default: None.

        Returns:
            The value that the closure returned.

        Raises:
            RuntimeError: A backward pass or a step has failed, a scaler has called this, the model has changed, or this
                is a fork of the process that trains.
            Exception: The errors of the optimizer's own step; everything is as before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if [self.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")] != [None, None]:
            raise RuntimeError(
                "a scaler finds no gradients here, since they are in the host's memory: pass it to offload(..., "
                "scaler=scaler), and call optimizer.step() in place of scaler.step(optimizer)"
            )
        self._worker.check_process()
        was_taken = self._end_last_step()
        present = [param for param in self._params.values() if param.device.grad is not None]
        if was_taken and not present:
            return loss
        self._collect(present)
        self._options.exchange()
        if self._scaled is None:
            self._take_step(None, None)
        else:
            self._scaled.step_all(self._overflows())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, including those that have left the device without being used.

        Args:
            set_to_none: As in torch. Default: True.

        Raises:
            RuntimeError: A step that Ctrl-C has left has failed.
        """
        if not self._current.returned:  # the gradients of a step that has returned are used, and then freed
            if self._current.failure is None:
                self._end_last_step()
            self._forget()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer as if nothing were offloaded."""
        self._end_last_step()
        self._options.exchange()
        return with_masters(self.optimizer, self._setup.params)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, of an offloaded optimizer or not.

        Gradients are kept, unless a backward pass or a step has failed, which this ends.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            ValueError: As for the optimizer that was passed, which is unchanged then.
        """
        if self._current.failure is None:
            self._end_last_step()
        load_with_masters(self.optimizer, state_dict, self._setup.params)
        if self._current.failure is not None or self._current.in_pass:
            self._forget()
        self._options.read()

    # ---- methods of its own -----------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Add up the gradients of each `backward()` inside; the first one outside completes the sum."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def synchronize(self) -> None:
        """End a step that Ctrl-C has left, so that any code may read the weights.

        Raises:
            RuntimeError: The last step has failed.
        """
        self._end_last_step()

    def read_weights(self) -> None:
        """Copy the weights from the device to the host.

        A step notices by itself that a program has written weights in place, or has assigned to `param.data`. It does
        not notice a write into `param.data`, as by many averages of weights (`param.data.copy_(average)`), or through a
        pointer, as by NumPy and kernels: torch does not count such writes.
        """
        self._end_last_step()
        for param in self._setup.params:
            param.equal_at = ()
        self._read_written(self._setup.params)

    def explain(self) -> str:
        """Return the inner `explain()`, the counts of tensors and threads, and the host's bytes."""
        inner = getattr(self.optimizer, "explain", None)
        params, worker = self._setup.params, self._worker
        cpus = f", on the {len(worker.cpus)} CPUs near the device" if worker.cpus else ""
        lines = [inner()] if inner is not None else []
        lines.append(
            f"offloaded: {len(params)} tensors of the device, stepped by {worker.threads} threads of the host "
            f"({worker.reason}{cpus})"
        )
        weights, grads = sum(p.weights.nbytes for p in params), sum(p.grad.nbytes for p in params)
        lines.append(f"host memory besides state: {weights:,} bytes of weights, {grads:,} of gradients")
        lines.append("gradients are copied during backward(), new weights during step()")
        return "\n".join(lines)

    # ---- hooks that torch calls -------------------------------------------------------------------------------------

    def _on_grad(self, tensor: Tensor) -> None:
        """Post-accumulate hook: send a gradient to the host."""
        if self._accumulates:
            return
        try:
            if not self._current.in_pass:
                self._end_last_step()
                self._current.in_pass = True
                reference = weakref.ref(self)
                Variable._execution_engine.queue_callback(lambda: _end_backward(reference))
            self._send_grad(self._params[id(tensor)])
        except BaseException:
            tensor.grad = None  # or the next backward would add to it
            raise

    def _end_backward(self) -> None:
        """Send the last bucket; autograd does not call this if the backward pass ends with an error."""
        self._current.close()
        self._current.in_pass = False

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _send_grad(self, param: OffloadedParam) -> None:
        """Send this rank's shard of a gradient to the host, and take it from the parameter."""
        if param in self._current.having_grad:
            raise RuntimeError(
                f"{param.label} has a second gradient, and the first has left the device: run all but the last "
                "backward() before a step inside optimizer.accumulate(); to forget the first, as after a backward() "
                "that has failed, call optimizer.zero_grad()"
            )
        grad = param.checked_grad()
        param.device.grad = None
        self._current.add(param, grad)

    def _collect(self, present: list[OffloadedParam]) -> None:
        """Send gradients that no backward pass has sent, and raise if a pass has failed."""
        step = self._current
        if step.in_pass:
            raise RuntimeError(
                "the last backward() has not ended, and no parameter has taken the step: optimizer.zero_grad() forgets "
                "its gradients"
            )
        for param in present:
            param.checked_grad()
        step.in_pass = True
        for param in present:
            self._send_grad(param)
        step.close()
        step.in_pass = False

    def _overflows(self) -> Tensor:
        """Return how many gradients are not finite, also on the ranks that hold other shards."""
        count = self._current.overflows()
        if self._sharded:
            torch.distributed.all_reduce(count)
        return count

    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Let the stepping thread take the step, and wait for its end."""
        step = self._current
        step.send_numbers(grad_scale, found_inf)
        self._read_written([param for param in self._setup.params if param in step.having_grad])
        step.submitted, step.ran = True, False
        self._worker.run(step.run)
        self._end(step)
        step.returned = True

    def _end(self, step: OffloadedStep) -> None:
        """End a step that the stepping thread has taken, and raise its error."""
        step.end()
        if step.error is None:
            self._options.exchange()
            return
        if not step.has_written:
            step.submitted = False  # everything is as before
            raise step.error
        step.failure = step.describe_failure()
        raise RuntimeError(step.failure) from step.error

    def _end_last_step(self) -> bool:
        """End the last step; return whether Ctrl-C had left it, and it was taken nevertheless."""
        step = self._current
        if step.failure is not None:
            raise RuntimeError(step.failure) from step.error
        if not step.submitted:
            return False
        if not step.returned:
            self._worker.check_process()
            self._worker.run(int)  # it may still be running
            if not step.ran:
                step.submitted = False
                return False
            self._end(step)
        self._current = OffloadedStep(self._setup)
        if step.returned:
            return False
        warnings.warn(
            "an interrupt has left optimizer.step(), but all parameters have taken that step, and its gradients are "
            "used up",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    def _forget(self) -> None:
        """Forget all gradients, whether their copies have succeeded or not."""
        self._current.forget()
        self._current = OffloadedStep(self._setup)

    @torch.no_grad()
    def _read_written(self, params: list[OffloadedParam]) -> None:
        """Copy weights to the host that a program has written on the device."""
        written = [param for param in params if param.written]
        if written:
            self._copies.to_host([(param.weights, param.shard) for param in written]).synchronize()
            for param in written:
                param.take_weights()
                param.note_equal()


def _end_backward(reference: weakref.ref[OffloadedOptimizer]) -> None:
    if (optimizer := reference()) is not None:
        optimizer._end_backward()


def _refuse_inner_step(*_: object) -> NoReturn:
    raise RuntimeError(
        "this optimizer was offloaded, and has no gradients of its own: call step() of what offload() returned"
    )
