"""Training and test samples in memory, and which of them each step takes."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Samples along dimension 0 of each tensor.

    Attributes:
        description: Where the data come from, for people.
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
        """A digest of the training data, by which a resumed run knows that it sees the same."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets):
            digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def held_out(self, share: float, most: int = 2**17) -> "Dataset":
        """The training data alone, a fixed random ``share`` of them as the test: to choose a learning rate by.

        Of the share, as many are looked at as have ``most`` targets, since more would say no more.
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
    """The samples of a step, counted from 0, in an endless stream of epochs that are shuffled anew.

    They depend on the arguments alone, so that a checkpoint needs no state of them.

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
