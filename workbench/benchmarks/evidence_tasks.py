"""Tasks of the comparisons at equal tuning.

bighorn compare --task workbench/benchmarks/evidence_tasks.py:LeNet --data DIR
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bighorn_workbench.builtin_tasks.mnist import Mnist
from bighorn_workbench.builtin_tasks.text import CONTEXT, GPT, Text


class Scaled(nn.Module):
    """Map ``[batch, 28, 28]`` pixels to ``[batch, 1, 28, 28]`` numbers of about the size of 1.

    The strides are ``torch.channels_last``'s, with which these convolutions take up to half the time.
    """

    def forward(self, pixels: Tensor) -> Tensor:
        """Scale and centre."""
        return (pixels.unsqueeze(-1).float() / 128 - 0.25).permute(0, 3, 1, 2)


class LeNet(Mnist):
    """LeNet-5 on MNIST, with maxima and rectifiers: 61,706 parameters, without norms and dropout.

    A rectifier before the maximum gives the same numbers and gradients, and takes a third longer.
    """

    batch_size = 1024
    batch_sizes: tuple[int, ...] = (1024,)
    target = 0.98

    def model(self) -> nn.Module:
        """Build the network."""
        return nn.Sequential(
            Scaled(),
            nn.Conv2d(1, 6, 5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, self.classes),
        )


class OnTenth(Mnist):
    """The first 6,000 training images of MNIST, 8 epochs, tested on every second one of its test images."""

    batch_size = 60
    batch_sizes: tuple[int, ...] = (60, 300, 1500)
    epochs = 8.0
    target = 0.95

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.data = {
            "train": _rows(self.data["train"], slice(6000)),
            "test": _rows(self.data["test"], slice(0, None, 2)),
        }
        self.samples = len(self.data["train"][0])
        self.description = f"{self.samples:,} of MNIST's training images and {len(self.data['test'][0]):,} for the test"


class LeNetOnTenth(OnTenth, LeNet):
    """LeNet-5 on a tenth of MNIST."""


class Residual(nn.Module):
    """Two convolutions with batch norm beside the identity, or beside a projection where the size changes."""

    def __init__(self, channels: int, to: int) -> None:
        super().__init__()
        stride = 1 if channels == to else 2
        self.inner = nn.Sequential(
            nn.Conv2d(channels, to, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(to),
            nn.ReLU(),
            nn.Conv2d(to, to, 3, padding=1, bias=False),
            nn.BatchNorm2d(to),
        )
        self.around = nn.Identity() if stride == 1 else nn.Conv2d(channels, to, 1, stride, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add both."""
        return nn.functional.relu(self.inner(hidden) + self.around(hidden))


class ResNetOnTenth(OnTenth):
    """A ResNet-8 of 8, 16 and 32 channels with batch norm on a tenth of MNIST: 19,714 parameters."""

    def model(self) -> nn.Module:
        """Build the network; the first convolution has a stride of 2."""
        first = nn.Conv2d(1, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        blocks = Residual(8, 8), Residual(8, 16), Residual(16, 32)
        last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, self.classes)
        return nn.Sequential(Scaled(), *first, *blocks, *last)


class Characters(Text):
    """A GPT of 241,920 parameters, two blocks of width 96, on windows of 64 characters of a text, without dropout."""

    metric, higher_is_better = "loss", False
    batch_size = 8
    batch_sizes = (8, 32, 128)
    epochs = 0.15
    target = 2.5

    def model(self) -> nn.Module:
        """Build the GPT."""
        return GPT(self.classes, width=96, blocks=2, dropout=0.0)


class LargerCharacters(Characters):
    """A GPT of a million parameters, four blocks of width 144, on the same."""

    def model(self) -> nn.Module:
        """Build the GPT."""
        return GPT(self.classes, width=144, blocks=4, dropout=0.0)


class LittleText(LargerCharacters):
    """The same on the first 600 windows of the text, 38,400 characters: batches of 1/100 and 1/4 of them, 4 epochs."""

    epochs = 4.0
    target = 2.6

    def __init__(self, data: str | None = None) -> None:
        super().__init__(data)
        self.data = self.data | {"train": _rows(self.data["train"], slice(600))}
        self.samples = len(self.data["train"][0])
        self.description = f"the first {self.samples} windows of {self.description}"


class Encoder(nn.Module):
    """A bidirectional transformer: pre-norm layers, without dropout.

    Positions are fixed sines and cosines of the size of an embedding. With learned ones, as in BERT, the loss stays at
    the level of token counts for several times as many steps.
    """

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        angles = torch.arange(CONTEXT)[:, None] * 1000 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("positions", 0.02 * 2**0.5 * torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, codes: Tensor) -> Tensor:
        """Map ``[batch, context]`` tokens to ``[batch, context, tokens]`` logits of the tokens there."""
        logits: Tensor = self.head(self.layers(self.token(codes) + self.positions))
        return logits


class MaskedCharacters(Characters):
    """BERT's masked language model on the characters of a text: 1.8 million parameters, four layers of width 192.

    Of the characters of a window 30% are to be restored: 80% of the 30% are masked, 10% replaced, and 10% kept.
    """

    epochs = 0.65
    target = 2.8

    def model(self) -> nn.Module:
        """Build the encoder; the token after the characters is the mask."""
        return Encoder(self.classes + 1, width=192, layers=4)

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Return windows with masks, and the characters there, -100 where there is none to restore."""
        for codes, _ in super().batches(split, batch_size, generator):
            inputs = codes.long()
            chance, kind = (torch.rand(inputs.shape, generator=generator) for _ in range(2))
            other = torch.randint(self.classes, inputs.shape, generator=generator)
            seen = torch.where(kind < 0.8, self.classes, torch.where(kind < 0.9, other, inputs))
            chosen = chance < 0.3
            yield torch.where(chosen, seen, inputs), torch.where(chosen, inputs, -100)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross-entropy of the characters to restore, in nats, and the accuracy."""
        inputs, targets = batch
        chosen = targets >= 0
        logits, targets = model(inputs)[chosen].float(), targets[chosen]
        return cross_entropy(logits, targets), {"accuracy": (logits.argmax(1) == targets).float().mean()}


def _rows(pair: tuple[Tensor, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
    return pair[0][rows], pair[1][rows]
