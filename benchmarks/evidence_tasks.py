"""Tasks of the comparison at equal tuning: `bighorn compare --task benchmarks/evidence_tasks.py:LeNet --data DIR`."""

from torch import Tensor, nn

from bighorn.cli.tasks.mnist import Mnist


class Scaled(nn.Module):
    """Map ``[batch, 28, 28]`` pixels to ``[batch, 1, 28, 28]`` numbers of about the size of 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Scale and centre."""
        return pixels.unsqueeze(1).float() / 128 - 0.25


class LeNet(Mnist):
    """LeNet-5 on MNIST, with rectifiers and maxima: 61,706 parameters, without norms and dropout."""

    def model(self) -> nn.Module:
        """Build the network."""
        return nn.Sequential(
            Scaled(),
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, self.classes),
        )
