"""LAMB in Triton: the host side. Four launches step the whole model."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels.bucket import Bucket
from bighorn.kernels.options import LambOptions
from bighorn.kernels.triton.launch_group import GradientLayouts, RowIndex, constants_of
from bighorn.kernels.triton.layerwise import FORMS, LayerLaunchGroup, LayerwiseStepper
from bighorn.kernels.triton.tables import Uploads

UNBOUNDED = (0.0, math.inf)


class LambLaunchGroup(LayerLaunchGroup[LambOptions]):
    """Rows that share compiled kernels. Rows of the second pass come first.

    It omits rows without a trust ratio, unless updates are cautious: their share of elements is known after the first.
    """

    def __init__(
        self, buckets: list[Bucket[LambOptions]], indices: list[RowIndex], layouts: GradientLayouts, uploads: Uploads
    ) -> None:
        waits = [bucket.options.adapt or bucket.options.cautious for bucket in buckets]
        waiting_first = sorted(indices, key=lambda index: not waits[index[0]])
        super().__init__(buckets, waiting_first, layouts, uploads)
        self.waiting_chunks = sum(itertools.compress(self.chunks, [waits[index] for index, _ in self.indices]))

    def sizes(self) -> tuple[int, int]:
        """See `LayerLaunchGroup.sizes`."""
        sums = self.layout.CAUTIOUS_SUM if self.constants["CAUTIOUS"] else self.layout.SUM
        return sums.value, self.layout.FACTOR.value

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

    def first(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool) -> None:
        """See `LayerLaunchGroup.first`: moments, and the sums of each chunk."""
        rows, grads, program_to_row, sums, factors = self.rows, self.grads, self.program_to_row, self.sums, self.factors
        self.launch(
            self.kernels.lamb_factors, len(self.indices), (rows, grads, options, apply_mask, factors), compile_only
        )
        tables = rows, grads, program_to_row, options, scale, apply_mask, sums, factors
        self.launch(self.kernels.lamb_moments, self.program_to_row.numel(), tables, compile_only)

    def second(
        self, options: Tensor, scale: Tensor, apply_mask: Tensor, totals: Tensor | None, *, compile_only: bool
    ) -> None:
        """See `LayerLaunchGroup.second`: each tensor's trust ratio, then x."""
        rows, grads, program_to_row, factors = self.rows, self.grads, self.program_to_row, self.factors
        tables = rows, grads, options, apply_mask, self.sums if totals is None else totals, factors
        self.launch(self.kernels.lamb_norms, len(self.indices), tables, compile_only, PER_CHUNK=totals is None)
        second = rows, grads, program_to_row, options, apply_mask, factors, scale
        self.launch(self.kernels.lamb_apply, self.waiting_chunks, second, compile_only)


class Lamb(LayerwiseStepper[LambOptions]):
    """LAMB for some buckets on one device."""

    layout_options = ("rounding_seed", "adapt")  # weight decay can switch the trust ratio on and off

    group = LambLaunchGroup

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
