"""The figures in docs/memory.md are what is predicted; run as a program, this writes them there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from bighorn.cli.footprint import FOOTPRINTS
from bighorn.cli.shapes import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
SETS = ("bert_base", "vit_small", "resnet50", "efficientnet_b0", "llama_1b", "llama_7b")
FIGURES = re.compile(r"(?<=<!-- figures: )([^\n]*-->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


def table() -> str:
    """Bytes per parameter of some models, as Markdown."""
    lines = ["", "| optimizer | " + " | ".join(SETS) + " |", "|---" * (1 + len(SETS)) + "|"]
    models = [[(str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(SHAPES[name]())] for name in SETS]
    for name, predict in FOOTPRINTS.items():
        each = (sum(predict(params).values()) / sum(param.numel() for _, param in params) for params in models)
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in each) + " |")
    return "\n".join(lines) + "\n\n"


def written() -> str:
    """The page with its figures written anew."""
    text, count = FIGURES.subn(lambda match: match[1] + table(), PAGE.read_text())
    assert count == 1
    return text


def test_the_figures_are_those_that_are_predicted() -> None:
    assert PAGE.read_text() == written()


if __name__ == "__main__":
    PAGE.write_text(written())
