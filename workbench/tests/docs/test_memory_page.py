"""The bytes in docs/memory.md equal the predicted ones; run as a program, this file writes them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from bighorn_workbench.footprint import FOOTPRINTS, Named, Weights, predicted, total_of
from bighorn_workbench.shapes import SHAPES

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
SETS = ("bert_base", "vit_small", "resnet50", "efficientnet_b0", "llama_1b", "llama_7b")
WITH_BF16 = "adamw", "lion", "bitsandbytes-int8", "torchao-int4", "flashoptim", "galore", "adafactor"
OURS_WITH_BF16 = "lamb-int8", "lamb-int4", "came-int8", "came-int4"
FIGURES = re.compile(r"(?<=<!-- figures: )([^\n]*-->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


def shapes(name: str, dtype: torch.dtype = torch.float32) -> Named:
    return [(str(i), torch.empty(shape, device="meta", dtype=dtype)) for i, shape in enumerate(SHAPES[name]())]


def per_parameter(bytes_: dict[str, int], params: Named) -> float:
    return sum(bytes_.values()) / sum(param.numel() for _, param in params)


def of_state() -> list[str]:
    """Return a table of bytes of state per parameter for some models, with fp32 weights."""
    lines = ["| optimizer | " + " | ".join(SETS) + " |", "|---" * (1 + len(SETS)) + "|"]
    models = [shapes(name) for name in SETS]
    for name, predict in FOOTPRINTS.items():
        each = [per_parameter(predict(params), params) for params in models]
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in each) + " |")
    return lines


def of_training() -> list[str]:
    """Return a table of bytes per parameter for weights, gradients and state, with bf16 weights."""
    lines = ["| optimizer | bert_base | released | llama_1b | released |", "|---|---|---|---|---|"]
    models = [shapes(name, torch.bfloat16) for name in ("bert_base", "llama_1b")]
    rows: list[tuple[str, str, dict[str, str]]] = [(name, name, {}) for name in WITH_BF16]
    for way, more in (("stochastic", ""), ("kahan8", ", kahan8")):
        rows += [(name + more, name, {"weight_rounding": way}) for name in OURS_WITH_BF16]
    for label, name, options in rows:
        cells = []
        for params in models:
            weights = Weights(params)
            total = total_of(name, weights, sum(predicted(name, params, options).values()))
            cells += ["-" if size is None else f"{size / weights.elements:.2f}" for size in (total.all, total.released)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def written() -> str:
    """Return the page with its tables."""
    tables = iter([of_state(), of_training()])
    text, count = FIGURES.subn(lambda match: match[1] + "\n" + "\n".join(next(tables)) + "\n\n", PAGE.read_text())
    assert count == 2
    return text


def test_the_figures_are_those_that_are_predicted() -> None:
    assert PAGE.read_text() == written()


if __name__ == "__main__":
    PAGE.write_text(written())
