"""The step on the host, which the stepping thread runs: bucket by bucket, as gradients arrive."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from bighorn.distributed.step_in_parts import Parts, StepsInParts, Wait, step_in_parts
from bighorn.offloading.copies import Arrival, Copies
from bighorn.offloading.params import OffloadedParam
from bighorn.offloading.transfers import Bucket, step_parts

MOST_NAMES = 5
"""The most parameters that an error names."""


@runtime_checkable
class StepsBuckets(Protocol):
    """An optimizer that can step some parameters ahead of the others, and that clips and unscales by itself."""

    def step_params(self, params: list[Tensor], wait: Callable[[], None]) -> None:
        """Step some parameters; `wait` is called when everything has been checked, before gradients are read."""

    def step_in_parts(
        self, parts: Parts, wait: Wait, stepped: Wait | None, square_sum: Callable[[], Tensor] | None
    ) -> None:
        """Take one step, part by part."""

    def whole_step_reason(self) -> str | None:
        """The reason why every gradient is needed first, or None."""


@dataclass(frozen=True)
class BrokenStep:
    """A step that has ended with an error, after some parameters may have taken it."""

    cause: BaseException | None
    """The error; None if the backward pass has failed."""
    stepped: list[OffloadedParam]
    """The parameters that have taken the step."""
    in_doubt: list[OffloadedParam]
    """The parameters that were being stepped."""

    def describe(self, total: int) -> str:
        """Return what has happened, and the remedies."""
        labels = [param.label for param in self.stepped]
        stepped = f"{len(labels)} of {total} parameters have taken a step that was not ended{shortened(labels)}"
        if self.in_doubt:
            doubt = shortened([param.label for param in self.in_doubt])
            return (
                f"{stepped}, and an error came while others were being stepped{doubt}, {self.cause!r}: load a "
                "checkpoint of model and optimizer, or let the others keep their weights with optimizer.drop_step()"
            )
        why = "the last backward() has not ended" if self.cause is None else f"the step has failed ({self.cause!r})"
        if not labels:
            return f"{why}, and no parameter has taken the step: optimizer.zero_grad() forgets its gradients"
        return (
            f"{why}: {stepped}. Load a checkpoint of model and optimizer, step the others that have gradients with "
            "optimizer.finish_step(), or let them keep their weights with optimizer.drop_step()"
        )


class HostStep:
    """The steps of an optimizer over the host's parameters.

    Args:
        optimizer: The optimizer.
        copies: The copies, which send new weights.
        max_grad_norm: The norm to which gradients are clipped here, not by the optimizer; None: they are not.
    """

    def __init__(self, optimizer: Optimizer, copies: Copies, max_grad_norm: float | None) -> None:
        self.optimizer, self._copies, self._max_grad_norm = optimizer, copies, max_grad_norm
        self.own_clip = isinstance(optimizer, StepsBuckets) and optimizer.whole_step_reason() is not None
        """Whether the optimizer itself needs all gradients before the first parameter is stepped."""
        self._numbers = copies.pinned(3 * 8).view(torch.float64)
        self._arrival: Arrival | None = None
        self._given: tuple[bool, ...] = False, False, False
        self.prepared = threading.Event()
        """Set when the running step has found all errors that it can find before the first parameter is written."""
        self.in_doubt: list[OffloadedParam] = []
        """The parameters that are being stepped."""
        self.begun = False
        """Whether buckets have been stepped, and the step has not been ended."""
        self.error: BaseException | None = None
        """Why a bucket was not stepped during backward."""

    def step_bucket(self, bucket: Bucket) -> None:
        """Step a bucket during backward, unless one before it has failed."""
        if self.error is not None:
            return
        try:
            self._step_bucket(bucket)
        except BaseException as error:
            self.error = error
            raise

    def _step_bucket(self, bucket: Bucket) -> None:
        def wait() -> None:
            bucket.land()
            self.in_doubt = bucket.params

        bucket.bind()
        try:
            params = [param.host for param in bucket.params]
            if isinstance(self.optimizer, StepsBuckets):
                self.optimizer.step_params(params, wait)
            else:
                step_in_parts(self.optimizer, [params], lambda _: wait())
        finally:
            bucket.unbind()
        self.begun = True
        bucket.send_weights(self._copies)
        self.in_doubt = []

    def give(self, square_sum: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Begin to copy the numbers of a step from the device."""
        numbers = square_sum, grad_scale, found_inf
        self._given = tuple(number is not None for number in numbers)
        pairs = [(slot, here) for slot, here in zip(self._numbers, numbers, strict=True) if here is not None]
        self._arrival = self._copies.to_host(pairs) if pairs else None

    def run(self, buckets: list[Bucket]) -> None:
        """Take the step with the buckets that have not taken it, and end it."""
        buckets = [bucket for bucket in buckets if not bucket.stepped]
        self.in_doubt, self.error = [], None
        try:
            for bucket in buckets:
                bucket.bind()
            self._run(step_parts(buckets))
            self.begun = False
        except BaseException as error:
            self.error = error
            raise
        finally:
            for bucket in buckets:
                bucket.unbind()
                bucket.sent.set()
            self.prepared.set()

    def _run(self, parts: list[list[Bucket]]) -> None:
        params = [[param for bucket in part for param in bucket.params] for part in parts]
        optimizer, hosts = self.optimizer, [[param.host for param in part] for part in params]

        def wait(part: int) -> None:
            self.in_doubt = []
            for bucket in parts[part]:
                bucket.land()
                if factor is not None:
                    bucket.scale(factor)
            self.prepared.set()
            self.in_doubt = params[part]

        def stepped(part: int) -> None:
            for bucket in parts[part]:
                bucket.send_weights(self._copies)
            self.in_doubt = []

        factor: float | None = None
        if isinstance(optimizer, StepsBuckets):
            scaler = {}
            if self._given[2]:
                _, scaler["grad_scale"], scaler["found_inf"] = self._numbers_given()
            vars(optimizer).update(scaler)
            try:
                # The device ends later than the checks here, which need no numbers.
                knows = self.own_clip and self._given[0]
                optimizer.step_in_parts(hosts, wait, stepped, self._square_sum if knows else None)
            finally:
                for name in scaler:
                    vars(optimizer).pop(name, None)
            return
        square_sum, grad_scale, found_inf = self._numbers_given()
        if found_inf is not None and found_inf.item():
            for bucket in chain.from_iterable(parts):
                bucket.land()
            return
        factor = self._factor(square_sum, grad_scale)
        if isinstance(optimizer, StepsInParts):
            optimizer.step_in_parts(hosts, wait)
            for part in range(len(parts)):
                stepped(part)
        else:
            step_in_parts(optimizer, hosts, wait, stepped)

    def _square_sum(self) -> Tensor:
        total = self._numbers_given()[0]
        assert total is not None
        return total

    def _numbers_given(self) -> list[Tensor | None]:
        if self._arrival is not None:
            self._arrival.synchronize()
        return [slot.clone() if given else None for slot, given in zip(self._numbers, self._given, strict=True)]

    def _factor(self, square_sum: Tensor | None, grad_scale: Tensor | None) -> float | None:
        """What an optimizer that neither clips nor unscales needs its gradients multiplied by."""
        factor = None if grad_scale is None else float(grad_scale.reciprocal().float())
        if self._max_grad_norm is None or square_sum is None:
            return factor
        norm = math.sqrt(square_sum.item()) * (factor or 1.0)
        return min(1.0, self._max_grad_norm / (norm + 1e-6)) * (factor or 1.0)  # as clip_grad_norm_ does

    def broken(self, error: BaseException | None, buckets: list[Bucket]) -> BrokenStep:
        """Return how far the step with these buckets has come."""
        stepped = [param for bucket in buckets if bucket.stepped for param in bucket.params]
        return BrokenStep(error, stepped, self.in_doubt)

    def end(self) -> None:
        """End a step that buckets have taken, without the others."""
        if self.begun and isinstance(self.optimizer, StepsBuckets):
            self.optimizer.step_in_parts([], lambda _: None, None, None)
        self.begun, self.in_doubt, self.error = False, [], None


def shortened(names: list[str]) -> str:
    """Return some names in brackets, with a space; empty if there are none."""
    more = len(names) - MOST_NAMES
    text = ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return f" ({text})" if names else ""
