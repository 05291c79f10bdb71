"""What the algorithms share: tables of addresses, made once; gradients and options, read at each step."""

from __future__ import annotations

import itertools
import threading
from array import array
from typing import Generic

import torch
from torch import Tensor

from bighorn.kernels.addresses import addresses, check_memory
from bighorn.kernels.bucket import Bucket, Options
from bighorn.kernels.cpu.library import address, loaded, run
from bighorn.kernels.cpu.tensors import BLOCK, Gradient, grad_layout, gradient, place_layout


class Stepper(Generic[Options]):
    """An algorithm of the library for some buckets; it adds the table of its rows and the call of its step."""

    def __init__(self, buckets: list[Bucket[Options]]) -> None:
        rows = [
            (x, grad, bucket.options.centre)
            for bucket in buckets
            for x, grad in zip(bucket.params, bucket.grads, strict=True)
        ]
        self.lock = threading.Lock()
        """Held in a call of the library, which computes in memory of the stepper's: two threads may step at once."""
        check_memory([grad for _, grad, _ in rows])
        self.buckets: list[Bucket[Options]] = buckets
        self.layouts = [grad_layout(x, grad) for x, grad, _ in rows]  # the tables hold only their addresses
        self.places = [place_layout(bucket, i) for bucket in buckets for i in range(len(bucket.params))]
        self.gradients = (Gradient * len(rows))(
            *(gradient(*row, layout) for row, layout in zip(rows, self.layouts, strict=True))
        )
        sizes = [x.numel() for x, _, _ in rows]
        self.order = array("q", sorted(range(len(rows)), key=lambda i: -sizes[i]))  # largest first
        self.counts = array("Q", [step.data_ptr() for bucket in buckets for step in bucket.counts])
        self.blocks = [-(-size // BLOCK) for size in sizes]
        self.sums = torch.empty(sum(self.blocks), dtype=torch.float64, device="cpu")

    def prepare(self) -> None:
        """Whatever can fail, as `reference.Lamb.prepare`; and how this step is to run, which the environment says."""
        how = run()
        with self.lock:
            self.reserve(how.threads)
            self.how = how

    def reserve(self, threads: int) -> None:
        """Memory for so many threads, where an algorithm needs any."""

    def square_sum(self) -> Tensor:
        """The sum of all gradients' squares, a 0-dim float64 tensor."""
        grads, sums = self._grads(), self.sums.data_ptr()
        with self.lock:
            total = loaded().bighorn_square_sum(self.how, self.gradients, address(grads), len(grads), sums)
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def step(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> None:
        """One step of all buckets, as `reference.Lamb.step`."""
        if commit is not None and not commit:
            return
        self.launch(self._grads(), float(grad_scale))
        self.advance()

    def advance(self) -> None:
        """Count the step."""
        loaded().bighorn_advance(address(self.counts), len(self.counts))

    def launch(self, grads: array[int], grad_scale: float) -> None:
        """One step of all buckets, not counted, of the gradients at these addresses."""
        raise NotImplementedError

    def _grads(self) -> array[int]:
        grads = list(itertools.chain.from_iterable([bucket.grads for bucket in self.buckets]))
        if len(grads) != len(self.layouts):
            raise RuntimeError("two threads step one optimizer at once, and one of them has let go of the gradients")
        return addresses(grads)
