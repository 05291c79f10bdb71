"""The bytes and the loss of LAMB and CAME in each precision: the first table of docs/precision.md.

    python workbench/benchmarks/precision_table.py

Bytes are predicted for BERT-base's shapes; losses come from `bighorn compare --task text`, in precision-text.json,
came-text.json and came-published-int8-text.json. Times are in step-precision.json. Writes the table in
docs/precision.md.
"""

import json
import re
import statistics
from dataclasses import dataclass

import torch

from bighorn import Came, Lamb
from bighorn_workbench import files
from bighorn_workbench.shapes import SHAPES
from result_files import DOCS, RESULTS

PAGE = DOCS / "precision.md"
TABLE = re.compile(r"(<!-- table of precisions[^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
SET = "bert_base"
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Row:
    """A way to keep weights and moments; `study` is a file and a name there, under which its loss stands if it does."""

    kind: type[Lamb] | type[Came]
    weights: torch.dtype
    rounding: str
    state: str | None
    study: str | None
    lost: str
    when: str

    @property
    def loss(self) -> float | None:
        """The last loss of a training; the mean of all seeds."""
        if self.study is None:
            return None
        file, name = self.study.split("/")
        [found] = [cell for cell in json.loads((RESULTS / file).read_text())["cells"] if cell["name"] == name]
        return statistics.fmean(run["loss"] for run in found["final"])

    def state_bytes(self, shapes: str) -> float:
        """Per parameter."""
        params = [torch.nn.Parameter(torch.empty(s, dtype=self.weights, device="meta")) for s in SHAPES[shapes]()]
        held = self.kind.state_bytes(params, weight_rounding=self.rounding, state_dtype=self.state)
        return sum(held.values()) / sum(param.numel() for param in params)


TEXT, CAME = "precision-text.json", "came-text.json"
ROWS = [
    Row(Lamb, FLOAT32, "nearest", None, f"{TEXT}/lamb", "nothing", "memory does not matter"),
    Row(
        Lamb, FLOAT32, "nearest", "int8", f"{TEXT}/lamb-int8",
        "updates are off by 3%, trust ratios by 0.1%", "a quarter of AdamW's state is enough",
    ),
    Row(
        Lamb, FLOAT32, "nearest", "bfloat16", f"{TEXT}/lamb-bf16",
        "updates are off by 13%, trust ratios by 14%", "codes are too slow on your machine",
    ),
    Row(
        Lamb, BFLOAT16, "nearest", None, f"{TEXT}/lamb-nearest",
        "every step of less than half an ulp", "you need torch's behaviour",
    ),
    Row(
        Lamb, BFLOAT16, "stochastic", None, f"{TEXT}/lamb-stochastic",
        "a weight is noisy in its last bit", "kahan is too large",
    ),
    Row(
        Lamb, BFLOAT16, "kahan", None, f"{TEXT}/lamb-kahan",
        "one float32 ulp at ties, otherwise nothing", "weights are in bfloat16",
    ),
    Row(Lamb, BFLOAT16, "master", None, f"{TEXT}/lamb-master", "nothing", "other code writes weights between steps"),
    Row(Lamb, BFLOAT16, "kahan", "int8", None, "as with int8 above", "only memory matters"),
    Row(Lamb, BFLOAT16, "nearest", "bfloat16", None, "what both lose", "codes are too slow, and memory matters"),
    Row(Came, FLOAT32, "nearest", None, f"{CAME}/came-published", "nothing", "half of AdamW's state is enough"),
    Row(
        Came, FLOAT32, "nearest", "bfloat16", f"{CAME}/came-published-bf16",
        "the momentum's last 16 bits", "a quarter of AdamW's state is enough",
    ),
    Row(
        Came, FLOAT32, "nearest", "int8", "came-published-int8-text.json/came-published-int8",
        "the momentum is off by at most 0.8% of its block's largest", "an eighth of AdamW's state is enough",
    ),
]  # fmt: skip


def exact(row: Row) -> Row:
    """The row of the same optimizer in float32."""
    return next(other for other in ROWS if other.kind is row.kind)


def table() -> str:
    """The rows as Markdown."""
    lines = [
        "| | weights | `state_dtype` | bytes per parameter | loss | what is lost | use it if |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        ours, best = row.loss, exact(row).loss
        cells = [
            f"`{row.kind.__name__}`",
            str(row.weights).removeprefix("torch.") + (f', `"{row.rounding}"`' if row.weights == BFLOAT16 else ""),
            f'`"{row.state}"`' if row.state else "`None` (float32)",
            f"{row.weights.itemsize} + {row.state_bytes(SET):.2f}",
            f"{round(ours / best - 1, 3) + 0.0:+.1%}" if ours and best else "not measured",
            row.lost,
            row.when,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["", *lines, "", ""])


def written() -> str:
    """docs/precision.md with its table rewritten."""
    text, count = TABLE.subn(lambda match: match[1] + table() + match[2], PAGE.read_text())
    assert count == 1
    return text


if __name__ == "__main__":
    files.write_text(PAGE, written())
