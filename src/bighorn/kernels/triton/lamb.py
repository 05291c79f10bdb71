"""LAMB in Triton: the host side. Four launches step the whole model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels import codec
from bighorn.kernels.bucket import Bucket
from bighorn.kernels.options import LambOptions
from bighorn.kernels.triton import stepper
from bighorn.kernels.triton.launch_group import CHUNK, GradientLayouts, LaunchGroup, RowIndex, constants_of
from bighorn.kernels.triton.stepper import Stepper
from bighorn.kernels.triton.tables import Uploads

UNBOUNDED = (0.0, math.inf)

FORMS = {torch.int8: ("signed", "unsigned"), torch.float16: ("half", "half_root")}
"""The forms of both moments in blocks, as `codec_kernels.py` names them."""


def unsupported_reason(param: Tensor, options: LambOptions) -> str | None:
    """The reason why this backend cannot serve a tensor, or None."""
    reason = stepper.unsupported_reason(param, options)
    if options.cautious and not reason:
        return "cautious updates are not in Triton: they would take one more pass over each tensor"
    if (
        options.blocks
        and not reason
        and max(math.prod(param.shape[1:]), math.prod(codec.scales_shape(param.shape))) >= 2**31
    ):
        return "moments in blocks are counted in 32 bits in Triton: it has too many, or too many elements in a row"
    return reason


class LambLaunchGroup(LaunchGroup[LambOptions]):
    """Rows that share compiled kernels. Rows with a trust ratio come first, since the second pass omits the others."""

    def __init__(
        self, buckets: list[Bucket[LambOptions]], indices: list[RowIndex], layouts: GradientLayouts, uploads: Uploads
    ) -> None:
        from bighorn.kernels.triton import lamb_kernels

        self.kernels = lamb_kernels
        self.sharded = any(bucket.shards for bucket in buckets)
        adaptive_first = sorted(indices, key=lambda index: not buckets[index[0]].options.adapt)
        super().__init__(buckets, adaptive_first, layouts, uploads)
        adapts = [buckets[index].options.adapt for index, _ in self.indices]
        self.adapted = sum(itertools.compress(self.chunks, adapts))
        self.sums = torch.empty(2 * len(self.program_to_row), dtype=torch.float64, device=self.device)
        factors = lamb_kernels.FACTOR.value * len(self.indices)
        self.factors = torch.empty(factors, dtype=torch.float64, device=self.device)

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: LambOptions) -> dict[str, Any]:
        """See `LaunchGroup.compiled_for`; the dtype of the first moment determines that of the second."""
        from bighorn.kernels.triton.common_kernels import LANES, TYPES

        # A thread moves 16 bytes of the widest dtype: with more, the narrow ones would pass through shared memory.
        narrow = all(dtype.itemsize == 2 for dtype in (x, g, m))
        narrow &= options.decay_mode != "l2"  # with 8 elements a thread, ptxas of CUDA 13.1 spills 8 bytes there
        narrow &= options.weight_rounding == "nearest" and not options.blocks
        m_form, v_form = FORMS[m] if options.blocks else ("", "")
        return {
            **constants_of(x, g, m, options),
            "V": TYPES[torch.uint8 if m == torch.int8 else m],
            "M_FORM": m_form,
            "V_FORM": v_form,
            "DECAY_MODE": options.decay_mode,
            "AMSGRAD": options.second_moment == "amsgrad",
            "BLOCK": LANES.value * (8 if narrow else 4),
        }

    @staticmethod
    def chunks_of(x: Tensor, options: LambOptions) -> int:
        """See `LaunchGroup.chunks_of`; all blocks of codes count as full ones."""
        codes = math.prod(codec.scales_shape(x.shape)) * codec.BLOCK
        return max(1, -(-(codes if options.blocks else x.numel()) // CHUNK))

    def own_columns(self) -> list[list[int]]:
        """See `LaunchGroup.own_columns`; `lamb_kernels.py` numbers the columns."""
        states, names = [(self.buckets[index].state, i) for index, i in self.indices], self.kernels.ADDRESSES
        return [[state[name][i].data_ptr() if name in state else 0 for name in names] for state, i in states]

    def step(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False) -> None:
        """Make one LAMB step."""
        self.moments(options, scale, apply_mask, compile_only=compile_only)
        # A shard's totals are those of all ranks, which `sharded_step` passes; without other ranks, they are its own.
        totals = self.totals(apply_mask, compile_only=compile_only) if self.sharded else None
        self.apply(options, apply_mask, totals, compile_only=compile_only)

    def moments(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False) -> None:
        """Run the first pass: moments, and the sums of the squares of x and u for each chunk."""
        rows, grads, program_to_row, sums, factors = self.rows, self.grads, self.program_to_row, self.sums, self.factors
        self.launch(
            self.kernels.lamb_factors, len(self.indices), (rows, grads, options, apply_mask, factors), compile_only
        )
        tables = rows, grads, program_to_row, options, scale, apply_mask, sums, factors
        self.launch(self.kernels.lamb_moments, len(self.program_to_row), tables, compile_only)

    def totals(self, apply_mask: Tensor, *, compile_only: bool = False) -> Tensor:
        """Return these sums for each row, flat: of x, of u, and so on."""
        return self.shard_totals(apply_mask, self.common.FIRST.value, self.common.STOP.value, 2, compile_only)

    def apply(
        self, options: Tensor, apply_mask: Tensor, totals: Tensor | None = None, *, compile_only: bool = False
    ) -> None:
        """Compute each tensor's trust ratio from its sums, which are those of all ranks for a shard, then step x."""
        rows, grads, program_to_row, factors = self.rows, self.grads, self.program_to_row, self.factors
        tables = rows, grads, options, apply_mask, self.sums if totals is None else totals, factors
        self.launch(self.kernels.lamb_norms, len(self.indices), tables, compile_only, PER_CHUNK=totals is None)
        tables = rows, grads, program_to_row, options, apply_mask, factors
        self.launch(self.kernels.lamb_apply, self.adapted, tables, compile_only)


class Lamb(Stepper[LambOptions]):
    """LAMB for some buckets on one device."""

    layout_options = ("rounding_seed", "adapt")  # weight decay can switch the trust ratio on and off

    def launch_group(self, indices: list[RowIndex]) -> LambLaunchGroup:
        """See `Stepper.launch_group`."""
        return LambLaunchGroup(self.buckets, indices, self.gradient_layouts, self.uploads)

    @staticmethod
    def kind(bucket: Bucket[LambOptions], i: int) -> tuple[object, ...]:
        """See `Stepper.kind`."""
        del i
        o = bucket.options
        return o.decay_mode, o.second_moment == "amsgrad", o.weight_rounding, o.blocks

    def sharded_step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Make one step of shards, as `reference.Lamb.sharded_step`: one round, with the sums of squares of x and u."""
        groups = [group for group in self.groups if isinstance(group, LambLaunchGroup)]
        with self.guard:
            options, scale, apply_mask = self.on_device(grad_scale, apply_mask)
            for group in groups:
                group.moments(options, scale, apply_mask)
            sums = torch.cat([self.none, *(group.totals(apply_mask) for group in groups)])
        yield sums
        with self.guard:
            for group, own in zip(groups, torch.split(sums, [2 * len(group.indices) for group in groups]), strict=True):
                group.apply(options, apply_mask, own)
            self.finish(apply_mask)

    @staticmethod
    def option_values(options: LambOptions) -> list[float]:
        """See `Stepper.option_values`; `lamb_kernels.py` numbers the columns."""
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
