"""LARS in Triton: the host side. Three launches step the whole model."""

from __future__ import annotations

from bighorn.kernels.options import LarsOptions
from bighorn.kernels.triton.layerwise import LayerLaunchGroup, LayerwiseStepper


class LarsLaunchGroup(LayerLaunchGroup[LarsOptions]):
    """Rows that share compiled kernels."""

    first = ("lars_norms",)
    second = "lars_ratio", "lars_apply"


class Lars(LayerwiseStepper[LarsOptions]):
    """LARS for some buckets on one device."""

    group = LarsLaunchGroup
