"""LAMB in Triton, the host's side: tables of addresses and numbers, and three launches for the whole model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels.bucket import Bucket, CameOptions, LambOptions, Shard
from bighorn.kernels.triton.device import guard, launch, unsupported
from bighorn.kernels.triton.tables import Mirror, in_order_of, keep, table

CHUNK = 8192  # elements of a program
UNBOUNDED = (0.0, math.inf)

Place = tuple[int, int]
"""The number of a bucket, and of a row in it."""


def why_not(param: Tensor, options: LambOptions | CameOptions) -> str | None:
    """Why this backend cannot serve such a tensor, or None."""
    reason = unsupported(param)
    if reason:
        return reason
    if isinstance(options, CameOptions):
        return "CAME is not in Triton"
    if options.cautious:
        return "cautious updates are not in Triton: they would take one more pass over each tensor"
    if options.centre:
        return "gradient centralisation is not in Triton: it would take one more pass over each gradient"
    return None


def why_not_shard(shard: Shard, options: LambOptions | CameOptions) -> str | None:
    """Why this backend cannot serve a shard of a tensor that it would serve whole: there is no reason."""
    del shard, options
    return None


class Lamb:
    """LAMB for some buckets on one device."""

    def __init__(self, buckets: list[Bucket[LambOptions]]) -> None:
        self.buckets = buckets
        self.device = buckets[0].norms.device
        self.hyper = Mirror(torch.float64, self.device)
        self.one = torch.ones((), dtype=torch.float64, device=self.device)
        self.true = torch.ones((), dtype=torch.bool, device=self.device)
        self.none = torch.empty(0, dtype=torch.float64, device=self.device)
        served = {step.data_ptr() for bucket in buckets for step in bucket.steps}
        # A stacked parameter without slices has no row, but steps like any other.
        self.rowless = [step for bucket in buckets for step in bucket.counts if step.data_ptr() not in served]
        self._lay_out()

    def prepare(self) -> None:
        """Whatever can fail: memory, and copies of gradients that lie in another order than their parameters."""
        if self.adapts != [bucket.options.adapt for bucket in self.buckets]:
            self._lay_out()
        with guard(self.device):
            for part in self.parts:
                part.find_gradients()

    def square_sum(self) -> Tensor:
        """The sum of all gradients' squares, a 0-dim float64 tensor."""
        with guard(self.device):
            return torch.cat([self.none, *(part.square_sums() for part in self.parts)]).sum()

    def step(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> None:
        """One LAMB step of all buckets, as `reference.Lamb.step`."""
        with guard(self.device):
            hyper, scale, commit = self._numbers(grad_scale, commit)
            for part in self.parts:
                part.moments(hyper, scale, commit)
                part.apply(hyper, commit)
            self._count_rowless(commit)

    def rounds(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> Iterator[Tensor]:
        """One step of shards, as `reference.Lamb.rounds`: one round, of the sums of squares of x and u."""
        with guard(self.device):
            hyper, scale, commit = self._numbers(grad_scale, commit)
            for part in self.parts:
                part.moments(hyper, scale, commit)
            sums = torch.cat([self.none, *(part.row_sums() for part in self.parts)])
        yield sums
        with guard(self.device):
            for part, own in zip(
                self.parts, torch.split(sums, [2 * len(part.places) for part in self.parts]), strict=True
            ):
                part.take_row_sums(own)
                part.apply(hyper, commit)
            self._count_rowless(commit)

    def _numbers(self, grad_scale: Tensor | float, commit: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Options, what gradients are multiplied with, and whether anything is written, all on the device."""
        keep(self.one, self.true)
        if not isinstance(grad_scale, Tensor):
            grad_scale = self.one if grad_scale == 1 else self.one * grad_scale
        hyper = self.hyper.of(numbers(self.buckets))
        for row, bucket in zip(hyper.view(len(self.buckets), -1), self.buckets, strict=True):
            if isinstance(bucket.options.lr, Tensor):
                row[0].copy_(bucket.options.lr)
        return hyper, grad_scale.to(torch.float64), self.true if commit is None else commit

    def _count_rowless(self, commit: Tensor) -> None:
        if self.rowless:
            torch._foreach_add_(self.rowless, commit.to(torch.float32))

    def _lay_out(self) -> None:
        """Sort the rows into parts, and compile what they need, so that no kernel fails after another has written."""
        with guard(self.device):
            self.adapts = [bucket.options.adapt for bucket in self.buckets]
            self.parts = [Part(self.buckets, places) for places in alike(self.buckets)]
            for part in self.parts:
                part.square_sums(compile_only=True)
                hyper = self.hyper.of(numbers(self.buckets))
                part.moments(hyper, self.one, self.true, compile_only=True)
                part.apply(hyper, self.true, compile_only=True)


class Part:
    """Rows that the same compiled kernels serve, those that adapt first: the second pass leaves the others out."""

    def __init__(self, buckets: list[Bucket[LambOptions]], places: list[Place]) -> None:
        from bighorn.kernels.triton import lamb_kernels

        self.kernels, self.buckets, device = lamb_kernels, buckets, buckets[0].norms.device
        self.places = sorted(places, key=lambda place: not buckets[place[0]].options.adapt)
        rows, owners = layout(buckets, self.places)
        self.chunks = len(owners)
        self.adapted = sum(buckets[self.places[row][0]].options.adapt for row in owners)
        self.rows = table(list(itertools.chain.from_iterable(rows)), torch.int64, device)
        self.owners = table(owners, torch.int32, device)
        self.sums = torch.empty(2 * self.chunks, dtype=torch.float64, device=device)
        self.factors = torch.empty(lamb_kernels.FACTOR.value * len(rows), dtype=torch.float64, device=device)
        self.addresses = Mirror(torch.int64, device)
        self.strays = [k for k, (x, g) in enumerate(self._pairs()) if in_order_of(x, g) is not g]
        self.copies: list[Tensor] = []
        self.find_gradients()

        (index, i), (x, g) = self.places[0], self._pairs()[0]
        self.constants = constants(x.dtype, g.dtype, buckets[index].state["exp_avg"][i].dtype, buckets[index].options)

    def find_gradients(self) -> None:
        """Where this step's gradients lie, in the order of their parameters, goes to the device if it is news there."""
        pairs = self._pairs()
        grads = [g for _, g in pairs]
        self.copies = [in_order_of(*pairs[k]) for k in self.strays]
        for k, copy in zip(self.strays, self.copies, strict=True):
            grads[k] = copy
        self.grads = self.addresses.of([g.data_ptr() for g in grads])

    def square_sums(self, *, compile_only: bool = False) -> Tensor:
        """The sum of the gradients' squares for each chunk, float64."""
        sums = torch.empty(self.chunks, dtype=torch.float64, device=self.sums.device)
        kernel, tables = self.kernels.lamb_square_sums, (self.rows, self.grads, self.owners, sums)
        launch(kernel, self.chunks, tables, self.constants, compile_only=compile_only)
        return sums

    def moments(self, hyper: Tensor, scale: Tensor, commit: Tensor, *, compile_only: bool = False) -> None:
        """The first pass: moments, and the sums of the squares of x and u for each chunk."""
        keep(self.rows, self.owners, self.sums, self.factors)
        tables = self.rows, self.grads, self.owners, hyper, scale, commit, self.sums, self.factors
        launch(self.kernels.lamb_moments, self.chunks, tables, self.constants, compile_only=compile_only)

    def row_sums(self) -> Tensor:
        """These sums for each row, flat: of x, of u, and so on."""
        sums = self.sums.view(-1, 2)
        return torch.segment_reduce(sums, "sum", lengths=self.owners.bincount(minlength=len(self.places))).view(-1)

    def take_row_sums(self, sums: Tensor) -> None:
        """Go on with these sums instead: they stand where each row's first chunk has its own."""
        firsts = torch.searchsorted(self.owners, torch.arange(len(self.places), device=sums.device, dtype=torch.int32))
        self.sums.zero_().view(-1, 2)[firsts] = sums.view(-1, 2)

    def apply(self, hyper: Tensor, commit: Tensor, *, compile_only: bool = False) -> None:
        """Each tensor's decision, then x."""
        rows, owners, sums, factors = self.rows, self.owners, self.sums, self.factors
        for kernel, programs, tables in (
            (self.kernels.lamb_norms, len(self.places), (rows, hyper, commit, sums, factors)),
            (self.kernels.lamb_apply, self.adapted, (rows, owners, hyper, commit, factors)),
        ):
            if programs:
                launch(kernel, programs, tables, self.constants, compile_only=compile_only)
        self.copies = []

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.buckets[index].params[i], self.buckets[index].grads[i]) for index, i in self.places]


def alike(buckets: list[Bucket[LambOptions]]) -> list[list[Place]]:
    """The rows of all buckets, sorted by what kernels are compiled for."""
    parts: dict[tuple[object, ...], list[Place]] = {}
    for index, bucket in enumerate(buckets):
        o, state = bucket.options, bucket.state["exp_avg"]
        for i, (x, g) in enumerate(zip(bucket.params, bucket.grads, strict=True)):
            key = x.dtype, g.dtype, state[i].dtype, o.decay_mode, o.second_moment == "amsgrad"
            parts.setdefault(key, []).append((index, i))
    return list(parts.values())


def constants(x: torch.dtype, g: torch.dtype, state: torch.dtype, options: LambOptions) -> dict[str, Any]:
    """What kernels are compiled for."""
    from bighorn.kernels.triton import lamb_kernels

    # A thread moves 16 bytes of the widest dtype: more of them, and the narrow ones pass through shared memory.
    narrow = all(dtype.itemsize == 2 for dtype in (x, g, state))
    narrow &= options.decay_mode != "l2"  # with 8 elements a thread, ptxas of CUDA 13.1 spills 8 bytes there
    return {
        **{name: lamb_kernels.TYPES[dtype] for name, dtype in (("X", x), ("G", g), ("S", state))},
        "DECAY_MODE": options.decay_mode,
        "AMSGRAD": options.second_moment == "amsgrad",
        "CHUNK": CHUNK,
        "BLOCK": lamb_kernels.LANES.value * (8 if narrow else 4),
    }


def layout(buckets: list[Bucket[LambOptions]], places: list[Place]) -> tuple[list[list[int]], list[int]]:
    """The table of rows, as `lamb_kernels.py` numbers its columns, and for each chunk its row."""
    rows: list[list[int]] = []
    owners: list[int] = []
    counted: set[int] = set()
    for index, i in places:
        bucket, first = buckets[index], len(owners)
        x, step = bucket.params[i], bucket.steps[i].data_ptr()
        tensors = [x, *(bucket.state[name][i] for name in ("exp_avg", "exp_avg_sq"))]
        v_max = bucket.state["max_exp_avg_sq"][i].data_ptr() if "max_exp_avg_sq" in bucket.state else 0
        # An empty tensor has a chunk too: its step is counted and its norms are written.
        owners += [len(rows)] * max(1, -(-x.numel() // CHUNK))
        addresses = [*(tensor.data_ptr() for tensor in tensors), v_max, step, bucket.norms[i].data_ptr()]
        rows.append([*addresses, step not in counted, index, x.numel(), first, len(owners)])
        counted.add(step)
    return rows, owners


def numbers(buckets: list[Bucket[LambOptions]]) -> list[float]:
    """The table of hyper-parameters, as `lamb_kernels.py` numbers its columns."""
    return [number for bucket in buckets for number in _row(bucket.options)]


def _row(o: LambOptions) -> list[float]:
    beta1, beta2 = o.betas
    adagrad, uncorrected = o.second_moment == "adagrad", not o.bias_correction
    return [
        0.0 if isinstance(o.lr, Tensor) else o.lr,  # a tensor is copied there, device to device
        beta1,
        1.0 if adagrad else beta2,
        1 - beta1 if o.grad_averaging else 1.0,
        1.0 if adagrad else 1 - beta2,
        -math.inf if uncorrected or not beta1 else math.log(beta1),
        -math.inf if uncorrected or adagrad or not beta2 else math.log(beta2),
        o.bias_correction == "lr",
        o.eps,
        o.weight_decay,
        -1.0 if o.maximize else 1.0,
        o.adapt,
        *(o.weight_norm_bounds or UNBOUNDED),
        *(o.trust_ratio_bounds or UNBOUNDED),
    ]
