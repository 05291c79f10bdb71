"""Learning rates and schedules for another batch size."""

from __future__ import annotations

import math
from collections.abc import Callable

from bighorn.schedules._checks import check_length, check_value
from bighorn.schedules._decay import Polynomial
from bighorn.schedules._schedule import Schedule

RULES: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "linear": float}
"""The rules by which the learning rate grows with the batch."""


def scaled_lr(base_lr: float, base_batch: int, batch: int, rule: str = "sqrt") -> float:
    """Scale a learning rate that was tuned at `base_batch` to the batch size `batch`.

    Args:
        base_lr: A learning rate.
        base_batch: The samples per step that it is meant for.
        batch: The samples per step to use.
        rule: "sqrt" multiplies the learning rate by the square root of batch / base_batch, as LAMB's authors do;
            "linear" by batch / base_batch itself. Default: "sqrt".

    Example:
        >>> scaled_lr(0.01, base_batch=256, batch=4096), scaled_lr(0.01, base_batch=256, batch=4096, rule="linear")
        (0.04, 0.16)
    """
    if rule not in list(RULES):  # rule may be of a type that is not hashable
        raise ValueError(f"rule={rule!r} is not known: use {' or '.join(map(repr, RULES))}")
    growth = check_length("batch", batch) / check_length("base_batch", base_batch)
    return check_value("base_lr", base_lr) * RULES[rule](growth)


def large_batch(
    base_lr: float, base_batch: int, batch: int, *, steps: int, base_warmup: float, rule: str = "sqrt"
) -> Schedule:
    """Derive the schedule for `batch` from values that were tuned at `base_batch`, as LAMB's authors do.

    The learning rate grows by the square root of the batch and the warm-up's share of the run grows linearly, so that
    at a fixed number of epochs the warm-up always takes the same number of steps. Linear decay to 0 follows. Nothing is
    tuned for the new batch.

    Source: You et al., arXiv:1904.00962v5, section 4.3 with Table 4 (BERT) and Table 5 (ResNet-50); the decay,
    lr * (1 - t / T), is from section 4.1. The paper does not specify where t starts; here, it starts at the end of the
    warm-up.

    Args:
        base_lr: The peak learning rate that was tuned at `base_batch`.
        base_batch: Samples per step that `base_lr` and `base_warmup` are meant for.
        batch: Samples per step of this run.
        steps: Steps of this run, warm-up included.
        base_warmup: The share of the run that is warm-up at `base_batch`, at least 0 and below 1.
        rule: The rule by which the learning rate grows: "sqrt", as in the paper, or "linear". Default: "sqrt".

    Raises:
        ValueError: A value is out of range, or at this batch the warm-up would fill the run.

    Example:
        Three columns of Table 4: at batches 512, 4K and 32K the learning rates 5 / (2^3 * 10^3), 5 / (2^1.5 * 10^3)
        and 5 / (2^0 * 10^3), and warm-up for 1/320, 1/40 and 1/5 of the steps.

        >>> for batch, steps in ((512, 1_000_000), (4096, 125_000), (32768, 15_625)):
        ...     schedule = large_batch(5 / (2**3 * 10**3), 512, batch, steps=steps, base_warmup=1 / 320)
        ...     print(batch, round(schedule.first.lr, 6), f"1/{steps // schedule.at}")
        512 0.000625 1/320
        4096 0.001768 1/40
        32768 0.005 1/5
    """
    lr = scaled_lr(base_lr, base_batch, batch, rule)
    share = check_value("base_warmup", base_warmup) * batch / base_batch
    warmup_steps = round(share * check_length("steps", steps))
    if warmup_steps >= steps:
        raise ValueError(
            f"base_warmup={base_warmup!r} of the run at batch {base_batch} becomes {share:g} of it at batch {batch}, "
            f"which leaves no step of {steps}: take a smaller batch or a shorter warm-up"
        )
    return Polynomial(lr, steps - warmup_steps).after_warmup(warmup_steps)
