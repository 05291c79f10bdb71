"""The bytes in docs/memory-results.md are the predicted ones; run as a program, this file writes them there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from bighorn.cli.footprint import FOOTPRINTS, Named
from bighorn.cli.shapes import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "memory-results.md"
SETS = ("bert_base", "vit_small", "resnet50", "efficientnet_b0", "llama_1b", "llama_7b")
FIGURES = re.compile(r"(?<=<!-- figures: )([^\n]*-->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


def shapes(name: str) -> Named:
    return [(str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(SHAPES[name]())]


def per_parameter(bytes_: dict[str, int], params: Named) -> float:
    return sum(bytes_.values()) / sum(param.numel() for _, param in params)


def written() -> str:
    """Return the page, with a table of the bytes per parameter of some models."""
    lines = ["", "| optimizer | " + " | ".join(SETS) + " |", "|---" * (1 + len(SETS)) + "|"]
    models = [shapes(name) for name in SETS]
    for name, predict in FOOTPRINTS.items():
        each = [per_parameter(predict(params), params) for params in models]
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in each) + " |")
    text, count = FIGURES.subn(lambda match: match[1] + "\n".join(lines) + "\n\n", PAGE.read_text())
    assert count == 1
    return text


def test_the_figures_are_those_that_are_predicted() -> None:
    assert PAGE.read_text() == written()


if __name__ == "__main__":
    PAGE.write_text(written())
