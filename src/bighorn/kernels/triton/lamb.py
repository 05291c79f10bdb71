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
from bighorn.kernels.triton.device import unsupported
from bighorn.kernels.triton.launch_group import (
    CHUNK,
    GradientLayouts,
    LaunchGroup,
    RowIndex,
    constants_of,
    shard_of,
)
from bighorn.kernels.triton.stepper import Stepper
from bighorn.kernels.triton.tables import Uploads

UNBOUNDED = (0.0, math.inf)

FORMS = {torch.int8: ("signed", "unsigned"), torch.float16: ("half", "half_root")}
"""The forms of both moments in blocks, as `codec_kernels.py` names them."""


def unsupported_reason(param: Tensor, options: LambOptions) -> str | None:
    """The reason why this backend cannot serve a tensor, or None."""
    reason = unsupported(param)
    if options.blocks and param.dtype == torch.float64:
        return "its dtype is torch.float64, and moments in blocks are decoded to float32 in Triton"
    if (
        options.blocks
        and not reason
        and max(math.prod(param.shape[1:]), math.prod(codec.scales_shape(param.shape))) >= 2**31
    ):
        return "moments in blocks are counted in 32 bits in Triton: it has too many, or too many elements in a row"
    return reason


class LambLaunchGroup(LaunchGroup[LambOptions]):
    """Rows that share compiled kernels. Rows of the second pass come first.

    It omits rows without a trust ratio, unless updates are cautious: their share of elements is known after the first.
    """

    def __init__(
        self, buckets: list[Bucket[LambOptions]], indices: list[RowIndex], layouts: GradientLayouts, uploads: Uploads
    ) -> None:
        from bighorn.kernels.triton import lamb_kernels, lamb_layout

        self.columns, self.kernels = lamb_layout, lamb_kernels
        self.sharded = any(bucket.shards for bucket in buckets)
        waits = [bucket.options.adapt or bucket.options.cautious for bucket in buckets]
        waiting_first = sorted(indices, key=lambda index: not waits[index[0]])
        super().__init__(buckets, waiting_first, layouts, uploads)
        self.second = sum(itertools.compress(self.chunks, [waits[index] for index, _ in self.indices]))
        self.width = (self.columns.CAUTIOUS_SUM if self.constants["CAUTIOUS"] else self.columns.SUM).value
        self.sums = torch.empty(self.width * self.program_to_row.numel(), dtype=torch.float64, device=self.device)
        factors = self.columns.FACTOR.value * len(self.indices)
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
            "CAUTIOUS": options.cautious,
            "G_AGAIN": TYPES[g] if options.cautious else None,
            "BLOCK": LANES.value * (8 if narrow or options.blocks else 4),
        }

    @staticmethod
    def chunks_of(x: Tensor, options: LambOptions) -> int:
        """See `LaunchGroup.chunks_of`; all blocks of codes count as full ones."""
        codes = math.prod(codec.scales_shape(x.shape)) * codec.BLOCK
        return max(1, -(-(codes if options.blocks else x.numel()) // CHUNK))

    def own_columns(self) -> list[list[int]]:
        """See `LaunchGroup.own_columns`; `lamb_layout.py` numbers the columns."""
        states, names = [(self.buckets[index].state, i) for index, i in self.indices], self.columns.ADDRESSES
        addresses = [[state[name][i].data_ptr() if name in state else 0 for name in names] for state, i in states]
        sizes = [shard_of(self.buckets[index], i).numel for index, i in self.indices]
        return [[*row, size] for row, size in zip(addresses, sizes, strict=True)]

    def step(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False) -> None:
        """Make one LAMB step."""
        if self.sharded:  # without other ranks, all sums are complete
            for _ in self.sharded_step(options, scale, apply_mask, compile_only=compile_only):
                pass
            return
        self.moments(options, scale, apply_mask, compile_only=compile_only)
        self.apply(options, scale, apply_mask, compile_only=compile_only)

    def sharded_step(
        self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False
    ) -> Iterator[Tensor]:
        """See `LaunchGroup.sharded_step`; the sums of a tensor's chunks are added up together."""
        self.moments(options, scale, apply_mask, compile_only=compile_only)
        first, stop = self.common.FIRST.value, self.common.STOP.value
        totals = self.shard_totals(apply_mask, first, stop, self.width, self.width, compile_only)
        yield totals
        self.apply(options, scale, apply_mask, totals, compile_only=compile_only)

    def moments(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False) -> None:
        """Run the first pass: moments, and the sums of each chunk."""
        rows, grads, program_to_row, sums, factors = self.rows, self.grads, self.program_to_row, self.sums, self.factors
        self.launch(
            self.kernels.lamb_factors, len(self.indices), (rows, grads, options, apply_mask, factors), compile_only
        )
        tables = rows, grads, program_to_row, options, scale, apply_mask, sums, factors
        self.launch(self.kernels.lamb_moments, self.program_to_row.numel(), tables, compile_only)

    def apply(
        self,
        options: Tensor,
        scale: Tensor,
        apply_mask: Tensor,
        totals: Tensor | None = None,
        *,
        compile_only: bool = False,
    ) -> None:
        """Compute each tensor's trust ratio from its sums, which are those of all ranks for a shard, then step x."""
        rows, grads, program_to_row, factors = self.rows, self.grads, self.program_to_row, self.factors
        tables = rows, grads, options, apply_mask, self.sums if totals is None else totals, factors
        self.launch(self.kernels.lamb_norms, len(self.indices), tables, compile_only, PER_CHUNK=totals is None)
        second = rows, grads, program_to_row, options, apply_mask, factors, scale
        self.launch(self.kernels.lamb_apply, self.second, second, compile_only)


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
        return o.decay_mode, o.second_moment == "amsgrad", o.weight_rounding, o.blocks, o.cautious

    @staticmethod
    def option_values(options: LambOptions) -> list[float]:
        """See `Stepper.option_values`; `lamb_layout.py` numbers the columns."""
        o, (beta1, beta2) = options, options.betas
        adagrad, uncorrected = o.second_moment == "adagrad", not o.bias_correction
        return [
            beta1,
            1.0 if adagrad else beta2,
            1 - beta1 if o.grad_averaging else 1.0,
            1.0 if adagrad else 1 - beta2,
            0.0 if uncorrected else beta1,
            0.0 if uncorrected or adagrad else beta2,
            o.bias_correction == "lr",
            o.eps,
            o.adapt,
            *(o.weight_norm_bounds or UNBOUNDED),
            *(o.trust_ratio_bounds or UNBOUNDED),
        ]
