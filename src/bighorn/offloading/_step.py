"""One step of an offloaded optimizer, from the first gradient that leaves the device to the last weight that returns.

In the thread of the training loop, `add` puts gradients into buckets, which are sent to the host as they fill, `close`
sends the last one, and `send_numbers` sends the numbers that a clip and a scaler need. In the stepping thread,
`run` waits for one part of the buckets after the other, steps it, and sends its new weights. `end` ends the step.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from bighorn._arguments import shortened
from bighorn._distributed.grad_scaler import inverse
from bighorn._distributed.step_in_parts import BighornOptimizer, StepsInParts, step_in_parts
from bighorn._square_sums import root, square_sums
from bighorn.offloading._copies import Arrival, Copies
from bighorn.offloading._params import OffloadedParam

NUMBER_BYTES = 3 * 8
"""The bytes of the numbers that a step needs from the device: a norm, the scaler's scale, and its found_inf."""


@dataclass(eq=False)
class TransferBucket:
    """Parameters whose gradients travel together, and whose new weights do."""

    params: list[OffloadedParam]
    device_grads: list[Tensor]
    """The gradients on the device, until they have arrived."""
    arrival: Arrival | None
    """The end of the gradients' copies, while it is not known to have come."""
    weights: Arrival | None = None
    """The end of the new weights' copies; None: the parameters have not taken the step."""

    def land(self) -> None:
        """Return when the gradients have arrived, and free those on the device."""
        if self.arrival is not None:
            self.arrival.synchronize()
        self.device_grads, self.arrival = [], None

    def bind(self, bound: bool) -> None:
        """Give the gradients to the optimizer's parameters, or take them back."""
        for param in self.params:
            param.host.grad = param.grad_of_host if bound else None

    @torch.no_grad()
    def send_weights(self, copies: Copies) -> None:
        """Begin to copy the new weights to the device; the parameters have taken the step."""
        for param in self.params:
            param.round_master()
        self.weights = copies.to_device([(param.weights, param.shard) for param in self.params])
        # Autograd may have saved the old weights.
        torch.autograd.graph.increment_version([param.device for param in self.params])
        for param in self.params:
            param.note_equal()


@dataclass(frozen=True)
class StepSetup:
    """The common part of all steps of an offloaded optimizer.

    Attributes:
        needs_square_sum: Whether the optimizer clips, or skips a step, by the norm of all gradients.
        max_grad_norm: The norm to which gradients are clipped here, by no optimizer; None: they are not.
        memory: NUMBER_BYTES of the host's memory that the device reaches.
    """

    optimizer: Optimizer
    params: list[OffloadedParam]
    copies: Copies
    bucket_bytes: int
    needs_square_sum: bool
    max_grad_norm: float | None
    scaler: GradScaler | None
    memory: Tensor


class OffloadedStep:
    """The whole state of one step; the next step is another object.

    An interrupt (Ctrl-C) can come anywhere in the training loop's thread. The stepping thread takes the whole step all
    the same, and the next call finds from `submitted` and `ran` whether it was taken.

    Args:
        setup: What all steps have in common.
    """

    def __init__(self, setup: StepSetup) -> None:
        self.setup = setup
        self.buckets: list[TransferBucket] = []
        """The buckets that were sent."""
        self.having_grad: set[OffloadedParam] = set()
        """The parameters that have a gradient for this step."""
        self.in_pass = False
        """Whether gradients are being collected; this stays so if the backward pass has failed."""
        self.submitted = False
        """Whether the stepping thread may have begun the step; noted before it is."""
        self.ran = False
        """Whether the stepping thread has ended it."""
        self.returned = False
        """Whether `step()` has returned, so that the program knows of the step."""
        self.in_doubt: list[OffloadedParam] = []
        """The parameters that are being stepped."""
        self.error: BaseException | None = None
        """The error of the stepping thread, or of the copies of new weights."""
        self.failure: str | None = None
        """The description of an error that came after parameters had been written."""
        self._open: list[tuple[OffloadedParam, Tensor]] = []
        self._open_bytes = 0
        self._norms: dict[OffloadedParam, Tensor] = {}
        """The norm of each gradient, or its sum of squares for an optimizer that clips itself."""
        self._peaks: list[Tensor] = []
        self._numbers: dict[str, Tensor] = {}
        self._numbers_arrival: Arrival | None = None

    # ---- gradients, in the thread of the training loop --------------------------------------------------------------

    def add(self, param: OffloadedParam, grad: Tensor) -> None:
        """Add this rank's shard of a gradient, and send the bucket if it is full."""
        self._open.append((param, grad))
        self.having_grad.add(param)
        self._open_bytes += grad.nbytes
        if self._open_bytes >= self.setup.bucket_bytes:
            if self.buckets:
                self.buckets[-1].land()  # so that the device holds the gradients of at most two buckets
            self.close()

    @torch.no_grad()
    def close(self) -> None:
        """Send the open bucket."""
        if not self._open:
            return
        params, grads = [param for param, _ in self._open], [grad for _, grad in self._open]
        self._measure(params, grads)
        arrival = self.setup.copies.to_host(list(zip([param.grad for param in params], grads, strict=True)))
        self.buckets.append(TransferBucket(params, grads, arrival))
        self._open, self._open_bytes = [], 0

    def _measure(self, params: list[OffloadedParam], grads: list[Tensor]) -> None:
        """Compute on the device the numbers that a clip or a scaler needs before the first gradient is stepped."""
        setup = self.setup
        if setup.scaler is not None:
            self._peaks += torch._foreach_norm(real(grads), torch.inf)
        if setup.needs_square_sum:
            self._norms.update(zip(params, square_sums(real(grads), grads[0].device), strict=True))
        elif setup.max_grad_norm is not None:
            # As clip_grad_norm_ computes them, of the gradients that the optimizer will see.
            scale = None if setup.scaler is None else setup.scaler._get_scale_async()
            seen = [grad.to(param.grad.dtype) for param, grad in zip(params, grads, strict=True)]
            seen = seen if scale is None else [grad * inverse(scale) for grad in seen]
            self._norms.update(zip(params, torch._foreach_norm(seen, 2), strict=True))

    @torch.no_grad()
    def overflows(self) -> Tensor:
        """Return how many gradients on this rank are not finite, 0-dim, on the device."""
        shard = self.setup.params[0].shard
        return sum(((~peak.isfinite()).float() for peak in self._peaks), torch.zeros((), device=shard.device))

    @torch.no_grad()
    def send_numbers(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Begin to copy the numbers that the step needs from the device."""
        given = {"norm": self._norm(), "grad_scale": grad_scale, "found_inf": found_inf}
        numbers = {name: number.reshape(()) for name, number in given.items() if number is not None}
        slots = torch.split(self.setup.memory, 8)
        self._numbers = {
            name: slot[: number.itemsize].view(number.dtype)[0]
            for slot, (name, number) in zip(slots, numbers.items(), strict=False)
        }
        pairs = [(self._numbers[name], number) for name, number in numbers.items()]
        self._numbers_arrival = self.setup.copies.to_host(pairs) if pairs else None

    def _norm(self) -> Tensor | None:
        """The norm of all gradients; None if neither a clip nor the optimizer needs it."""
        # In the order of the parameters, so that the sum does not depend on the sizes of buckets.
        found = [self._norms[param] for param in self.setup.params if param in self._norms]
        if not found:
            return None
        if self.setup.needs_square_sum:
            return root(torch.stack(found).sum(dim=0))
        grouped = Optimizer._group_tensors_by_device_and_dtype([found])  # type: ignore[list-item]
        ordered = [norm for [norms], _ in grouped.values() for norm in norms]
        total: Tensor = torch.linalg.vector_norm(torch.stack(ordered), 2)  # type: ignore[arg-type]
        return total

    def forget(self) -> None:
        """Wait for gradients that are still being copied, since the memory on the host is used again."""
        for bucket in self.buckets:
            with contextlib.suppress(Exception):
                bucket.land()
            if self.failure is not None and bucket.weights is None:
                for param in bucket.params:
                    param.equal_at = ()  # the weights on the host may be half stepped

    # ---- arithmetic, in the stepping thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Take the step, and note its error; an earlier try may have failed before it wrote anything."""
        self.error, self.in_doubt = None, []
        try:
            for bucket in self.buckets:
                bucket.bind(True)
            self._take_step()
        except BaseException as error:  # the training loop raises it
            self.error = error
        finally:
            for bucket in self.buckets:
                bucket.bind(False)
            self.ran = True

    def _take_step(self) -> None:
        optimizer, factors, scaled = self.setup.optimizer, list[Tensor](), set[int]()
        parts = step_parts(self.buckets)
        clips_itself = isinstance(optimizer, BighornOptimizer)
        if not clips_itself and isinstance(optimizer, StepsInParts):
            parts = [self.buckets]  # since it does not report when a part has taken the step
        params = [[param for bucket in part for param in bucket.params] for part in parts]
        hosts = [[param.host for param in part] for part in params]

        def wait(part: int) -> None:
            self.in_doubt = []
            for bucket in parts[part]:
                bucket.land()
            self.in_doubt = params[part]
            for factor in factors if part not in scaled else ():
                torch._foreach_mul_([param.grad for param in params[part]], factor)
            scaled.add(part)

        def stepped(part: int) -> None:
            for bucket in parts[part]:
                bucket.send_weights(self.setup.copies)
            self.in_doubt = []

        if isinstance(optimizer, BighornOptimizer):
            scaler = {} if self.setup.scaler is None else self._arrived_numbers()
            scaler.pop("norm", None)
            vars(optimizer).update(scaler)
            try:
                # The checks need no numbers, and end before they arrive.
                square_sum = self._square_sum if "norm" in self._numbers else None
                optimizer.step_in_parts(hosts, wait, stepped, square_sum)
            finally:
                for name in scaler:
                    vars(optimizer).pop(name, None)
            return
        numbers = self._arrived_numbers()
        if numbers.get("found_inf"):
            for bucket in self.buckets:
                bucket.land()
            return
        factors += self._factors(numbers)
        step_in_parts(optimizer, hosts, wait, stepped)

    def _arrived_numbers(self) -> dict[str, Tensor]:
        if self._numbers_arrival is not None:
            self._numbers_arrival.synchronize()
        return {name: number.clone() for name, number in self._numbers.items()}

    def _square_sum(self) -> Tensor:
        return self._arrived_numbers()["norm"].double().square()

    def _factors(self, numbers: dict[str, Tensor]) -> list[Tensor]:
        """The factors of all gradients, one after the other, as a scaler's unscale_ and clip_grad_norm_ use them."""
        factors = [] if "grad_scale" not in numbers else [inverse(numbers["grad_scale"])]
        if self.setup.max_grad_norm is not None and "norm" in numbers:
            factors.append(torch.clamp(self.setup.max_grad_norm / (numbers["norm"] + 1e-6), max=1.0))
        return factors

    # ---- the end, in the thread of the training loop ----------------------------------------------------------------

    def end(self) -> None:
        """Let the device wait for new weights, and note an error of their copies."""
        for bucket in self.buckets:
            try:
                if bucket.weights is not None:
                    bucket.weights.wait()
            except Exception as error:
                self.error, self.in_doubt, bucket.weights = error, [*self.in_doubt, *bucket.params], None

    @property
    def has_written(self) -> bool:
        """Whether parameters have taken the step, or may have."""
        return bool(self.in_doubt) or any(bucket.weights is not None for bucket in self.buckets)

    def describe_failure(self) -> str:
        """Describe an error that came after parameters had been written, with the remedies."""
        done = [param.label for bucket in self.buckets if bucket.weights is not None for param in bucket.params]
        doubt = [param.label for param in self.in_doubt]
        text = f"{len(done)} of {len(self.setup.params)} parameters have taken the step{in_brackets(done)}"
        if doubt:
            text += f", and others were being stepped{in_brackets(doubt)}"
        return (
            f"the step has failed ({self.error!r}) when {text}: load a checkpoint of model and optimizer, or go on "
            "with these weights, and forget the gradients of the others, with optimizer.zero_grad()"
        )


def step_parts(buckets: list[TransferBucket]) -> list[list[TransferBucket]]:
    """Divide the buckets of a step into parts: one bucket, then more and more, then fewer, and one at the end.

    Fewer parts take less time. But the first part's new weights are the first that travel, and the last part's travel
    when all arithmetic has ended.
    """
    parts: list[list[TransferBucket]] = []
    done, left = 0, len(buckets)
    while left:
        count = min(done + 1, (left + 1) // 2)
        parts.append(buckets[done : done + count])
        done, left = done + count, left - count
    return parts


def real(grads: list[Tensor]) -> list[Tensor]:
    """Return gradients as real numbers: complex ones as pairs, and 0 for empty ones."""
    reals = [torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad for grad in grads]
    return [grad if grad.numel() else grad.new_zeros(1) for grad in reals]


def in_brackets(names: list[str]) -> str:
    """Return some names in brackets, after a space; empty if there are none."""
    return f" ({shortened(names)})" if names else ""
