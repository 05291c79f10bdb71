"""The base of the algorithms: tables of addresses, built once; gradients and options, read at each step."""

from __future__ import annotations

import ctypes
import itertools
import operator
import threading
from array import array
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket, Shard
from bighorn._kernels.cpu.abi import c_options, update_options
from bighorn._kernels.cpu.library import STRUCTURES, address, loaded, run
from bighorn._kernels.cpu.tensors import CHUNK_ELEMS, describe_gradient, position_layout, unsupported_reason
from bighorn._kernels.options import Options


class Bound(NamedTuple):
    """The inputs of a step; each thread has its own, since two may step at once. Tables are their addresses."""

    grads: list[Tensor | None]
    """The gradients, which exist as long as their addresses are used."""
    arrays: tuple[array[int], ...]
    """The tables, kept alive."""
    addresses: int
    """The address of each gradient, 0 for None."""
    order: int
    """The indices of the slots that take part, the largest first."""
    slots: int
    """The number of these slots."""
    counts: int
    """The addresses of the step counts of these slots."""
    counted: int
    """The number of step counts."""
    options: Any
    """The options of each bucket."""
    how: Any
    """The `RunConfig` of the call."""


RACE = "two threads step one optimizer at once, and one of them has let go of the gradients"

DATA = 0
"""The word of a slot's structure that is the address of its weights."""


class Stepper(Generic[Options]):
    """The base of an algorithm in the library; the algorithm adds the table of its slots and the call of its step."""

    reads_tensors: ClassVar[bool] = False
    """As `kernels.Kernel.reads_tensors`."""

    def __init__(self, buckets: list[Bucket[Options]]) -> None:
        self.lock = threading.Lock()
        """Held during a call of the library, which uses the stepper's memory, because two threads may step at once."""
        self.buckets: list[Bucket[Options]] = buckets
        self.grad_dtypes: dict[int, torch.dtype] = {}
        """The dtypes of gradients by slot."""
        self.positions = [position_layout(bucket, i) for bucket in buckets for i in range(len(bucket.params))]
        """The positions of slots in their parameters, kept alive: the tables have only their addresses."""
        sizes = [x.numel() for bucket in buckets for x in bucket.params]
        each = [(bucket, i, index) for index, bucket in enumerate(buckets) for i in range(len(bucket.params))]
        self.slots = words([self.make_slot(*slot, at) for slot, at in zip(each, self.positions, strict=True)])
        """The library's tables have a structure for each slot, in int64 words."""
        self.gradients = words([gradient for _, gradient in self._new_gradients()])
        self.shards = self.make_shards()
        self.largest_first = array("q", sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True))
        self.all_counts = self._addresses_of_counts()
        """The addresses of the step counts of all slots."""
        self.bound: Bound | None = None
        self.converted: tuple[list[Options], ctypes.Array[Any]] | None = None
        self.sums = torch.empty(sum(-(-size // CHUNK_ELEMS) for size in sizes), dtype=torch.float64, device="cpu")
        self.threads = 0
        """The number of threads for which `reserve` was called, since the tables were made or refreshed."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: Any, shard: Shard | None) -> str | None:
        """The reason why the library cannot serve a tensor, or None."""
        del options, shard
        return unsupported_reason(param)

    def refresh(self) -> None:
        """Update the tables, after parameters moved or gradients changed their dtypes."""
        with self.lock:
            addresses = array("Q", [x.data_ptr() for bucket in self.buckets for x in bucket.params])
            if addresses:
                self.slots[:, DATA] = torch.frombuffer(addresses, dtype=torch.int64)
            for i, gradient in self._new_gradients():
                self.gradients[i] = words([gradient])[0]
            self.threads = 0

    def _new_gradients(self) -> Iterator[tuple[int, Any]]:
        """Yield the slots whose gradients have other dtypes than before, with the structures that describe them."""
        for slot, grad in enumerate(itertools.chain.from_iterable(bucket.grads for bucket in self.buckets)):
            if grad is not None and grad.dtype != self.grad_dtypes.get(slot):
                self.grad_dtypes[slot] = grad.dtype
                yield slot, describe_gradient(grad)

    @staticmethod
    def make_slot(bucket: Bucket[Options], i: int, index: int, positions: array[int] | None) -> Any:
        """Return the structure of slot `i` of a bucket, which is the `index`-th bucket."""
        raise NotImplementedError

    def make_shards(self) -> Tensor | None:
        """Return a table of the shards of all slots, if an algorithm needs one."""

    def prepare(self) -> None:
        """Do everything that can fail, as `reference.Lamb.prepare`, and read the environment variables of this step."""
        each = [b.grad_addresses if b.grad_addresses[0] is b.grads else b.read_addresses() for b in self.buckets]
        grads, pointers = (list(itertools.chain.from_iterable(lists)) for lists in zip(*each, strict=True))
        addresses, order, counts = array("Q", pointers), self.largest_first, self.all_counts
        if sum([len(bucket.unique_steps) for bucket in self.buckets]) != len(counts):
            counts = self._addresses_of_counts()
        if len(grads) < len(order):
            raise RuntimeError(RACE)
        # A gradient without elements has the address 0, too.
        if 0 in pointers and not all(present := list(map(operator.is_not, grads, itertools.repeat(None)))):
            order = array("q", filter(present.__getitem__, order))
        with self.lock:
            options, how = self.c_options(), run()
            if how.threads > self.threads:
                self.reserve(how.threads)
                self.threads = how.threads
            arrays = addresses, order, counts
            self.bound = Bound(
                grads,
                arrays,
                address(addresses),
                address(order),
                len(order),
                address(counts),
                len(counts),
                options,
                how,
            )

    def reserve(self, threads: int) -> None:
        """Allocate memory for this number of threads, if an algorithm needs any."""

    def take(self) -> Bound:
        """Return and release what `prepare` has bound."""
        bound, self.bound = self.bound, None
        if bound is None:
            raise RuntimeError(RACE)
        return bound

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares, a 0-dim float64 tensor."""
        bound, sums = self.bound, self.sums.data_ptr()
        if bound is None:
            raise RuntimeError(RACE)
        with self.lock:
            gradients, count = self.gradients.data_ptr(), len(bound.grads)
            total = loaded().bighorn_square_sum(bound.how, gradients, bound.addresses, count, sums)
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of all buckets, as `reference.Lamb.step`."""
        bound = self.take()
        if apply_mask is not None and not apply_mask:
            return
        self.launch(bound, float(grad_scale))
        loaded().bighorn_advance(bound.counts, bound.counted)

    def c_options(self) -> ctypes.Array[Any]:
        """Return the options of each bucket as the library reads them, converted if a bucket has others than before."""
        held, options = self.converted, [bucket.options for bucket in self.buckets]
        if held is None:
            held = self.converted = options, c_options(STRUCTURES, options)
        elif not all(map(operator.is_, options, held[0])):
            update_options(held[1], held[0], options)
            held = self.converted = options, held[1]
        return held[1]

    def launch(self, bound: Bound, grad_scale: float) -> None:
        """Step the slots that are bound, without counting the step."""
        raise NotImplementedError

    def _addresses_of_counts(self) -> array[int]:
        steps = itertools.chain.from_iterable([bucket.unique_steps for bucket in self.buckets])
        return array("Q", map(Tensor.data_ptr, steps))


def words(structures: list[Any]) -> Tensor:
    """Return a table of structures of 8-byte words, `[structures, words]`."""
    if not structures:
        return torch.empty(0, 0, dtype=torch.int64, device="cpu")
    table = (type(structures[0]) * len(structures))(*structures)
    assert ctypes.sizeof(table) % (8 * len(structures)) == 0
    return torch.frombuffer(table, dtype=torch.int64).view(len(structures), -1)
