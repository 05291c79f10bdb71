"""MNIST from a folder with its four idx files, gzipped or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bighorn_workbench.errors import InputError
from bighorn_workbench.tasks import Classification

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class Mnist(Classification):
    """60,000 images of 28 x 28 pixels and 10,000 for the test, or any set in the same format and size of image."""

    batch_size = 256
    epochs = 3.0
    batch_sizes: tuple[int, ...] = (256, 1024, 4096)
    target = 0.97

    def __init__(self, data: str | None = None) -> None:
        wanted = f"a folder with {', '.join(FILES)} (as they are or with .gz)"
        if data is None:
            raise InputError(f"--task mnist needs --data DIR: {wanted}.")
        folder = Path(data)
        if not folder.is_dir():
            raise InputError(f"--data {data} is not a folder; --task mnist needs {wanted}.")
        paths = [_find(folder, name) for name in FILES]
        missing = [name for name, path in zip(FILES, paths, strict=True) if path is None]
        if missing:
            raise InputError(f"--data {data} lacks {', '.join(missing)} (as they are or with .gz).")
        inputs, targets, test_inputs, test_targets = (
            read_idx(path, 3 if "idx3" in path.name else 1) for path in paths if path is not None
        )
        for name, images, labels in (("train", inputs, targets), ("t10k", test_inputs, test_targets)):
            if len(images) != len(labels) or not len(images):
                raise InputError(f"--data {data}: {len(images)} {name} images, but {len(labels)} labels.")
            if images.shape[1:] != (28, 28):
                raise InputError(f"--data {data}: {name} images of {tuple(images.shape[1:])} pixels, not (28, 28).")
        self.classes = 1 + max(int(targets.max()), int(test_targets.max()))
        super().__init__((inputs, targets), (test_inputs, test_targets), f"idx files, {len(inputs):,} images")

    def model(self) -> nn.Module:
        """Build a small convolutional network with dropout."""
        return ConvNet(self.classes)


class ConvNet(nn.Module):
    """Two convolutions and a hidden layer, each normalised; pixels are 0 to 255."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, 32)
        self.hidden = nn.Linear(32 * 7 * 7, 128, bias=False)
        self.norm3 = nn.LayerNorm(128)
        self.head = nn.Linear(128, classes)
        self.dropout = nn.Dropout(0.1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map ``[batch, 28, 28]`` pixels to ``[batch, classes]`` logits."""
        x = pixels.unsqueeze(1).to(self.head.weight.dtype) / 128 - 0.25
        x = self.norm1(self.conv1(x)).relu()
        x = nn.functional.max_pool2d(self.norm2(self.conv2(x)).relu(), 2)
        x = self.dropout(self.norm3(self.hidden(x.flatten(1))).relu())
        logits: Tensor = self.head(x)
        return logits


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file of unsigned bytes with the given number of dimensions.

    The format: bytes 0, 0, 8 (unsigned byte), the number of dimensions; each dimension's size as a big-endian
    32-bit number; the values, last dimension fastest (http://yann.lecun.com/exdb/mnist, "file formats").

    Raises:
        InputError: The file cannot be read, has another magic number, or is shorter or longer than its header requires.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}. Fetch the file again.") from error
    header = 4 + 4 * dimensions
    magic = bytes([0, 0, 8, dimensions])
    if content[:4] != magic:
        found = f"starts with {content[:4].hex(' ')}" if content else "is empty"
        raise InputError(f"{path} {found}: an idx file of this kind starts with {magic.hex(' ')}.")
    shape = struct.unpack(f">{dimensions}I", content[4:header].ljust(4 * dimensions, b"\0"))
    if len(content) != header + math.prod(shape):
        raise InputError(
            f"{path} holds {len(content)} bytes, but its header promises {' x '.join(map(str, shape))} values after "
            f"{header} bytes of header. Fetch the file again."
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy())


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
