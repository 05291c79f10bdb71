"""The order of the data as a function of the seed and the step alone: nothing to save, nothing to resume."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(samples, generator=generator)


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
