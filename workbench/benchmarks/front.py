"""The pictures and figures of the README and of the site's home page, from files in results.

    python workbench/benchmarks/front.py

Draws docs/front-batch.svg, docs/front-memory.svg and docs/front-speed.svg, and writes the tables between
`<!-- table of NAME.json -->` and `<!-- end of table -->` in docs/speed.md, docs/precision-results.md,
docs/memory.md and results/came-rates.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import equal_pictures
import equal_tuning
import plots
from bighorn_workbench.footprint import predicted
from bighorn_workbench.reports.style import INK, SERIES, STYLE, to_svg
from result_files import DOCS, RESULTS, load
from studies import STUDIES

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from resident_memory import CONTESTANTS, stack

WIDTH = 5.0
"""Inches; narrow enough for a telephone."""

SHOWN = 408
"""Pixels of the README's two pictures, which then fit side by side in 820."""

SPEED = {
    "200 tiny tensors": ("step-fp32", "tiny"),
    "EfficientNet-B0": ("step-fp32", "efficientnet_b0"),
    "ViT-S/16": ("step-fp32", "vit_small"),
    "ResNet-50": ("step-fp32", "resnet50"),
    "BERT-base": ("step-fp32", "bert_base"),
    "BERT-large": ("step-fp32", "bert_large"),
    "one 30522x1024 tensor": ("step-fp32", "one"),
    "BERT-base in bf16, bf16 state": ("step-bf16", "bert_base"),
}
"""The rows of docs/speed.md: the file in results, and the parameter set in it."""

LARS_SHAPES = ("vit_small", "resnet50", "bert_base")

SPEED_COLUMNS = ("Lamb", "Lamb, adam=True", "Came")

CLIFFS = {
    "1000 of 64x64, another tenth without gradients each step": "missing",
    "200 of 64x64, new storage each step": "moved",
    "60 of 128x128x3x3, gradients of alternating strides *": "alternating",
    "ResNet-50, channels last, gradients contiguous *": "channels_last",
    "4096 of the 8192 columns of a matrix": "gaps",
    "a transposed 4096x2048, gradient contiguous *": "transposed",
    "a transposed 4096x2048, and its gradient": "transposed_both",
    "1000000x16": "tall",
    "16x1000000": "wide",
    "2048x28672": "long_rows",
    "128x8192": "few_rows",
    "64x512x2048": "experts",
    "1000000": "million",
    "2048x2048 in float64": "float64",
}
"""The rows of the other table of docs/speed.md: words for the parameter sets of `bighorn bench --table cliffs`."""

CLIFF_COLUMNS = ("Lamb", "Came", "torch AdamW, foreach")
MEMORY = "resident-memory"


def ratios(name: str, shapes: str) -> dict[str, dict[str, float]]:
    """The time of a step by optimizer, relative to fused AdamW's."""
    [found] = [result["optimizers"] for result in load(name)["results"] if result["shapes"] == shapes]
    return {optimizer["label"]: optimizer["ratio"] for optimizer in found}


def batch_picture() -> str:
    """Test accuracy of all optimizers at the largest batch size of two models, each after as many trials."""
    panels = {}
    for model, name in (("LeNet", "equal-lenet"), ("ResNet-8", "equal-resnet")):
        cells = equal_tuning.cells_of(name)
        panels[f"{model}, batch {max(cells):,}"] = cells[max(cells)]
    return equal_pictures.final_runs(panels, WIDTH)


def memory_rows() -> dict[str, dict[str, Any]]:
    """By contestant that could be measured: bytes per parameter of weights, gradients and state, and measured ones."""
    saved = load(MEMORY)
    rows: dict[str, dict[str, Any]] = {}
    for name, row in saved["rows"].items():
        if "error" in row:
            continue
        one = CONTESTANTS[name]
        size = one.dtype.itemsize
        with torch.device("meta"):
            params = list(stack(8, one.dtype).named_parameters())
        elements, largest = sum(p.numel() for _, p in params), max(p.numel() for _, p in params)
        known = None
        if one.footprint is not None:
            kind, options = one.footprint
            known = sum(predicted(kind, params, options).values()) / elements
        gradients = size * largest / elements if one.released else size
        rows[name] = {"weights": size, "gradients": gradients, "state": known, "measured": row["bytes_per_parameter"]}
    return rows


LABELS = {
    "torch AdamW, fp32 weights": "AdamW",
    "Lamb, fp32 weights": "Lamb",
    "Came, fp32 weights": "Came",
    "torch AdamW": "AdamW, all bf16",
    "Lamb, int8, stochastic": "Lamb int8, bf16",
    "Lamb, int8, stochastic, released": "  + released",
    "Came, int8, stochastic": "Came int8, bf16",
    "Came, int8, stochastic, released": "  + released",
    "Came, int4, stochastic": "Came int4, bf16",
    "Came, int4, stochastic, released": "  + released",
}
"""The rows of the picture: words for the measured contestants."""


def memory_picture() -> str:
    """Bytes of a training step per parameter: computed parts as bars, with a mark where the kernel counted."""
    rows = memory_rows()
    names = [name for name in LABELS if name in rows]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.1 + 0.34 * len(names)))
        axes = figure.add_subplot()
        left = [0.0] * len(names)
        for part, colour in (("weights", SERIES[5]), ("gradients", SERIES[1]), ("state", SERIES[0])):
            values = [rows[name][part] for name in names]
            axes.barh(range(len(names)), values, left=left, height=0.62, color=colour, label=part)
            left = [before + value for before, value in zip(left, values, strict=True)]
        for at, name in enumerate(names):
            axes.text(max(left[at], rows[name]["measured"]) + 0.25, at, f"{left[at]:.2f}", va="center", color=INK)
        measured = [rows[name]["measured"] for name in names]
        axes.plot(measured, range(len(names)), "|", color=INK, markersize=13, label="measured")
        axes.set_yticks(range(len(names)), [LABELS[name] for name in names])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(*left, *measured))
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter("{x:.1f}")
        axes.set_xlabel("bytes per parameter, without activations")
        figure.legend(loc="outside upper left", ncols=4, fontsize=10)
        return plots.standalone(to_svg(figure, "bytes per parameter of a training step"), SHOWN)


PEERS = {
    "H100, BERT-large": [("step-gpu-h100-apex", "bert_large", label) for label in ("Lamb", "Came", "apex FusedLAMB")],
    "CPU, BERT-base": [
        ("step-fp32-peers", "bert_base", "Lamb"),
        ("step-came", "bert_base", "Came"),
        ("step-fp32-peers", "bert_base", "timm Lamb"),
        ("step-fp32-peers", "bert_base", "pytorch_optimizer Lamb"),
        ("step-came", "bert_base", "came-pytorch"),
        ("step-came", "bert_base", "pytorch_optimizer CAME"),
    ],
}
"""The bars of the picture of speed, by panel: a file of results, a parameter set in it, and an optimizer."""


SHOWN_AS = {"apex FusedLAMB": "apex FusedLAMB, clips"}
"""The names of peers whose step does more than the others'."""


def peer_ratios(panel: str) -> dict[str, float]:
    """The median time of a step by optimizer, relative to fused AdamW's."""
    return {label: ratios(name, shapes)[label]["median"] for name, shapes, label in PEERS[panel]}


def speed_picture() -> str:
    """The time of a step beside other packages' optimizers, relative to fused AdamW's."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.5))
        grid = figure.subplots(len(PEERS), 1, height_ratios=[len(bars) for bars in PEERS.values()])
        for axes, panel in zip(grid, PEERS, strict=True):
            found = peer_ratios(panel)
            colours = [SERIES[0] if label in ("Lamb", "Came") else SERIES[5] for label in found]
            axes.barh(range(len(found)), found.values(), height=0.62, color=colours)
            for at, value in enumerate(found.values()):
                axes.text(value + 0.01 * max(found.values()), at, f"{value:.2f}", va="center", color=INK)
            axes.axvline(1, color=INK, linewidth=1, linestyle="--")
            names = [f"Bighorn {label}" if label in ("Lamb", "Came") else SHOWN_AS.get(label, label) for label in found]
            axes.set_yticks(range(len(found)), names)
            axes.tick_params(axis="y", length=0)
            axes.invert_yaxis()
            axes.set_xlim(0, 1.12 * max(found.values()))
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.grid(visible=False, axis="y")
            axes.xaxis.set_major_formatter("{x:.1f}")  # a digit alone is too narrow on a telephone
            axes.set_title(panel, fontsize=11, loc="left", color=INK)
        grid[-1].set_xlabel("time of a step / fused AdamW (dashed)")
        return plots.standalone(to_svg(figure, "time of a step relative to AdamW"), SHOWN)


PICTURES = {"front-batch": batch_picture, "front-memory": memory_picture, "front-speed": speed_picture}


def _ratio_table(first: str, places: dict[str, tuple[str, str]], columns: tuple[str, ...]) -> str:
    lines = [f"| {first} | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for row, place in places.items():
        found = ratios(*place)
        texts = [f"{found[c]['median']:.2f} ({found[c]['p10']:.2f}-{found[c]['p90']:.2f})" for c in columns]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines)


def speed_table() -> str:
    return _ratio_table("shapes of", SPEED, SPEED_COLUMNS)


def lars_table() -> str:
    """The rows of LARS, relative to torch's fused SGD with momentum."""
    rows = {
        words: ("step-lars", name)
        for words, (file, name) in SPEED.items()
        if file == "step-fp32" and name in LARS_SHAPES
    }
    return _ratio_table("shapes of", rows, ("Lars", "timm Lars"))


def cliffs_table() -> str:
    return _ratio_table("parameters", {row: ("step-cliffs", name) for row, name in CLIFFS.items()}, CLIFF_COLUMNS)


def precision_table() -> str:
    """A row for each optimizer with low-precision weights, a column for each model."""
    vit, bert = (ratios("step-precision", shapes) for shapes in ("vit_small", "bert_base"))
    lines = ["| | ViT-S/16 | BERT-base |", "|---" * 3 + "|"]
    for row in vit:
        if not row.startswith("torch"):
            texts = (
                f"{each[row]['median']:.2f} ({each[row]['p10']:.2f}-{each[row]['p90']:.2f})" for each in (vit, bert)
            )
            lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines)


def memory_table() -> str:
    lines = ["| optimizer | weights | gradients | state | sum | measured |", "|---" * 6 + "|"]
    for name, row in memory_rows().items():
        weights, gradients, state = row["weights"], row["gradients"], row["state"]
        known = ("-", "-") if state is None else (f"{state:.2f}", f"{weights + gradients + state:.2f}")
        label = name if "weights" in name else f"{name}, bf16 weights"
        texts = (label, f"{weights}", f"{gradients:.2f}", *known, f"{row['measured']:.2f}")
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


RATES = "came-rates-digits"


def rates_table() -> str:
    """Mean held-out accuracies by learning rate, a row for each optimizer."""
    cells = STUDIES[RATES]["cells"]
    rates = sorted({tried["lr"] for cell in cells for tried in cell["tuned"]})
    lines = ["| optimizer | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" * (1 + len(rates)) + "|"]
    for cell in cells:
        found = {tried["lr"]: f"{tried['accuracy']:.1%}" for tried in cell["tuned"]}
        lines.append(f"| {cell['name']} | {' | '.join(found.get(rate, '') for rate in rates)} |")
    return "\n".join(lines)


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "step-fp32": (DOCS / "speed.md", speed_table),
    "step-lars": (DOCS / "speed.md", lars_table),
    "step-cliffs": (DOCS / "speed.md", cliffs_table),
    "step-precision": (DOCS / "precision-results.md", precision_table),
    MEMORY: (DOCS / "memory.md", memory_table),
    RATES: (RESULTS / "came-rates.md", rates_table),
}


def written(name: str) -> str:
    """The page of a table, with the table rewritten."""
    page, table = TABLES[name]
    pattern = rf"(<!-- table of {name}\.json[^\n]*-->\n).*?(<!-- end of table -->)"
    text, count = re.subn(pattern, rf"\1\n{table()}\n\n\2", page.read_text(), flags=re.DOTALL)
    assert count == 1, page
    return text


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (DOCS / f"{name}.svg").write_text(picture())
    for name, (page, _) in TABLES.items():
        page.write_text(written(name))
