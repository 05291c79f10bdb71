"""The compatibility layer of MindSpore: mindspore.nn, and the loss scale managers of mindspore.amp."""

from bighorn.compat._mindspore_lamb import Lamb
from bighorn.compat._mindspore_scaling import DynamicLossScaleManager, FixedLossScaleManager
from bighorn.compat._mindspore_schedules import (
    CosineDecayLR,
    ExponentialDecayLR,
    InverseDecayLR,
    NaturalExpDecayLR,
    PolynomialDecayLR,
    WarmUpLR,
)

__all__ = [
    "CosineDecayLR",
    "DynamicLossScaleManager",
    "ExponentialDecayLR",
    "FixedLossScaleManager",
    "InverseDecayLR",
    "Lamb",
    "NaturalExpDecayLR",
    "PolynomialDecayLR",
    "WarmUpLR",
]
