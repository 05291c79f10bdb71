"""A causal language model of Hugging Face on text files: bighorn compare --task causal_lm.py:CausalLM --data FOLDER.

FOLDER has a config.json, or a whole model whose weights are not read, its tokenizer, and text in *.txt. Without a
tokenizer each byte is a token.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

LENGTH = 128


class CausalLM:
    """Windows of tokens: eight tenths for training, one each for validation and test."""

    metric, higher_is_better = "perplexity", False
    batch_size, batch_sizes = 16, (16, 64)

    def __init__(self, data: str = ".") -> None:
        folder = Path(data)
        text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.txt")))
        tokens = list(text.encode())
        if (folder / "tokenizer_config.json").exists():
            tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        windows = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
        a, b = int(0.8 * len(windows)), int(0.9 * len(windows))
        self.splits = {"train": windows[:a], "validation": windows[a:b], "test": windows[b:]}
        self.config = AutoConfig.from_pretrained(folder)
        self.description = f"{len(tokens):,} tokens of {data}"

    def model(self) -> nn.Module:
        """The architecture of the configuration, with new weights."""
        made: nn.Module = AutoModelForCausalLM.from_config(self.config)
        return made

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> Iterable[Tensor]:
        """Windows in random order for training, in full batches."""
        train = split == "train"
        return DataLoader(self.splits[split], batch_size, shuffle=train, generator=generator, drop_last=train)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The mean cross-entropy of the next token."""
        loss: Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """The loss over all windows, and its perplexity."""
        device = next(model.parameters()).device
        sums = [self.loss(model, batch.to(device)).item() * len(batch) for batch in torch.split(self.splits[split], 64)]
        loss = sum(sums) / len(self.splits[split])
        return {"loss": loss, "perplexity": math.exp(min(loss, 50))}
