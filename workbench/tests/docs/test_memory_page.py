"""The bytes in two pages of the docs equal the predicted ones; run as a program, this file writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bighorn_workbench.footprint import FOOTPRINTS, Named, Weights, predicted, total_of
from bighorn_workbench.shapes import SHAPES

if TYPE_CHECKING:  # a program in this folder does not find the tests
    from workbench.tests.command_line import Invoke

DOCS = Path(__file__).parents[3] / "docs"
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


LLAMA_8B = [
    *[(4096, 4096)] * 64,
    *[(1024, 4096)] * 64,
    *[(14336, 4096)] * 64,
    *[(4096, 14336)] * 32,
    *[(128256, 4096)] * 2,
    *[(4096,)] * 65,
]
"""The parameters of Llama 3 of 8 billion, with grouped queries and a head of its own."""

LARGE: dict[str, tuple[str, dict[str, str]]] = {
    "AdamW": ("adamw", {}),
    "bitsandbytes AdamW8bit": ("bitsandbytes-int8", {}),
    "Adafactor": ("adafactor", {}),
} | {
    f"`{kind}`, {bits}": (f"{kind.lower()}-{bits}", {"weight_rounding": "stochastic"})
    for kind in ("Lamb", "Came")
    for bits in ("int8", "int4")
}
"""The rows of the table of large models: names in `bighorn memory`, and options."""


def of_large_models() -> list[str]:
    """Return a table of gigabytes for two models of language, with bf16 weights."""
    meta = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in LLAMA_8B]
    models = [shapes("llama_7b", torch.bfloat16), [(str(i), tensor) for i, tensor in enumerate(meta)]]
    lines = ["| GB | 7B, all gradients | released | 8B, all gradients | released |", "|---|---|---|---|---|"]
    for label, (name, options) in LARGE.items():
        cells = []
        for params in models:
            total = total_of(name, Weights(params), sum(predicted(name, params, options).values()))
            cells += ["-" if size is None else f"{size / 1e9:.1f}" for size in (total.all, total.released)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


TABLES = {"benchmarks": (of_state, of_training), "fit-the-model": (of_large_models,)}


def written(page: str) -> str:
    """Return a page with its tables."""
    tables = iter([table() for table in TABLES[page]])
    text = (DOCS / f"{page}.md").read_text()
    text, count = FIGURES.subn(lambda match: match[1] + "\n" + "\n".join(next(tables)) + "\n\n", text)
    assert count == len(TABLES[page])
    return text


@pytest.mark.parametrize("page", TABLES)
def test_the_figures_are_those_that_are_predicted(page: str) -> None:
    assert (DOCS / f"{page}.md").read_text() == written(page)


@pytest.mark.parametrize("page", ["../README.md", "fit-the-model.md"])
def test_the_lines_of_a_page_are_printed(page: str, invoke: Invoke) -> None:
    """A page may leave lines out, and shorten one with "..."."""
    text = (DOCS / page).read_text()
    [shown] = re.findall(r"^```text\n(llama_7b: .*?)^```$", text, re.MULTILINE | re.DOTALL)
    [command, *_] = re.findall(r"bighorn (memory --shapes llama_7b [^\n`]*)", text)
    printed = invoke(*command.split()).output.splitlines()
    for line in shown.splitlines():
        whole = line.removesuffix("...")
        assert any(each == line or (whole != line and each.startswith(whole)) for each in printed), line


def test_the_readme_says_what_fits_in_8_gb(invoke: Invoke) -> None:
    text = " ".join((DOCS.parent / "README.md").read_text().split())
    assert "For `llama_1b` in 8 GB, also in bf16, Came in int8 and int4 fits and AdamW does not." in text
    printed = invoke("memory", "--shapes", "llama_1b", "--precision", "bf16", "--gpu-memory", "8GB").output
    [fits] = [line for line in printed.splitlines() if line.startswith("Fits in")]
    yes, _, no = fits.partition("with released gradients")
    assert "came-int8, came-int4" in yes
    assert " adamw" in no.partition("no:")[2]


if __name__ == "__main__":
    for page in TABLES:
        (DOCS / f"{page}.md").write_text(written(page))
