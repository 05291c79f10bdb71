"""The cost and the loss of LAMB and CAME in each precision: the first table of docs/precision-results.md.

    python workbench/benchmarks/precision_table.py [--shapes bert_base] [--seconds 4] [--page]

A step takes turns with a step of the same optimizer whose weights, gradients and states are float32. Bytes are of the
same shapes; losses come from `bighorn compare --task text`, in precision-text.json and came-text.json. Writes
results/precision-table.json, and from it the table in docs/precision-results.md; with --page that alone.
"""

import argparse
import json
import re
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from bighorn import Came, Lamb
from bighorn_workbench import files, measure
from bighorn_workbench.environment import provenance
from bighorn_workbench.shapes import SHAPES
from result_files import DOCS, RESULTS

RESULT = RESULTS / "precision-table.json"
PAGE = DOCS / "precision-results.md"
TABLE = re.compile(r"(<!-- table of precision-table\.json[^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
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
    def name(self) -> str:
        """The name that distinguishes the row."""
        return f"{self.kind.__name__}, {str(self.weights).removeprefix('torch.')}, {self.rounding}, {self.state}"

    @property
    def loss(self) -> float | None:
        """The last loss of a training; the mean of all seeds."""
        if self.study is None:
            return None
        file, name = self.study.split("/")
        [found] = [cell for cell in json.loads((RESULTS / file).read_text())["cells"] if cell["name"] == name]
        return statistics.fmean(run["loss"] for run in found["final"])

    def optimizer(self, shapes: str) -> Optimizer:
        """One after its first step, on these shapes."""
        device = torch.device("cpu")
        weights, grads = (
            measure.draw(list(SHAPES[shapes]()), scale, self.weights, device, seed)
            for scale, seed in ((0.02, 0), (1e-3, 1))
        )
        options: dict[str, Any] = {"weight_rounding": self.rounding, "state_dtype": self.state}
        return measure.prepared(lambda params, lr, _: self.kind(params, lr=lr, **options), weights, grads, None)[0]

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
        "updates are off by 3%, trust ratios by 0.1%", "you need a quarter of the memory",
    ),
    Row(
        Lamb, FLOAT32, "nearest", "bfloat16", f"{TEXT}/lamb-bf16",
        "updates are off by 13%, trust ratios by 14%", "speed matters more than accuracy",
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
    Row(Lamb, BFLOAT16, "nearest", "bfloat16", None, "what both lose", "only speed matters"),
    Row(Came, FLOAT32, "nearest", None, f"{CAME}/came-published", "nothing", "half of AdamW's state is enough"),
    Row(
        Came, FLOAT32, "nearest", "bfloat16", f"{CAME}/came-published-bf16",
        "the momentum's last 16 bits", "you need a quarter of the memory",
    ),
    Row(
        Came, FLOAT32, "nearest", "int8", "came-published-int8-text.json/came-published-int8",
        "the momentum is off by at most 0.4% of its block's largest", "you need an eighth of the memory",
    ),
]  # fmt: skip


def exact(row: Row) -> Row:
    """The row of the same optimizer in float32."""
    return next(other for other in ROWS if other.kind is row.kind)


def measured(shapes: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Bytes of state, and the time of a step beside float32; a row in float32 is beside another of its kind."""
    found = {}
    for row in ROWS:
        baseline = exact(row).optimizer(shapes)
        theirs, mine = measure.rounds(baseline, row.optimizer(shapes), seconds)
        ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
        found[row.name] = {
            "bytes_per_parameter": row.state_bytes(shapes),
            "ms": 1e3 * statistics.median(mine),
            "ratio": measure.spread(ratios),
            "rounds": len(ratios),
        }
        print(row.name, found[row.name], flush=True)
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| | weights | `state_dtype` | bytes per parameter | step | loss | what is lost | use it if |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        ours, best = row.loss, exact(row).loss
        figures = result["rows"][row.name]
        ratio = figures["ratio"]
        cells = [
            f"`{row.kind.__name__}`",
            str(row.weights).removeprefix("torch.") + (f', `"{row.rounding}"`' if row.weights == BFLOAT16 else ""),
            f'`"{row.state}"`' if row.state else "`None` (float32)",
            f"{row.weights.itemsize} + {figures['bytes_per_parameter']:.2f}",
            f"{ratio['median']:.2f} ({ratio['p10']:.2f}-{ratio['p90']:.2f})",
            f"{round(ours / best - 1, 3) + 0.0:+.1%}" if ours and best else "not measured",
            row.lost,
            row.when,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["", *lines, "", ""])


def written() -> str:
    """docs/precision-results.md with its table rewritten."""
    text, count = TABLE.subn(
        lambda match: match[1] + table(json.loads(RESULT.read_text())) + match[2], PAGE.read_text()
    )
    assert count == 1
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="bert_base", choices=tuple(SHAPES))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--page", action="store_true", help="write the table alone, from the figures there are")
    arguments = parser.parse_args()
    if not arguments.page:
        about = provenance(
            f"python workbench/benchmarks/precision_table.py --shapes {arguments.shapes} "
            f"--seconds {arguments.seconds:g}"
        )
        files.write_json(RESULT, {**about, "rows": measured(arguments.shapes, arguments.seconds)})
    files.write_text(PAGE, written())


if __name__ == "__main__":
    main()
