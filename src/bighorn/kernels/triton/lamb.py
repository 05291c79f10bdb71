"""LAMB in Triton, the host's side: three launches for the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels.bucket import Bucket, LambOptions
from bighorn.kernels.triton import stepper
from bighorn.kernels.triton.device import guard
from bighorn.kernels.triton.stepper import CHUNK, Part, Place, Stepper

UNBOUNDED = (0.0, math.inf)


def why_not(param: Tensor, options: LambOptions) -> str | None:
    """Why this backend cannot serve such a tensor, or None."""
    reason = stepper.why_not(param, options)
    if options.cautious and not reason:
        return "cautious updates are not in Triton: they would take one more pass over each tensor"
    if options.blocks and not reason:
        return "LAMB's moments in blocks (float16, int8) are not in Triton"
    return reason


class LambPart(Part[LambOptions]):
    """Rows that adapt come first: the second pass leaves the others out."""

    def __init__(self, buckets: list[Bucket[LambOptions]], places: list[Place]) -> None:
        from bighorn.kernels.triton import lamb_kernels

        self.kernels = lamb_kernels
        super().__init__(buckets, sorted(places, key=lambda place: not buckets[place[0]].options.adapt))
        adapts = [buckets[index].options.adapt for index, _ in self.places]
        self.adapted = sum(stepper.chunks(x) for x, adapting in zip(self.params, adapts, strict=True) if adapting)
        self.sums = torch.empty(2 * len(self.owners), dtype=torch.float64, device=self.device)
        factors = lamb_kernels.FACTOR.value * len(self.places)
        self.factors = torch.empty(factors, dtype=torch.float64, device=self.device)

    @staticmethod
    def kind(options: LambOptions) -> tuple[object, ...]:
        """As `Part.kind`."""
        return options.decay_mode, options.second_moment == "amsgrad"

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: LambOptions) -> dict[str, Any]:
        """As `Part.compiled_for`; both moments have one dtype."""
        from bighorn.kernels.triton.common_kernels import LANES, TYPES

        # A thread moves 16 bytes of the widest dtype: more of them, and the narrow ones pass through shared memory.
        narrow = all(dtype.itemsize == 2 for dtype in (x, g, m))
        narrow &= options.decay_mode != "l2"  # with 8 elements a thread, ptxas of CUDA 13.1 spills 8 bytes there
        return {
            **{name: TYPES[dtype] for name, dtype in (("X", x), ("G", g), ("S", m))},
            "DECAY_MODE": options.decay_mode,
            "AMSGRAD": options.second_moment == "amsgrad",
            "CHUNK": CHUNK,
            "BLOCK": LANES.value * (8 if narrow else 4),
        }

    def own_columns(self) -> list[list[int]]:
        """As `Part.own_columns`: `lamb_kernels.py` numbers them."""
        states = [(self.buckets[index].state, i) for index, i in self.places]
        names = "exp_avg_sq", "max_exp_avg_sq"
        return [[state[name][i].data_ptr() if name in state else 0 for name in names] for state, i in states]

    def step(self, hyper: Tensor, scale: Tensor, commit: Tensor, *, compile_only: bool = False) -> None:
        """One LAMB step."""
        self.moments(hyper, scale, commit, compile_only=compile_only)
        self.apply(hyper, commit, compile_only=compile_only)

    def moments(self, hyper: Tensor, scale: Tensor, commit: Tensor, *, compile_only: bool = False) -> None:
        """The first pass: moments, and the sums of the squares of x and u for each chunk."""
        tables = self.rows, self.grads, self.owners, hyper, scale, commit, self.sums, self.factors
        self.launch(self.kernels.lamb_moments, len(self.owners), tables, compile_only)

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
        self.launch(self.kernels.lamb_norms, len(self.places), (rows, hyper, commit, sums, factors), compile_only)
        self.launch(self.kernels.lamb_apply, self.adapted, (rows, owners, hyper, commit, factors), compile_only)


class Lamb(Stepper[LambOptions]):
    """LAMB for some buckets on one device."""

    PART = LambPart

    def lay_out(self) -> None:
        """As `Stepper.lay_out`, for these decisions which buckets adapt."""
        self.adapts = [bucket.options.adapt for bucket in self.buckets]
        super().lay_out()

    def prepare(self) -> None:
        """As `Stepper.prepare`; weight decay may have switched adaptation on or off."""
        if self.adapts != [bucket.options.adapt for bucket in self.buckets]:
            self.lay_out()
        super().prepare()

    def rounds(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> Iterator[Tensor]:
        """One step of shards, as `reference.Lamb.rounds`: one round, of the sums of squares of x and u."""
        parts = [part for part in self.parts if isinstance(part, LambPart)]
        with guard(self.device):
            hyper, scale, commit = self.on_device(grad_scale, commit)
            for part in parts:
                part.moments(hyper, scale, commit)
            sums = torch.cat([self.none, *(part.row_sums() for part in parts)])
        yield sums
        with guard(self.device):
            for part, own in zip(parts, torch.split(sums, [2 * len(part.places) for part in parts]), strict=True):
                part.take_row_sums(own)
                part.apply(hyper, commit)
            self.finish(commit)

    @staticmethod
    def numbers(options: LambOptions) -> list[float]:
        """As `Stepper.numbers`: `lamb_kernels.py` numbers the columns."""
        o, (beta1, beta2) = options, options.betas
        adagrad, uncorrected = o.second_moment == "adagrad", not o.bias_correction
        return [
            beta1,
            1.0 if adagrad else beta2,
            1 - beta1 if o.grad_averaging else 1.0,
            1.0 if adagrad else 1 - beta2,
            -math.inf if uncorrected or not beta1 else math.log(beta1),
            -math.inf if uncorrected or adagrad or not beta2 else math.log(beta2),
            o.bias_correction == "lr",
            o.eps,
            o.adapt,
            *(o.weight_norm_bounds or UNBOUNDED),
            *(o.trust_ratio_bounds or UNBOUNDED),
        ]
