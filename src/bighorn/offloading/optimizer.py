"""OffloadedOptimizer: the methods for a training loop, and the hooks that torch calls."""

from __future__ import annotations

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

from bighorn.distributed import sharding
from bighorn.offloading import refusals
from bighorn.offloading.copies import Copies
from bighorn.offloading.forward import before_use
from bighorn.offloading.groups import SharedOptions
from bighorn.offloading.host_step import BrokenStep, HostStep
from bighorn.offloading.masters import load_with_masters, with_masters
from bighorn.offloading.params import offloaded_params
from bighorn.offloading.scaled import Scaled
from bighorn.offloading.transfers import Bucket, GradientBuckets, HostSums
from bighorn.offloading.worker import Job, Worker

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
BESIDE = {
    "copies": "gradients travel during backward(), new weights during step()",
    "backward": "gradients travel and are stepped during backward(), and new weights travel back",
    "forward": "gradients travel during backward(); they are stepped, and new weights travel, during the next forward",
}


class OffloadedOptimizer(Optimizer):
    """The optimizer that `offload` returns. Its groups and its `state` have the model's parameters as keys.

    Any attribute that it does not have, such as `telemetry`, is that of the optimizer that was passed.

    Attributes:
        optimizer: The optimizer that was passed, which steps the host's parameters.
        overlap: What runs beside other work of the device.
    """

    # A scaler that is to step this optimizer comes as far as step(), which gives the remedy.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        copies: Copies,
        *,
        overlap: str,
        accumulate: str,
        masters: bool,
        max_grad_norm: float | None,
        scaler: GradScaler | None,
        bucket_bytes: int,
    ) -> None:
        self.optimizer, self.overlap, self._accumulate = optimizer, overlap, accumulate
        self._worker = Worker(optimizer.param_groups[0]["params"][0].device)
        # The stepping thread takes the memory from its NUMA node.
        self._groups = self._worker.submit(
            lambda: offloaded_params(model, optimizer, copies, sums=accumulate == "host", masters=masters)
        ).result()
        self._params = {id(param.device): param for group in self._groups for param in group}
        self._host_step = HostStep(optimizer, copies, max_grad_norm)
        self._sharded = any(sharding.is_sharded(param.device) for param in self._params.values())
        if accumulate == "host":
            largest = max(param.grad.numel() * param.grad_dtype.itemsize for param in self._params.values())
            self._grads: GradientBuckets = HostSums(copies, bucket_bytes, largest, self._worker)
        else:
            needed = self._host_step.own_clip and not self._sharded
            self._grads = GradientBuckets(
                copies, bucket_bytes, needed or max_grad_norm is not None or scaler is not None
            )
        self._scaled = None if scaler is None else Scaled(scaler, self._take_step)
        self._partial = self._in_backward = False
        self._running: tuple[Job[None], list[Bucket]] | None = None
        """The step that the stepping thread takes."""
        self._on_the_way: dict[int, Bucket] = {}
        """The bucket of each parameter whose new weights the forward pass has to wait for."""
        self._broken: BrokenStep | None = None
        self._copies = copies
        self._complete = False
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._complete = True
        self._take_over(optimizer)
        self._options = SharedOptions(self.param_groups, optimizer)
        self.read_weights()
        self._register(model)

    def _take_over(self, optimizer: Optimizer) -> None:
        """Give an optimizer the host's parameters, with the state of the model's, and take its step hooks."""
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            for param in params:
                if state := optimizer.state.pop(param.device, None):
                    optimizer.state[param.host] = param.on_host(state)
            group["params"] = [param.host for param in params]
        for name in STEP_HOOKS:
            setattr(self, name, getattr(optimizer, name))
            setattr(optimizer, name, OrderedDict())
        optimizer.register_step_pre_hook(lambda *_: refusals.refuse_inner_step())

    def _register(self, model: nn.Module) -> None:
        # A weak reference: Python's garbage collector does not see what a parameter's hooks reference (torch 2.13).
        mine = weakref.ref(self)

        def on_grad(tensor: Tensor) -> None:
            if (optimizer := mine()) is not None:
                optimizer._on_grad(tensor)

        def before(params: list[Tensor]) -> None:
            if (optimizer := mine()) is not None:
                optimizer._wait_for(params)

        trained = [param.device for param in self._params.values() if param.device.requires_grad]
        handles = [tensor.register_post_accumulate_grad_hook(on_grad) for tensor in trained]  # type: ignore[no-untyped-call]
        undo = [handle.remove for handle in handles]
        if self.overlap == "forward":
            undo += before_use(model, before)
        weakref.finalize(self, lambda: [remove() for remove in undo])

    # ---- what an optimizer has --------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter of the model, in the host's memory."""
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        if "_groups" in self.__dict__:
            self._join()
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
        self._join()
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

        Args:
            closure: A function that computes the loss and its gradients, and returns the loss. Default: None.

        Returns:
            The value that the closure returned.

        Raises:
            RuntimeError: A backward pass or a step was broken off, a scaler has called this, or the model has changed.
            Exception: The errors of the optimizer's own step; everything is as before, unless the next call raises a
                RuntimeError that says otherwise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if [self.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")] != [None, None]:
            refusals.refuse_scaler()
        with torch.no_grad():
            self._before_step()
            if self._scaled is None:
                self._take_step(None, None)
            else:
                self._scaled.step_all(self._sum_of_all())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, including those that have left the device without being used.

        Args:
            set_to_none: As in torch. Default: True.

        Raises:
            RuntimeError: Parameters have taken a step that was not ended.
        """
        if self._running is None:
            self._settle()
            if self._broken is None and any(bucket.stepped for bucket in self._grads.buckets):
                raise RuntimeError(
                    "parameters have taken a step inside backward with gradients that zero_grad() would forget: end it "
                    "with step(), or let the others keep their weights with drop_step()"
                )
            if self._broken is not None and (self._broken.stepped or self._broken.in_doubt):
                self._check_usable()
            self._forget()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer as if nothing were offloaded."""
        self.synchronize()
        self._options.exchange()
        return with_masters(self.optimizer.state_dict(), list(self._params.values()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, of an offloaded optimizer or not. It replaces a step that was broken off.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            ValueError: As for the optimizer that was passed, which is unchanged then.
        """
        self._settle()
        load = self.optimizer.load_state_dict
        load_with_masters(load, state_dict, list(self._params.values()))
        self._host_step.end()
        self._forget()
        self._options.read()

    # ---- methods of its own -----------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Add up the gradients of each `backward()` inside; the first one outside completes the sum."""
        self._partial = True
        try:
            yield
        finally:
            self._partial = False

    def synchronize(self) -> None:
        """Wait for the last step, so that any code may read the weights.

        Raises:
            RuntimeError: That step has failed.
        """
        self._join()
        self._check_usable()

    def read_weights(self) -> None:
        """Copy the weights from the device to the host.

        A step notices by itself that a program has written weights in place, or has assigned to `param.data`. It does
        not notice a write into `param.data`, as that of many averages of weights (`param.data.copy_(average)`), or
        through a pointer, as those of NumPy and of kernels: torch does not count these.
        """
        self._join()
        for param in self._params.values():
            param.equal_at = ()
        self._read_written(list(self._params.values()))

    def finish_step(self) -> None:
        """Step the parameters that have gradients and have not taken a step that was broken off, and end it.

        Raises:
            RuntimeError: No step was broken off, or the arithmetic may have been interrupted.
        """
        self._settle()
        broken = self._broken
        if broken is None:
            raise RuntimeError("no step was broken off: call step()")
        if broken.in_doubt or (self._accumulate == "host" and self._host_step.own_clip):
            raise RuntimeError(f"the step cannot be finished: {broken.describe(len(self._params))}") from broken.cause
        self._broken, self._in_backward, self._host_step.error = None, False, None
        with torch.no_grad():
            self._grads.send()
            self._run()

    def drop_step(self) -> None:
        """Forget the gradients of a step that was broken off; parameters that have taken it keep their new weights."""
        self._settle()
        self._host_step.end()
        self._forget()
        super().zero_grad()

    def explain(self) -> str:
        """Return what the optimizer explains, what is where, which threads step, and what overlaps."""
        inner = getattr(self.optimizer, "explain", None)
        params, worker = self._params.values(), self._worker
        cpus = f", on the {len(worker.cpus)} CPUs near the device" if worker.cpus else ""
        lines = [inner()] if inner is not None else []
        lines.append(
            f"offloaded: {len(params)} tensors of the device, stepped by {worker.threads} threads of the host "
            f"({worker.reason}{cpus})"
        )
        weights, grads = sum(p.weights.nbytes for p in params), sum(p.grad.nbytes for p in params)
        lines.append(f"host memory besides state: {weights:,} bytes of weights, {grads:,} of gradients")
        lines.append(f'overlap="{self.overlap}": {BESIDE[self.overlap]}')
        return "\n".join(lines)

    # ---- hooks that torch calls -------------------------------------------------------------------------------------

    def _on_grad(self, tensor: Tensor) -> None:
        """Post-accumulate hook: send a gradient to the host."""
        if self._partial and self._accumulate == "device":
            return
        try:
            if not self._in_backward:
                self.synchronize()
                self._options.exchange()
                self._in_backward = True
                mine = weakref.ref(self)
                Variable._execution_engine.queue_callback(lambda: _end_backward(mine))
            self._take_grad(tensor)
        except BaseException:
            tensor.grad = None  # or the next backward would add to it
            raise

    def _end_backward(self) -> None:
        """Send the last bucket; autograd does not call this if the backward pass ends with an error."""
        self._send(is_last=self._accumulate == "device")
        self._in_backward = False

    def _wait_for(self, params: list[Tensor]) -> None:
        """Forward pre-hook and `state_dict` pre-hook: wait until a module's weights are new."""
        buckets = dict.fromkeys(b for param in params if (b := self._on_the_way.get(id(param))) is not None)
        for bucket in buckets:
            bucket.sent.wait()
            if bucket.weights is None:
                self.synchronize()  # which raises what has gone wrong, or the step was skipped
            else:
                bucket.weights.wait()

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _take_grad(self, tensor: Tensor) -> None:
        param = self._params[id(tensor)]
        if param.arrived and self._accumulate == "device":
            refusals.refuse_second_gradient(param.label)
        param.check_unmoved()
        grad = param.taken_grad()
        if self._grads.put(param, grad):
            self._send()

    @torch.no_grad()
    def _send(self, is_last: bool = False) -> None:
        if (
            (bucket := self._grads.send(is_last=is_last)) is not None
            and self.overlap == "backward"
            and not self._partial
        ):
            self._read_written(bucket.params)
            bucket.job = self._worker.submit(lambda: self._host_step.step_bucket(bucket))

    @torch.no_grad()
    def _read_written(self, params: list[Any]) -> None:
        written = [param for param in params if param.written]
        if written:
            self._copies.to_host([(param.weights, param.here) for param in written]).synchronize()
            for param in written:
                param.take_weights()
                param.note_equal()

    def _forget(self) -> None:
        self._grads.forget()
        for param in self._params.values():
            param.arrived = False
        self._broken, self._in_backward, self._host_step.error = None, False, None

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        """Send gradients that no backward pass has sent, and raise if one was broken off."""
        self.synchronize()
        if not self._in_backward:
            for param in self._params.values():
                if param.device.grad is not None:
                    self._take_grad(param.device)
            self._send()
        self._settle()
        self._check_usable()
        self._options.exchange()

    def _sum_of_all(self) -> Tensor:
        """The sum of the squares of all gradients, also on the ranks that hold other shards."""
        total = self._grads.square_sum()
        if total is None:
            total = torch.zeros((), dtype=torch.float64, device=next(iter(self._params.values())).here.device)
        if self._sharded:
            total = total.clone()
            torch.distributed.all_reduce(total)
        return total

    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self._host_step.give(self._grads.square_sum(), grad_scale, found_inf)
        self._run()

    def _run(self) -> None:
        """Let the stepping thread take the step, and wait for its end, or until all checks of it have passed."""
        parts = self._grads.parts()
        if self.overlap == "forward":
            parts.reverse()  # the first layers come first in the next forward pass
        self._read_written([param for part in parts if not part.stepped for param in part.params])
        self._host_step.prepared.clear()
        self._running = self._worker.submit(lambda: self._host_step.run(parts)), parts
        if self.overlap == "forward":
            self._host_step.prepared.wait()
            self._on_the_way = {id(param.device): part for part in parts for param in part.params}
            if self._host_step.error is None:
                return
        self.synchronize()

    def _join(self, raises: bool = True) -> None:
        """Wait for the step that the stepping thread takes, and let the device wait for the new weights."""
        if self._running is None:
            return
        # Ctrl-C at any point leaves everything for the next call.
        job, parts = self._running
        job.wait()
        for part in parts:
            part.settle()
        if job.error is None:
            self._forget()
            self._options.exchange()
        else:
            self._note_error(job.error, parts)
        self._running, self._on_the_way = None, {}
        if raises and job.error is not None and self._broken is None:
            raise job.error

    def _settle(self) -> None:
        """Wait for everything in the stepping thread, and note a step that was broken off."""
        self._join(raises=False)
        for bucket in self._grads.buckets:
            bucket.settle()
        if self._broken is None and (self._host_step.error is not None or self._in_backward):
            self._broken = self._host_step.broken(self._host_step.error, self._grads.buckets)

    def _note_error(self, error: BaseException, parts: list[Bucket]) -> None:
        """Note a step that has ended with an error, unless everything is as before it."""
        self._host_step.error = None
        broken = self._host_step.broken(error, parts)
        if broken.stepped or broken.in_doubt:
            self._broken = broken

    def _check_usable(self) -> None:
        """Raise if a step was broken off."""
        if self._broken is not None:
            raise RuntimeError(self._broken.describe(len(self._params))) from self._broken.cause


def _end_backward(mine: weakref.ref[OffloadedOptimizer]) -> None:
    if (optimizer := mine()) is not None:
        optimizer._end_backward()
