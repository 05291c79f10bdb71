"""Schedules: a learning rate or a weight decay by step, counted from 0.

A schedule is a small frozen dataclass that is called with the step. It has no state, so it can be shared between
groups, compared, hashed, copied and pickled; its repr is the code that constructs it. Any other callable from the step
to a number can be used in place of a schedule.

In the formulas s is the step and D is `decay_steps`.

Example:
    >>> from bighorn.schedules import Cosine
    >>> schedule = Cosine(lr=0.1, decay_steps=4).after_warmup(2)
    >>> [round(lr, 3) for lr in schedule.as_list(8)]
    [0.05, 0.1, 0.1, 0.085, 0.05, 0.015, 0.0, 0.0]
"""

from __future__ import annotations

from bighorn.schedules._decay import Cosine, Exponential, Inverse, NaturalExp, Polynomial, RelativeStep
from bighorn.schedules._large_batch import large_batch, scaled_lr
from bighorn.schedules._schedule import Chain, Scaled, Schedule, WarmUp
from bighorn.schedules._values import PiecewiseConstant, Values

__all__ = [
    "Chain",
    "Cosine",
    "Exponential",
    "Inverse",
    "NaturalExp",
    "PiecewiseConstant",
    "Polynomial",
    "RelativeStep",
    "Scaled",
    "Schedule",
    "Values",
    "WarmUp",
    "large_batch",
    "scaled_lr",
]
