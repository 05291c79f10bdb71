"""The buckets in which gradients and weights travel between the device and the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bighorn.offloading.copies import Arrival, Copies
from bighorn.offloading.params import OffloadedParam, padded, strided
from bighorn.offloading.worker import Job, Worker


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients travel together, and whose new weights do."""

    params: list[OffloadedParam]
    arrival: Arrival | None = None
    """The end of the gradients' copies, while it is not known to have come."""
    held: list[Tensor] = field(default_factory=list)
    """The gradients on the device, until they have arrived."""
    landing: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that waits, so that the other one continues when the gradients are freed."""
    job: Job[None] | None = None
    """What the stepping thread does with the bucket."""
    factor: float = 1.0
    """What the gradients on the host were multiplied by."""
    stepped: bool = False
    """Whether the parameters have taken the step."""
    sent: threading.Event = field(default_factory=threading.Event)
    """Set when the new weights have been sent, or never will be."""
    weights: Arrival | None = None
    """The end of the new weights' copies."""

    def land(self) -> None:
        """Return when the gradients have arrived, and free those on the device."""
        with self.landing:
            if self.arrival is not None:
                self.arrival.synchronize()
            self.held, self.arrival = [], None

    def settle(self) -> None:
        """Wait for the stepping thread, and let the device wait for the new weights."""
        if self.job is not None:
            self.job.wait()
        if self.weights is not None:
            self.weights.wait()

    def bind(self) -> None:
        """Give the gradients to the optimizer's parameters."""
        for param in self.params:
            param.host.grad = param.grad_of_host

    def unbind(self) -> None:
        """Take the gradients back."""
        for param in self.params:
            param.host.grad = None

    def scale(self, factor: float) -> None:
        """Multiply the gradients on the host, unless they were multiplied before."""
        if factor != self.factor:
            torch._foreach_mul_([param.grad for param in self.params], factor / self.factor)
            self.factor = factor

    @torch.no_grad()
    def send_weights(self, copies: Copies) -> None:
        """Begin to copy the new weights to the device; the parameters have taken the step."""
        self.stepped = True
        for param in self.params:
            param.round_master()
        self.weights = copies.to_device([(param.weights, param.here) for param in self.params])
        # Autograd may have saved the old weights.
        torch.autograd.graph.increment_version([param.device for param in self.params])
        for param in self.params:
            param.note_equal()
        self.sent.set()


class GradientBuckets:
    """Gradients on their way to the host: those of the open bucket, and of at most one other.

    Args:
        copies: The copies.
        bucket_bytes: The size at which a bucket is sent.
        sums: Whether to compute the sum of the squares of all gradients on the device.
    """

    def __init__(self, copies: Copies, bucket_bytes: int, sums: bool) -> None:
        self._copies, self._bucket_bytes, self._sums = copies, bucket_bytes, sums
        self._open: list[tuple[OffloadedParam, Tensor]] = []
        self._open_bytes = 0
        self.buckets: list[Bucket] = []
        """The buckets that were sent since the last step."""
        self._norms: list[Tensor] = []
        """The 2-norm of each of their gradients."""

    def put(self, param: OffloadedParam, grad: Tensor) -> bool:
        """Put this rank's shard of a gradient into the open bucket; return whether that is full."""
        self._open.append((param, grad))
        self._open_bytes += padded(grad.nbytes)
        return self._open_bytes >= self._bucket_bytes

    def send(self, *, is_last: bool = False) -> Bucket | None:
        """Send the open bucket, as soon as the one before has arrived; None if it is empty.

        No gradients follow the last one, so that two buckets may be in flight.
        """
        if not self._open:
            return None
        if self.buckets and not is_last:
            self.buckets[-1].land()
        params, grads = [param for param, _ in self._open], [grad for _, grad in self._open]
        bucket = Bucket(params, held=grads)
        self._begin(bucket, grads)
        self._open, self._open_bytes = [], 0
        self.buckets.append(bucket)
        return bucket

    def _begin(self, bucket: Bucket, grads: list[Tensor]) -> None:
        if self._sums:
            self._norms += norms(grads)
        pairs = list(zip([param.grad for param in bucket.params], grads, strict=True))
        bucket.arrival = self._copies.to_host(pairs)

    @torch.no_grad()
    def square_sum(self) -> Tensor | None:
        """Return the sum of the squares of all gradients that were sent, 0-dim, on the device; None without sums."""
        if not self._norms:
            return None
        # All at once, so that the sum does not depend on the sizes of buckets.
        return torch.stack(self._norms).square().sum()

    def parts(self) -> list[Bucket]:
        """Return the buckets for a step."""
        return list(self.buckets)

    def forget(self) -> None:
        """Forget all gradients, whether their copies have succeeded or not."""
        for bucket in self.buckets:
            with contextlib.suppress(Exception):
                bucket.land()
        self._open, self._open_bytes, self.buckets, self._norms = [], 0, [], []


class HostSums(GradientBuckets):
    """Gradients that are added up in the host's memory, through two slabs in which buckets arrive.

    Args:
        copies: The copies.
        bucket_bytes: The size at which a bucket is sent.
        largest: The bytes of the largest gradient.
        worker: The stepping thread, which adds.
    """

    def __init__(self, copies: Copies, bucket_bytes: int, largest: int, worker: Worker) -> None:
        super().__init__(copies, bucket_bytes, sums=False)
        self._worker = worker
        self._slabs = [copies.pinned(bucket_bytes + padded(largest)) for _ in range(2)]
        self._last: list[Job[None] | None] = [None, None]
        """What reads each slab."""
        self._summed: dict[OffloadedParam, None] = {}
        self._parts: list[Bucket] = []
        """The buckets of the step, which stay the same if it is broken off and finished."""

    def _begin(self, bucket: Bucket, grads: list[Tensor]) -> None:
        self._slabs.reverse()
        self._last.reverse()
        if self._last[0] is not None:
            self._last[0].result()
        memory, offset, arrived = self._slabs[0], 0, []
        for grad in grads:
            arrived.append(strided(memory[offset:], grad, grad.dtype))
            offset += padded(grad.nbytes)
        first = [param not in self._summed for param in bucket.params]
        self._summed.update(dict.fromkeys(bucket.params))
        bucket.arrival = self._copies.to_host(list(zip(arrived, grads, strict=True)))

        @torch.no_grad()
        def add() -> None:
            bucket.land()
            for param, grad, is_first in zip(bucket.params, arrived, first, strict=True):
                (param.grad.copy_ if is_first else param.grad.add_)(grad)

        self._last[0] = self._worker.submit(add)

    def parts(self) -> list[Bucket]:
        """Return the buckets for a step: those that were stepped during backward, and new ones of other parameters."""
        for job in self._last:
            if job is not None:
                job.result()
        parts = [bucket for bucket in self.buckets if bucket.job is not None] + self._parts
        there = {param for bucket in parts for param in bucket.params}
        left = [param for param in self._summed if param not in there]
        new = [Bucket(params) for params in divided(left, self._bucket_bytes)]
        self._parts += new
        return parts + new

    def forget(self) -> None:
        """Forget all gradients."""
        for job in self._last:
            if job is not None:
                job.wait()
        super().forget()
        self._last, self._summed, self._parts = [None, None], {}, []


def step_parts(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Divide the buckets of a step into parts: one bucket, then more and more, then fewer, and one at the end.

    Fewer parts take less time. But the new weights of the first part are the first that travel, and those of the last
    travel when all arithmetic has ended.
    """
    parts: list[list[Bucket]] = []
    done, left = 0, len(buckets)
    while left:
        count = min(done + 1, (left + 1) // 2)
        parts.append(buckets[done : done + count])
        done, left = done + count, left - count
    return parts


def divided(params: Iterable[OffloadedParam], bucket_bytes: int) -> list[list[OffloadedParam]]:
    """Divide parameters into buckets of about this size."""
    buckets: list[list[OffloadedParam]] = []
    size = bucket_bytes
    for param in params:
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.grad.nbytes
    return buckets


@torch.no_grad()
def norms(grads: list[Tensor]) -> list[Tensor]:
    """Return the 2-norms of some gradients, in float64, on their device."""
    real = [torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad for grad in grads if grad.numel()]
    return list(torch._foreach_norm(real, 2, dtype=torch.float64)) if real else []
