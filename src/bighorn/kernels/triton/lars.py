"""LARS in Triton: the host side. Three launches step the whole model."""

from __future__ import annotations

from typing import ClassVar

from bighorn.kernels.options import LarsOptions
from bighorn.kernels.triton.layerwise import LayerLaunchGroup, LayerwiseStepper


class LarsLaunchGroup(LayerLaunchGroup[LarsOptions]):
    """Rows that share compiled kernels."""

    first: ClassVar = {"lars_norms": "chunk"}
    second: ClassVar = {"lars_ratio": "row", "lars_apply": "chunk"}


class Lars(LayerwiseStepper[LarsOptions]):
    """LARS for some buckets on one device."""

    group = LarsLaunchGroup
