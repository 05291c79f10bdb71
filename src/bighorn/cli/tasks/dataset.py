"""Training and test samples in memory."""

import hashlib
from dataclasses import dataclass

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
