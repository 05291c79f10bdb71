"""A small GPT that predicts the next character: of Python's own standard library, or of any text file."""

import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from bighorn_workbench.errors import InputError
from bighorn_workbench.tasks import Classification

CONTEXT = 64
ALPHABET = 255
"""The number of characters with a number of their own; rarer ones share number 0."""


class Text(Classification):
    """Windows of 64 characters, the last tenth of the text as the test (at most 256 windows of it)."""

    batch_size = 64
    epochs = 1.0
    batch_sizes = (16, 64, 256)
    target = 0.5

    def __init__(self, data: str | None = None) -> None:
        text, description = (standard_library(), "Python's standard library") if data is None else (_read(data), data)
        windows = (len(text) - 1) // CONTEXT
        if windows < 20:
            raise InputError(f"--data {data} has {len(text)} characters; --task text needs {20 * CONTEXT + 1} or more.")
        common = [character for character, _ in sorted(Counter(text).most_common(ALPHABET))]
        number = {character: index for index, character in enumerate(common, start=1)}
        codes = torch.tensor([number.get(character, 0) for character in text], dtype=torch.uint8)
        inputs = codes[: windows * CONTEXT].view(windows, CONTEXT)
        targets = codes[1 : windows * CONTEXT + 1].view(windows, CONTEXT)
        cut = windows - windows // 10
        # Evenly spread, since the text is one module after another.
        test = torch.linspace(cut, windows - 1, min(256, windows - cut)).long()
        description = f"{description}, {len(text):,} characters"
        super().__init__((inputs[:cut], targets[:cut]), (inputs[test], targets[test]), description)
        self.classes = len(common) + 1

    def model(self) -> nn.Module:
        """Build the GPT."""
        return GPT(self.classes)


class GPT(nn.Module):
    """A decoder-only transformer: learned positions, pre-norm blocks, dropout."""

    def __init__(self, classes: int, width: int = 128, heads: int = 4, blocks: int = 5, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(classes, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Map ``[batch, context]`` characters to ``[batch, context, classes]`` logits of the characters that follow."""
        x = self.dropout(self.token(codes.long()) + self.position.weight[: codes.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and a multilayer perceptron, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, context, width]`` to the same shape."""
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return result


def standard_library() -> str:
    """Join the top-level modules of Python's standard library, by name; the generated build record is omitted."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    text = "\n".join(path.read_text("utf-8", errors="replace") for path in paths)
    if not text:
        raise InputError(f"no sources of the standard library in {folder}. Give a text with --data FILE.")
    return text


def _read(data: str) -> str:
    try:
        return Path(data).read_text("utf-8")
    except OSError as error:
        raise InputError(f"--data {data} cannot be read: {error.strerror}. --task text needs a text file.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"--data {data} is not UTF-8 text (byte {error.start}). Convert it, or take another."
        ) from error
