"""A small model for the tests of trainers, its data, and its training by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bighorn import Came, Lamb

SAMPLES = 24
INPUTS = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
LABELS = (INPUTS.sum(dim=1) > 0).long()
BATCH = 2
INSTALL = "make integrations, or pip install 'bighorn[test-integrations]'"

EXCLUDED = ["bias", "norm"]
OPTIONS: dict[str, Any] = {
    "weight_decay": 0.1,
    "exclude_from_weight_decay": EXCLUDED,
    "exclude_from_layer_adaptation": EXCLUDED,
}


OVERFLOWS = 2
"""The step whose gradient overflows, in tests of loss scalers."""


class Net(nn.Module):
    """A model that returns its loss, like the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def logits(self, inputs: Tensor) -> Any:
        return self.head(torch.tanh(self.norm(self.body(inputs))))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(inputs)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class Logits(nn.Module):
    """The model without its loss; fastai computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, inputs: Tensor) -> Any:
        return self.net.logits(inputs)


def batches(start: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [(INPUTS[i : i + BATCH], LABELS[i : i + BATCH]) for i in range(start * BATCH, SAMPLES, BATCH)]


def lamb(net: Net) -> Lamb:
    return Lamb(net.named_parameters(), lr=0.05, **OPTIONS)


def came(net: Net) -> Came:
    return Came(net.named_parameters(), lr=0.05, weight_decay=0.1, exclude_from_weight_decay=EXCLUDED)


def adamw(net: Net) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def falling(step: int) -> float:
    return float(0.8**step)


def by_hand(
    make: Callable[[Net], torch.optim.Optimizer],
    decay: Callable[[int], float] = lambda _: 1.0,
    accumulate: int = 1,
    clip: float | None = None,
    bf16: bool = False,
    without: int | None = None,
) -> Net:
    """Train one epoch in a loop by hand, without one step; `decay` is the factor of the learning rate at a step."""
    net = Net()
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    for i, (inputs, labels) in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = net(inputs, labels)["loss"]
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            if i != without:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return net


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Check that parameters agree up to rounding, and that training changed each."""
    for (name, a), b, c in zip(ours.named_parameters(), theirs.parameters(), Net().parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
        assert not a.equal(c), name
