"""Training and test samples in memory, and the selection of the samples of each step."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Samples along dimension 0 of each tensor.

    Attributes:
        description: The source of the data, as text.
        inputs: Training inputs as stored (images as bytes, characters as numbers); the model normalises.
        targets: Training classes, one or several per sample, any integer type.
        test_inputs: The same for the test.
        test_targets: The same for the test.
        classes: Number of classes.
    """

    description: str
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int

    def __len__(self) -> int:
        return len(self.inputs)

    def fingerprint(self) -> str:
        """Return a digest of the training data, by which a resumed run detects other data."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets):
            digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def held_out(self, share: float, most: int = 2**17) -> "Dataset":
        """Return the training data with a fixed random ``share`` of them as the test, for choosing learning rates.

        Of the share, only samples with up to ``most`` targets in all are used, since more would not be more accurate.
        """
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        held, kept = order[: int(share * len(self))], order[int(share * len(self)) :]
        held = held[: max(1, most // self.targets[0].numel())]
        return Dataset(
            f"{self.description}, {share:.0%} of the training data held out",
            self.inputs[kept],
            self.targets[kept],
            self.inputs[held],
            self.targets[held],
            self.classes,
        )


def batch_indices(seed: int, step: int, batch_size: int, samples: int) -> Tensor:
    """Return the samples of a step, counted from 0, in an endless stream of epochs, each with another random order.

    They depend only on the arguments, so that a checkpoint stores no state of them.

    Batches are always full: one that extends past the end of an epoch continues with the next.

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
