"""The pictures and figures of the README and of the site's home page, from files in results.

    python workbench/benchmarks/front.py

Draws the pictures docs/front-*.svg, and writes the tables between `<!-- table of NAME.json -->` and
`<!-- end of table -->` in docs/benchmarks.md, docs/fit-the-model.md, docs/precision.md and results/came-rates.md.
"""

from __future__ import annotations

import re
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
from resident_memory import CONTESTANTS, stack
from result_files import DOCS, RESULTS, load
from studies import STUDIES

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
"""The rows of docs/benchmarks.md: the file in results, and the parameter set in it."""

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
"""The rows of a table of docs/benchmarks.md: words for the parameter sets of `bighorn bench --table cliffs`."""

GPU_CLIFFS = {
    "a transposed matrix with its gradient, 4096x2048": "transposed_both",
    "1000000x16": "tall",
    "16x1000000": "wide",
    "2048x28672": "long_rows",
    "128x8192": "few_rows",
    "64 stacked experts, 64x512x2048": "experts",
    "one tensor of 1,000,000 elements": "million",
    "2048x2048 in float64": "float64",
}
"""The rows of the same table for an H100."""

GPUS = {
    "H100, BERT-large, fp32": (("step-gpu-h100-fp32", "step-gpu-h100-int4-fp32"), "bert_large"),
    "H100, BERT-large, bf16": (("step-gpu-h100-bf16", "step-gpu-h100-int4-bf16"), "bert_large"),
    "H100, ViT-S, fp32": (("step-gpu-h100-fp32", "step-gpu-h100-int4-fp32"), "vit_small"),
    "H100, ViT-S, bf16": (("step-gpu-h100-int4-bf16",), "vit_small"),
    "H200, BERT-large, fp32": (("step-gpu-h200-int4-fp32",), "bert_large"),
    "H200, BERT-large, bf16": (("step-gpu-h200-int4-bf16",), "bert_large"),
    "H200, ViT-S, fp32": (("step-gpu-h200-fp32",), "vit_small"),
}
"""The rows of the table of GPUs: files of results, and the parameter set in them."""

GPU_COLUMNS = ("Lamb", "Lamb, int8 states", "Lamb, int4 states", "Came", "Came, int8", "Came, int4", "Lars")

CLIFF_COLUMNS = ("Lamb", "Came", "torch AdamW, foreach")
MEMORY = "resident-memory"


def ratios(name: str, shapes: str, key: str = "ratio") -> dict[str, dict[str, float]]:
    """The time of a step by optimizer, relative to fused AdamW's."""
    [found] = [result["optimizers"] for result in load(name)["results"] if result["shapes"] == shapes]
    return {optimizer["label"]: optimizer[key] for optimizer in found if optimizer.get(key)}


def speed(ratio: dict[str, float]) -> str:
    """A ratio of times as a speed: its median, with the 10th and 90th percentile."""
    return f"{1 / ratio['median']:.2f} ({1 / ratio['p90']:.2f}-{1 / ratio['p10']:.2f})"


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
    "bitsandbytes AdamW8bit": "bitsandbytes AdamW8bit, bf16",
    "torchao AdamW4bit": "torchao AdamW4bit, bf16",
    "Lamb, int8, stochastic": "Lamb int8, bf16",
    "Lamb, int8, stochastic, released": "  + released",
    "Came, int8, stochastic": "Came int8, bf16",
    "Came, int8, stochastic, released": "  + released",
    "Came, int4, stochastic": "Came int4, bf16",
    "Came, int4, stochastic, released": "  + released",
}
"""The rows of the picture: words for the contestants."""

OTHERS = {"bitsandbytes AdamW8bit": "bitsandbytes-int8"}
"""Contestants of the picture that need a GPU to be measured, by their names in `bighorn memory`."""


def computed_row(name: str) -> dict[str, Any]:
    """Bytes per parameter of a contestant that was not measured, with weights in bf16."""
    with torch.device("meta"):
        params = list(stack(8, torch.bfloat16).named_parameters())
    known = sum(predicted(OTHERS[name], params, {}).values()) / sum(p.numel() for _, p in params)
    return {"weights": 2, "gradients": 2.0, "state": known, "measured": None}


def memory_picture() -> str:
    """Bytes of a training step per parameter: computed parts as bars, with a mark where the kernel counted."""
    rows = memory_rows() | {name: computed_row(name) for name in OTHERS}
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
            right = max(left[at], rows[name]["measured"] or 0) + 0.25
            axes.text(right, at, f"{left[at]:.2f}", va="center", color=INK)
        measured = {at: rows[name]["measured"] for at, name in enumerate(names) if rows[name]["measured"]}
        axes.plot([*measured.values()], [*measured], "|", color=INK, markersize=13, label="measured")
        axes.set_yticks(range(len(names)), [LABELS[name] for name in names])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(*left, *measured.values()))
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter("{x:.1f}")
        axes.set_xlabel("bytes per parameter, without activations")
        figure.legend(loc="outside upper left", ncols=4, fontsize=10)
        return plots.standalone(to_svg(figure, "bytes per parameter of a training step"), SHOWN)


PEERS = {
    "timm Lamb": ("step-fp32-peers", "Lamb"),
    "pytorch_optimizer Lamb": ("step-fp32-peers", "Lamb"),
    "came-pytorch": ("step-came", "Came"),
    "pytorch_optimizer CAME": ("step-came", "Came"),
}
"""The bars of the picture of speed: a file with this optimizer on BERT-base, and the one of Bighorn in it."""


def speedups() -> dict[str, float]:
    """How many times as fast a step of Bighorn is as the same algorithm of another package, on a CPU."""
    found = {peer: (ratios(file, "bert_base"), ours) for peer, (file, ours) in PEERS.items()}
    return {peer: each[peer]["median"] / each[ours]["median"] for peer, (each, ours) in found.items()}


def speed_picture() -> str:
    """The speed of a step relative to the same algorithm of other packages."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.3))
        axes = figure.add_subplot()
        found = speedups()
        axes.barh(range(len(found)), [*found.values()], height=0.62, color=SERIES[0])
        for at, value in enumerate(found.values()):
            axes.text(value + 0.01 * max(found.values()), at, f"{value:.1f}x", va="center", color=INK)
        axes.axvline(1, color=INK, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(found)), found)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(found.values()))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter("{x:.0f}x")
        axes.set_xlabel("times as fast, BERT-base on a CPU")
        return plots.standalone(to_svg(figure, "speed relative to other packages"), SHOWN)


CURVES = "loss-curves"
BYTES = {"AdamW, fp32": "16", "Came int8, bf16": "5.0, released 3.1", "Came int4, bf16": "4.5, released 2.6"}
"""The bytes per parameter of the curves, as the picture of memory has them."""


def loss_picture() -> str:
    """The loss over steps: the mean of the seeds as a line, and their range as a band."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6))
        axes = figure.add_subplot()
        for colour, (label, seeds) in zip(
            (SERIES[5], SERIES[0], SERIES[1]), load(CURVES)["curves"].items(), strict=True
        ):
            steps = [step for step, _ in next(iter(seeds.values()))]
            losses = [[loss for _, loss in each] for each in seeds.values()]
            at = list(zip(*losses, strict=True))
            name = f"{label}: {BYTES[label]} bytes"
            axes.plot(steps, [sum(each) / len(each) for each in at], color=colour, label=name)
            axes.fill_between(steps, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.25, linewidth=0)
        axes.set_xlabel("steps")
        axes.set_ylabel("loss on held-out text")
        axes.set_ylim(2.35, 3.3)
        axes.yaxis.set_major_formatter("{x:.1f}")
        figure.legend(loc="outside upper left", ncols=1, fontsize=10)
        return plots.standalone(to_svg(figure, "loss of a language model over steps"), SHOWN)


PICTURES = {
    "front-batch": batch_picture,
    "front-loss": loss_picture,
    "front-memory": memory_picture,
    "front-speed": speed_picture,
}


def _ratio_table(first: str, places: dict[str, tuple[str, str]], columns: tuple[str, ...]) -> str:
    lines = [f"| {first} | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for row, place in places.items():
        found = ratios(*place)
        lines.append(f"| {row} | {' | '.join(speed(found[column]) for column in columns)} |")
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


def gpu_table() -> str:
    """The speed of a step on GPUs; two values where two files differ."""
    lines = ["| device, shapes, dtype | fused AdamW | " + " | ".join(GPU_COLUMNS) + " |", "|---" * 9 + "|"]
    for row, (files, shapes) in GPUS.items():
        found = [ratios(file, shapes) for file in files]
        texts = []
        for column in GPU_COLUMNS:
            speeds = sorted({f"{1 / each[column]['median']:.2f}" for each in found if column in each})
            texts.append(" to ".join(dict.fromkeys((speeds[0], speeds[-1]))) if speeds else "")
        adamw = ratios(files[0], shapes, "baseline_ms")["Lamb"]["median"]
        lines.append(f"| {row} | {adamw:.2f} ms | {' | '.join(texts)} |")
    return "\n".join(lines)


def gpu_cliffs_table() -> str:
    """The speed of a step on a GPU in unusual shapes, of the device, and of wall time with the host."""
    lines = ["| parameters | Lamb | Came | Lamb, wall time | Came, wall time |", "|---" * 5 + "|"]
    for row, shapes in GPU_CLIFFS.items():
        found = [ratios("step-gpu-h100-cliffs", shapes, key) for key in ("ratio", "wall_ratio")]
        texts = [f"{1 / each[name]['median']:.2f}" for each in found for name in ("Lamb", "Came")]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines)


def precision_table() -> str:
    """A row for each optimizer with low-precision weights, a column for each model."""
    vit, bert = (ratios("step-precision", shapes) for shapes in ("vit_small", "bert_base"))
    lines = ["| | ViT-S/16 | BERT-base |", "|---" * 3 + "|"]
    for row in vit:
        if not row.startswith("torch"):
            lines.append(f"| {row} | {' | '.join(speed(each[row]) for each in (vit, bert))} |")
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
    "step-fp32": (DOCS / "benchmarks.md", speed_table),
    "step-lars": (DOCS / "benchmarks.md", lars_table),
    "step-cliffs": (DOCS / "benchmarks.md", cliffs_table),
    "step-gpu-h100-fp32": (DOCS / "benchmarks.md", gpu_table),
    "step-gpu-h100-cliffs": (DOCS / "benchmarks.md", gpu_cliffs_table),
    "step-precision": (DOCS / "precision.md", precision_table),
    MEMORY: (DOCS / "fit-the-model.md", memory_table),
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
