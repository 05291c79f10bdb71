"""A calculation for 1,024 GPUs, and the counts of sharded_step.py, as the tables of results/scale.md.

    python workbench/benchmarks/scale.py

Nothing is run: shapes, the state that `bighorn memory` predicts, links as stated below, and the time that a step takes
on one process of the measured machine (workbench/benchmarks/results/step-fp32.json).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bighorn_workbench.footprint import FOOTPRINTS
from bighorn_workbench.shapes import SHAPES

HERE = Path(__file__).parent
PAGE = HERE / "results" / "scale.md"
TABLE = re.compile(r"(?<=<!-- )((?!end )\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

GPUS = 1024
BUCKET = 25e6  # DistributedDataParallel's, in bytes
GIGA = 1e9
SUM_BYTES = 8  # norms, and sums sent with them, are float64
RESIDUAL_BYTES = 4  # CAME's second call has no norms in it


@dataclass(frozen=True)
class Link:
    """A network as a collective sees it: bandwidth for each GPU, and the delay of one hop of a tree."""

    name: str
    bytes_per_second: float
    hop_seconds: float

    def all_reduce(self, size: float) -> float:
        """Up and down a tree, each byte twice."""
        return 2 * math.log2(GPUS) * self.hop_seconds + 2 * size * (GPUS - 1) / GPUS / self.bytes_per_second

    def one_way(self, size: float) -> float:
        """All-gather, reduce-scatter or broadcast of `size` bytes in all."""
        return math.log2(GPUS) * self.hop_seconds + size * (GPUS - 1) / GPUS / self.bytes_per_second


LINKS = (Link("fast", 400e9, 6e-6), Link("slow", 12.5e9, 30e-6))


@dataclass(frozen=True)
class Model:
    """A transformer: tensors before its blocks, then blocks of equally many, then the rest."""

    name: str
    shapes: str
    before: int
    block: int
    blocks: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [torch.empty(shape, device="meta") for shape in SHAPES[self.shapes]()]

    def groups(self) -> list[int]:
        """Elements that FSDP2 gathers at once: each block, and everything else."""
        sizes = [tensor.numel() for tensor in self.tensors]
        end = self.before + self.block * self.blocks
        blocks = [sum(sizes[start : start + self.block]) for start in range(self.before, end, self.block)]
        return [*blocks, sum(sizes) - sum(blocks)]


MODELS = (Model("BERT-large", "bert_large", 5, 16, 24), Model("Llama 7B", "llama_7b", 1, 9, 32))


@dataclass(frozen=True)
class Plan:
    """The cost of a step on each GPU."""

    name: str
    memory: float
    """Bytes of weights, gradients and optimizer state, without activations."""
    training: list[tuple[str, float]]
    """Collectives of forward and backward, and of handing out weights: their kind and bytes."""
    optimizer: list[tuple[str, float]]
    """Collectives of the optimizer's step."""
    stepped: float
    """The share of all elements that the busiest GPU steps."""

    def seconds(self, link: Link, which: list[tuple[str, float]]) -> float:
        return sum(link.all_reduce(size) if kind == "all_reduce" else link.one_way(size) for kind, size in which)


def plans(model: Model, optimizer: str) -> Iterator[Plan]:
    """DDP, ZeRO-1 by whole tensors, and FSDP2 with fp32 weights and gradients, computed in bf16."""
    tensors = model.tensors
    sizes = [tensor.numel() for tensor in tensors]
    total = sum(sizes)
    state = FOOTPRINTS[optimizer]([(str(i), tensor) for i, tensor in enumerate(tensors)])
    buckets = math.ceil(4 * total / BUCKET)
    gradients = [("all_reduce", 4 * total / buckets)] * buckets
    yield Plan("DDP", 8 * total + sum(state.values()), gradients, [], 1.0)
    loads, bytes_ = [0] * GPUS, [0] * GPUS
    for size, mine in sorted(zip(sizes, state.values(), strict=True), reverse=True):
        rank = loads.index(min(loads))  # as ZeroRedundancyOptimizer divides tensors
        loads[rank], bytes_[rank] = loads[rank] + size, bytes_[rank] + mine
    weights = [("one_way", 4.0 * size) for size in sizes]
    yield Plan("ZeRO-1", 8 * total + max(bytes_), gradients + weights, [], max(loads) / total)
    groups = model.groups()
    gathered = [("one_way", 2.0 * group) for group in [*groups, *groups[:-1]]]  # the root stays gathered
    reduced = [("one_way", 4.0 * group) for group in groups]
    transient = 2 * groups[-1] + 2 * (2 + 2 + 4) * max(groups[:-1])  # one block at work, the next on its way
    memory = (8 * total + sum(state.values())) / GPUS + transient
    yield Plan("FSDP2", memory, gathered + reduced, sums(optimizer, tensors), 1 / GPUS)


def sums(optimizer: str, tensors: list[torch.Tensor]) -> list[tuple[str, float]]:
    """The all-reduces of a step over rows: of norms; CAME's of column sums, then of residual ones."""
    if optimizer.startswith("lamb"):
        return [("all_reduce", 2.0 * SUM_BYTES * len(tensors))]
    columns = []
    for tensor in tensors:
        rows, width = (*tensor.shape[:1], math.prod(tensor.shape[1:])) if tensor.dim() > 1 else (1, 1)
        if 2 * (rows + width) < rows * width:
            columns.append(width)  # factored
    first = sum(2 * width + 2 for width in columns) + 2 * (len(tensors) - len(columns))
    second = sum(width + 2 for width in columns)
    return [("all_reduce", float(SUM_BYTES * first)), ("all_reduce", float(RESIDUAL_BYTES * second))]


def plan_table() -> str:
    """Each model, optimizer and plan."""
    measured, machine = single_rank()
    head = "| model | optimizer | plan | memory a GPU, GB | collectives: training + optimizer | GB sent |"
    head += " on the fast link, ms: training + optimizer | on the slow one | step itself, ms |"
    lines = ["", f"The step itself was measured on {machine}, for as many elements as the busiest rank steps.", ""]
    lines += [head, "|---" * 9 + "|"]
    for model in MODELS:
        for optimizer in ("lamb", "came"):
            for plan in plans(model, optimizer):
                elements = sum(tensor.numel() for tensor in model.tensors) * plan.stepped
                sent = sum(size * (2 if kind == "all_reduce" else 1) for kind, size in plan.training + plan.optimizer)
                times = [
                    f"{1e3 * plan.seconds(link, plan.training):.3g} + {1e3 * plan.seconds(link, plan.optimizer):.3g}"
                    for link in LINKS
                ]
                cells = [model.name, optimizer, plan.name, f"{plan.memory / GIGA:.2f}"]
                cells += [f"{len(plan.training)} + {len(plan.optimizer)}", f"{sent / GIGA:.2f}", *times]
                lines.append("| " + " | ".join([*cells, f"{1e3 * measured[optimizer] * elements:.3g}"]) + " |")
    return "\n".join(lines) + "\n\n"


def norms_table() -> str:
    """One batched all-reduce beside one for each tensor."""
    lines = ["", "| model | tensors | LAMB here, ms on the fast link | 4 for each tensor |", "|---|---|---|---|"]
    for model in MODELS:
        count = len(model.tensors)
        batched, single = (LINKS[0].all_reduce(size) for size in (2.0 * SUM_BYTES * count, 4.0))
        lines.append(f"| {model.name} | {count} | {1e3 * batched:.2f} | {1e3 * 4 * count * single:.0f} |")
    return "\n".join(lines) + "\n\n"


def single_rank() -> tuple[Mapping[str, float], str]:
    """Seconds for each element in a step of BERT-large's shapes, by optimizer, and the machine of the measurement."""
    found = json.loads((HERE / "results" / "step-fp32.json").read_text())
    [row] = [row for row in found["results"] if row["shapes"] == "bert_large"]
    where = found["environment"]
    times = {one["name"]: one["ms"]["median"] / 1e3 / row["parameters"] for one in row["optimizers"]}
    return times, f"one process with {where['threads']} threads of an {where['processor']}, not on a GPU"


def sent_table() -> str:
    """The counts of sharded_step.py."""
    path = HERE / "results" / "sharded-step.json"
    if not path.is_file():
        return "\nNot measured yet: `python workbench/benchmarks/sharded_step.py`.\n\n"
    found: dict[str, Any] = json.loads(path.read_text())
    counts = found["collectives_on_4_ranks"]
    places = list(next(iter(counts.values())))
    lines = ["", f"{found['shapes']}, {found['tensors']} tensors, 4 gloo ranks; collectives and bytes of a step:", ""]
    lines += ["| optimizer | " + " | ".join(places) + " |", "|---" * (1 + len(places)) + "|"]
    for name, row in counts.items():
        cells = [
            row[place]["error"].partition(":")[0]
            if "error" in row[place]
            else f"{row[place]['collectives']}, {row[place]['bytes']:,} B"
            for place in places
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    errors = {row[place]["error"] for row in counts.values() for place in places if "error" in row[place]}
    lines += ["", *(f"* `{text}`" for text in sorted(errors)), ""]
    lines += ["| ranks | optimizer | ms | relative to AdamW(fused=True), p10-p90 |", "|---|---|---|---|"]
    for ranks, times in found["times_by_ranks"].items():
        for name, row in times.items():
            ratio = row["ratio"]
            spread = f"{ratio['median']:.2f} ({ratio['p10']:.2f}-{ratio['p90']:.2f})"
            lines.append(f"| {ranks} | {name} | {row['ms']['median']:.1f} | {spread} |")
    return "\n".join(lines) + "\n\n"


def release_table() -> str:
    """The measurements of release_gradients.py."""
    found = json.loads((HERE / "results" / "release-gradients.json").read_text())
    lines = [
        "",
        "| optimizer | peak, in bytes of the weights: ordinary step | gradients released | all-reduces of a step under "
        "FSDP2: ordinary | gradients released |",
        "|---" * 5 + "|",
    ]
    for row in found["results"]:
        peaks = [str(row[kind]["in_weights"]) for kind in ("ordinary", "released")]
        counts = [str(row["collectives_on_two_ranks"][kind]["allreduce"]) for kind in ("ordinary", "released")]
        lines.append("| " + " | ".join([row["optimizer"], *peaks, *counts]) + " |")
    return "\n".join(lines) + "\n\n"


TABLES = {"plan": plan_table, "norms": norms_table, "sent": sent_table, "release": release_table}


def written() -> str:
    """The page with its tables rewritten."""
    text, count = TABLE.subn(lambda match: match[1] + match[2] + TABLES[match[1]](), PAGE.read_text())
    assert count == len(TABLES)
    return text


if __name__ == "__main__":
    PAGE.write_text(written())
