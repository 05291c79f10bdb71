"""MNIST read row by row by a recurrent network: large batches with few layers, each of which is used many times.

    bighorn compare --task workbench/benchmarks/mnist_rows.py:MnistRows --data DIR

DIR holds MNIST's four idx files.
"""

from torch import Tensor, nn

from bighorn_workbench.builtin_tasks.mnist import Mnist


class MnistRows(Mnist):
    """The images at half their size, 14 rows of 14 pixels."""

    batch_sizes: tuple[int, ...] = (256, 4096, 16384)
    one_thread = False
    target = 0.95

    def model(self) -> nn.Module:
        """Build an LSTM whose last state is classified."""
        return RowReader(self.classes)


class RowReader(nn.Module):
    """An LSTM over the rows of an image; pixels are 0 to 255."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTM(14, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map ``[batch, 28, 28]`` pixels to ``[batch, classes]`` logits."""
        rows = nn.functional.avg_pool2d(pixels.to(self.head.weight.dtype) / 128 - 0.25, 2)
        states, _ = self.lstm(rows)
        logits: Tensor = self.head(states[:, -1])
        return logits
