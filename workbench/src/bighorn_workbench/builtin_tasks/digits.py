"""Handwritten digits, 8 x 8 pixels, from scikit-learn. The task trains in seconds and needs no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bighorn_workbench.errors import InputError
from bighorn_workbench.tasks import Classification


class Digits(Classification):
    """1,797 images, a fixed random fifth of them as the test."""

    batch_size = 128
    epochs = 20.0
    batch_sizes = (32, 256, 1024)
    one_thread = True
    target = 0.95

    def __init__(self, data: str | None = None) -> None:
        if data is not None:
            raise InputError(f"--data {data}: the task digits has its data built in. Leave --data out.")
        table = _table()
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
        inputs, targets = table[order, :-1], table[order, -1]
        cut = len(order) // 5
        super().__init__((inputs[cut:], targets[cut:]), (inputs[:cut], targets[:cut]), "scikit-learn's digits")

    def model(self) -> nn.Module:
        """Build a multilayer perceptron with dropout."""
        return Perceptron(classes=10)


def _table() -> Tensor:
    """Return the pixels and the digit of each image: scikit-learn's file, whose package takes seconds to import."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return torch.from_numpy(np.loadtxt(path, np.float32, delimiter=",")).to(torch.uint8)


class Perceptron(nn.Module):
    """Two normalised hidden layers of 128; pixels are 0 to 16."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(64, 128, bias=False)
        self.norm1 = nn.LayerNorm(128)
        self.hidden2 = nn.Linear(128, 128, bias=False)
        self.norm2 = nn.LayerNorm(128)
        self.head = nn.Linear(128, classes)
        self.dropout = nn.Dropout(0.1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map ``[batch, 64]`` pixels to ``[batch, classes]`` logits."""
        x = pixels.to(self.head.weight.dtype) / 8 - 1
        x = self.dropout(self.norm1(self.hidden1(x)).relu())
        x = self.dropout(self.norm2(self.hidden2(x)).relu())
        logits: Tensor = self.head(x)
        return logits
