"""A multilayer perceptron on a table of scikit-learn: breast_cancer, wine, iris or digits, by --data NAME."""

import sklearn.datasets
import torch
from torch import nn

from bighorn_workbench.tasks import Classification


class Tabular(Classification):
    """A table of scikit-learn, each column with mean 0 and variance 1."""

    batch_size = 32
    batch_sizes = (16, 64)
    epochs = 30.0
    target = 0.95
    one_thread = True

    def __init__(self, data: str = "breast_cancer") -> None:
        table = getattr(sklearn.datasets, f"load_{data}")()
        order = torch.randperm(len(table.data), generator=torch.Generator().manual_seed(0))
        inputs = torch.tensor(table.data, dtype=torch.float32)[order]
        targets = torch.tensor(table.target)[order]
        cut = len(inputs) // 5
        mean, scale = inputs[cut:].mean(0), inputs[cut:].std(0).clamp(min=1e-6)
        inputs = (inputs - mean) / scale
        self.sizes = inputs.shape[1], int(targets.max()) + 1
        super().__init__((inputs[cut:], targets[cut:]), (inputs[:cut], targets[:cut]), f"scikit-learn's {data}")

    def model(self) -> nn.Module:
        """Two hidden layers."""
        width, classes = self.sizes
        return nn.Sequential(
            nn.Linear(width, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
        )
