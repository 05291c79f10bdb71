"""The base of the algorithms: tables of addresses, built once; gradients and options, read at each step."""

from __future__ import annotations

import ctypes
import itertools
import threading
from array import array
from collections.abc import Iterator
from typing import Any, Generic

import torch
from torch import Tensor

from bighorn.kernels.bucket import Bucket
from bighorn.kernels.cpu.abi import Gradient
from bighorn.kernels.cpu.library import address, loaded, run
from bighorn.kernels.cpu.row_means import RowMeans
from bighorn.kernels.cpu.tensors import CHUNK_ELEMS, describe_gradient, memory_layout, position_layout
from bighorn.kernels.options import Options

RACE = "two threads step one optimizer at once, and one of them has let go of the gradients"

DATA = 0
"""The word of a row's structure that is the address of its weights."""


class Stepper(Generic[Options]):
    """The base of an algorithm in the library; the algorithm adds the table of its rows and the call of its step."""

    def __init__(self, buckets: list[Bucket[Options]]) -> None:
        self.lock = threading.Lock()
        """Held during a call of the library, which uses the stepper's memory, because two threads may step at once."""
        self.buckets: list[Bucket[Options]] = buckets
        self.layouts: dict[int, array[int] | None] = {}
        """The layouts of gradients by row, kept alive: the tables have only their addresses."""
        self.grad_kinds: dict[int, object] = {}
        """The dtypes and strides of gradients by row."""
        self.means = RowMeans(buckets)
        self.positions = [position_layout(bucket, i) for bucket in buckets for i in range(len(bucket.params))]
        self.memories = [
            memory_layout(state, x)
            for bucket in buckets
            for x, state in zip(bucket.params, bucket.state["exp_avg"], strict=True)
        ]
        """The layouts of parameters by row, kept alive likewise."""
        sizes = [x.numel() for bucket in buckets for x in bucket.params]
        each = [(bucket, i, index) for index, bucket in enumerate(buckets) for i in range(len(bucket.params))]
        described = zip(each, self.positions, self.memories, strict=True)
        self.rows = words([self.make_row(*row, positions, memory) for row, positions, memory in described])
        """The library's tables have a structure for each row, in int64 words."""
        self.gradients = words([gradient for _, gradient in self._new_gradients()])
        self.shards = self.make_shards()
        self.largest_first = array("q", sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True))
        self.order = self.largest_first
        """The indices of the rows that take part in this step."""
        self.all_counts = self.counts = self._addresses_of_counts()
        """The addresses of the step counts of all rows, and of those that take part in this step."""
        self.means.reserve(self.gradients)
        self.sums = torch.empty(sum(-(-size // CHUNK_ELEMS) for size in sizes), dtype=torch.float64, device="cpu")
        self.threads = 0
        """The number of threads for which `reserve` was called, since the tables were made or refreshed."""

    def refresh(self) -> None:
        """Update the tables, after parameters have moved, or gradients have become of other dtypes or strides."""
        with self.lock:
            addresses = array("Q", [x.data_ptr() for bucket in self.buckets for x in bucket.params])
            if addresses:
                self.rows[:, DATA] = torch.frombuffer(addresses, dtype=torch.int64)
            for i, gradient in self._new_gradients():
                self.gradients[i] = words([gradient])[0]
            self.threads = 0

    def _new_gradients(self) -> Iterator[tuple[int, Gradient]]:
        """Yield the rows whose gradients are of other kinds than before, with the structures that describe them."""
        rows = [(bucket, i, grad) for bucket in self.buckets for i, grad in enumerate(bucket.grads)]
        for row, (bucket, i, grad) in enumerate(rows):
            kind = None if grad is None else (grad.dtype, grad.stride())
            if kind is not None and kind != self.grad_kinds.get(row):
                layout = memory_layout(bucket.state["exp_avg"][i], grad)
                self.grad_kinds[row], self.layouts[row] = kind, layout
                yield row, describe_gradient(bucket, i, grad, layout, self.means.each[row])

    @staticmethod
    def make_row(
        bucket: Bucket[Options], i: int, index: int, positions: array[int] | None, memory: array[int] | None
    ) -> Any:
        """Return the structure of row `i` of a bucket, which is the `index`-th bucket."""
        raise NotImplementedError

    def make_shards(self) -> Tensor | None:
        """Return a table of the shards of all rows, if an algorithm needs one."""

    def prepare(self) -> None:
        """Do everything that can fail, as `reference.Lamb.prepare`, and read the environment variables of this step."""
        order = self._order_of(self._all_grads())
        counts = self.all_counts if order is self.largest_first else self._addresses_of_counts()
        how = run()
        with self.lock:
            if how.threads > self.threads:
                self.reserve(how.threads)
                self.threads = how.threads
            self.how, self.order, self.counts = how, order, counts

    def reserve(self, threads: int) -> None:
        """Allocate memory for this number of threads, if an algorithm needs any."""

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares, a 0-dim float64 tensor."""
        grads, sums = self._grads(), self.sums.data_ptr()
        with self.lock:
            gradients = self.gradients.data_ptr()
            total = loaded().bighorn_square_sum(self.how, gradients, address(grads), len(grads), sums)
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of all buckets, as `reference.Lamb.step`."""
        if apply_mask is not None and not apply_mask:
            return
        grads = self._grads()
        if self.means.needed:
            self.centre(grads)
        self.launch(grads, float(grad_scale))
        self.advance()

    def centre(self, grads: array[int]) -> None:
        """Compute the means of gradients that the loops do not compute."""
        with self.lock:
            self.means.compute(self.how, self.gradients, grads)

    def advance(self) -> None:
        """Count the step."""
        loaded().bighorn_advance(address(self.counts), len(self.counts))

    def launch(self, grads: array[int], grad_scale: float) -> None:
        """Step the rows in `order`, without counting the step; `grads` has an address for each row, 0 for None."""
        raise NotImplementedError

    def _addresses_of_counts(self) -> array[int]:
        return array("Q", [step.data_ptr() for bucket in self.buckets for step in bucket.unique_steps])

    def _all_grads(self) -> list[Tensor | None]:
        return list(itertools.chain.from_iterable([bucket.grads for bucket in self.buckets]))

    def _order_of(self, grads: list[Tensor | None]) -> array[int]:
        if len(grads) < len(self.rows):
            raise RuntimeError(RACE)
        if type(None) not in set(map(type, grads)):
            return self.largest_first
        return array("q", [row for row in self.largest_first if grads[row] is not None])

    def _grads(self) -> array[int]:
        grads = self._all_grads()
        order = self._order_of(grads)
        if order is not self.order and order != self.order:
            raise RuntimeError(RACE)
        if order is self.largest_first:
            return array("Q", map(Tensor.data_ptr, grads))  # type: ignore[arg-type]  # none is None
        return array("Q", [0 if grad is None else grad.data_ptr() for grad in grads])


def words(structures: list[Any]) -> Tensor:
    """Return a table of structures of 8-byte words, `[structures, words]`."""
    if not structures:
        return torch.empty(0, 0, dtype=torch.int64, device="cpu")
    table = (type(structures[0]) * len(structures))(*structures)
    assert ctypes.sizeof(table) % (8 * len(structures)) == 0
    return torch.frombuffer(table, dtype=torch.int64).view(len(structures), -1)
