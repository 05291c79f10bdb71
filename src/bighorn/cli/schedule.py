"""Learning rate and samples as functions of seed and step alone: nothing to save, nothing to resume."""

import re
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from bighorn.cli.errors import InputError
from bighorn.schedules import Cosine, PiecewiseConstant, Polynomial, Schedule

DECAYS: dict[str, Callable[[float, int], Schedule]] = {
    "linear": Polynomial,  # of power 1, which the LAMB paper trains BERT with (arXiv:1904.00962v5, section 4.1)
    "cosine": Cosine,
    "constant": lambda peak, _: PiecewiseConstant([], [peak]),
}
"""What can follow the warm-up, from its first value and its number of steps."""


def warmup_steps(warmup: str, total: int) -> int:
    """Read a warm-up given as steps (``"200"``) or as a share of the run (``"10%"``).

    Example:
        >>> warmup_steps("10%", total=200), warmup_steps("15", total=200)
        (20, 15)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", warmup.strip())
    if match is None or (not match[2] and "." in match[1]) or (match[2] and float(match[1]) > 100):
        raise InputError(f"--warmup {warmup!r} is neither a number of steps (200) nor a share of the run (0% to 100%).")
    return round(float(match[1]) / 100 * total) if match[2] else int(match[1])


def learning_rate(name: str, total: int, warmup: int, peak: float) -> Schedule:
    """Linear warm-up to ``peak`` over ``warmup`` steps, then one of :data:`DECAYS` that would end at step ``total``.

    Args:
        name: What follows the warm-up.
        total: Steps of the whole run.
        warmup: Steps of the warm-up; may be as many as ``total``.
        peak: The highest learning rate.

    Example:
        >>> learning_rate("linear", total=6, warmup=2, peak=1.0).as_list(6)
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    decay_steps = max(total - warmup, 1)  # a run that is all warm-up never gets to its decay
    return DECAYS[name](peak, decay_steps).after_warmup(warmup)


def batch_indices(seed: int, step: int, batch_size: int, samples: int) -> Tensor:
    """The samples of a step, counted from 0, in the endless stream of newly shuffled epochs.

    Batches are always full: one that reaches past the end of an epoch goes on with the next.

    Example:
        >>> stream = torch.cat([batch_indices(seed=0, step=step, batch_size=3, samples=4) for step in range(4)])
        >>> [sorted(epoch.tolist()) for epoch in stream.split(4)]
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    """
    start = step * batch_size
    epochs = range(start // samples, (start + batch_size - 1) // samples + 1)
    stream = torch.cat([_epoch(seed, epoch, samples) for epoch in epochs])
    return stream[start % samples :][:batch_size]


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(samples, generator=generator)
