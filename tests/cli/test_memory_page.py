"""Bytes in docs/memory.md and docs/precision.md are those predicted; run as a program, this writes them there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bighorn import Lamb
from bighorn.cli.footprint import FOOTPRINTS, Named
from bighorn.cli.shapes import SHAPES

DOCS = Path(__file__).parents[2] / "docs"
SETS = ("bert_base", "vit_small", "resnet50", "efficientnet_b0", "llama_1b", "llama_7b")
FIGURES = re.compile(r"(?<=<!-- figures: )([^\n]*-->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


PRECISIONS = re.compile(
    r"^\| (?P<weights>b?float\d+) \| (?P<way>[^|]*)\| (?P<state>[^|]*) \| (?P<bytes>[^|]*) \|", re.MULTILINE
)
"""A row of the table of precisions; its bytes are to be filled in."""


def shapes(name: str, dtype: torch.dtype = torch.float32) -> Named:
    return [(str(i), torch.empty(shape, device="meta", dtype=dtype)) for i, shape in enumerate(SHAPES[name]())]


def per_parameter(bytes_: dict[str, int], params: Named) -> float:
    return sum(bytes_.values()) / sum(param.numel() for _, param in params)


def memory_page(text: str) -> str:
    """With a table of the bytes per parameter of some models."""
    lines = ["", "| optimizer | " + " | ".join(SETS) + " |", "|---" * (1 + len(SETS)) + "|"]
    models = [shapes(name) for name in SETS]
    for name, predict in FOOTPRINTS.items():
        each = [per_parameter(predict(params), params) for params in models]
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in each) + " |")
    text, count = FIGURES.subn(lambda match: match[1] + "\n".join(lines) + "\n\n", text)
    assert count == 1
    return text


def precision_page(text: str) -> str:
    """With the bytes of BERT-base's weights and state in the column that the table of precisions has for them."""

    def filled(match: re.Match[str]) -> str:
        dtype = getattr(torch, match["weights"])
        params = shapes("bert_base", dtype)
        way, state = match["way"].strip(' `"') or "nearest", match["state"].split(" ")[0].strip('`"')
        held = Lamb.state_bytes(params, weight_rounding=way, state_dtype=None if state == "None" else state)
        words = f"{dtype.itemsize} + {per_parameter(held, params):.2f}"
        before, after = (match.span("bytes")[side] - match.start() for side in (0, 1))
        return match[0][:before] + words + match[0][after:]

    text, count = PRECISIONS.subn(filled, text)
    assert count > 5
    return text


PAGES = {DOCS / "memory.md": memory_page, DOCS / "precision.md": precision_page}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_figures_are_those_that_are_predicted(page: Path) -> None:
    text = page.read_text()
    assert text == PAGES[page](text)


if __name__ == "__main__":
    for page, written in PAGES.items():
        page.write_text(written(page.read_text()))
