"""A model of timm on a folder of images, which has a folder for each class.

bighorn compare --task images.py:Images --data FOLDER
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bighorn_workbench.tasks import to_device

MODEL, SIZE, WORKERS = "resnet18", 64, 0


def read(samples: list[tuple[Path, int]]) -> tuple[Tensor, Tensor]:
    """Read the images of a batch."""
    pixels = [np.array(Image.open(path).convert("RGB").resize((SIZE, SIZE))) for path, _ in samples]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor([n for _, n in samples])


class Images:
    """Of the images, eight tenths for training, mirrored at random, and one each for validation and test."""

    metric, batch_size, batch_sizes, epochs = "accuracy", 32, (32, 128), 10.0

    def __init__(self, data: str) -> None:
        classes = sorted(path for path in Path(data).iterdir() if path.is_dir())
        images = [(path, number) for number, folder in enumerate(classes) for path in sorted(folder.iterdir())]
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
        images, a, b = [images[index] for index in order], int(0.8 * len(images)), int(0.9 * len(images))
        self.splits = {"train": images[:a], "validation": images[a:b], "test": images[b:]}
        self.classes, self.description = len(classes), f"{len(images):,} images of {data}"

    def model(self) -> nn.Module:
        made: nn.Module = timm.create_model(MODEL, num_classes=self.classes)
        return made

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> Iterable[tuple[Tensor, Tensor]]:
        train, images = split == "train", self.splits[split]
        own = {"num_workers": WORKERS, "collate_fn": read, "drop_last": train, "generator": generator}
        return DataLoader(images, batch_size, shuffle=train, **own)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        images = torch.where(torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5, images.flip(3), images)
        return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        device, right = next(model.parameters()).device, 0
        for batch in self.batches(split, 100, torch.Generator()):
            images, labels = to_device(batch, device)
            right += int((model(images).argmax(1) == labels).sum())
        return {"accuracy": right / len(self.splits[split])}
