"""LARS in Triton: the host side. Three launches step the whole model."""

from __future__ import annotations

from torch import Tensor

from bighorn.kernels.options import LarsOptions
from bighorn.kernels.triton.layerwise import LayerLaunchGroup, LayerwiseStepper


class LarsLaunchGroup(LayerLaunchGroup[LarsOptions]):
    """Rows that share compiled kernels."""

    def sizes(self) -> tuple[int, int]:
        """See `LayerLaunchGroup.sizes`."""
        return self.layout.SUM.value, self.layout.FACTOR.value

    def first(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool) -> None:
        """See `LayerLaunchGroup.first`."""
        tables = self.rows, self.grads, self.program_to_row, options, scale, apply_mask, self.sums
        self.launch(self.kernels.lars_norms, self.program_to_row.numel(), tables, compile_only)

    def second(
        self, options: Tensor, scale: Tensor, apply_mask: Tensor, totals: Tensor | None, *, compile_only: bool
    ) -> None:
        """See `LayerLaunchGroup.second`."""
        sums = self.sums if totals is None else totals
        rows, grads, program_to_row, factors = self.rows, self.grads, self.program_to_row, self.factors
        tables = rows, grads, options, apply_mask, sums, factors
        self.launch(self.kernels.lars_ratio, len(self.indices), tables, compile_only, PER_CHUNK=totals is None)
        second = rows, grads, program_to_row, options, scale, apply_mask, factors
        self.launch(self.kernels.lars_apply, program_to_row.numel(), second, compile_only)


class Lars(LayerwiseStepper[LarsOptions]):
    """LARS for some buckets on one device."""

    group = LarsLaunchGroup

    @staticmethod
    def option_values(options: LarsOptions) -> list[float]:
        """See `Stepper.option_values`; `lars_layout.py` numbers the columns."""
        o = options
        norm_decay = o.weight_decay if o.denominator == "joint" else 0.0
        numbers = [o.momentum, o.trust_coefficient, o.eps, norm_decay]
        return [*numbers, o.adapt, o.trust_clip, o.lr_in_momentum, o.nesterov]
