"""What LAMB costs and what it comes to in each precision: the first table of docs/precision.md.

    python benchmarks/precision_table.py [--shapes bert_base] [--seconds 4] [--page]

A step takes turns with that of a LAMB whose weights, gradients and states are float32. Bytes are of the same shapes;
losses are those of `bighorn compare --study precision --task text`, in precision-text.json.
Writes benchmarks/results/precision-table.json, and from it the table in docs/precision.md; with --page that alone.
"""

import argparse
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from bighorn import Lamb
from bighorn.cli import files, measure
from bighorn.cli.environment import provenance
from bighorn.cli.shapes import SHAPES

RESULTS = Path(__file__).parent / "results"
RESULT, LOSSES = RESULTS / "precision-table.json", RESULTS / "precision-text.json"
PAGE = Path(__file__).parent.parent / "docs" / "precision.md"
TABLE = re.compile(r"(<!-- table of precision-table\.json[^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Row:
    """A way to keep weights and moments; `study` is its name in the study of losses, if it is there."""

    weights: torch.dtype
    rounding: str
    state: str | None
    study: str | None
    lost: str
    when: str

    @property
    def name(self) -> str:
        """What tells it from other rows."""
        return f"{str(self.weights).removeprefix('torch.')}, {self.rounding}, {self.state}"

    def optimizer(self, shapes: str) -> Optimizer:
        """One after its first step, on these shapes."""
        device = torch.device("cpu")
        weights, grads = (
            measure.draw(list(SHAPES[shapes]()), scale, self.weights, device, seed)
            for scale, seed in ((0.02, 0), (1e-3, 1))
        )
        options: dict[str, Any] = {"weight_rounding": self.rounding, "state_dtype": self.state}
        return measure.prepared(lambda params, lr, _: Lamb(params, lr=lr, **options), weights, grads, None)[0]

    def state_bytes(self, shapes: str) -> float:
        """Per parameter."""
        params = [torch.nn.Parameter(torch.empty(s, dtype=self.weights, device="meta")) for s in SHAPES[shapes]()]
        held = Lamb.state_bytes(params, weight_rounding=self.rounding, state_dtype=self.state)
        return sum(held.values()) / sum(param.numel() for param in params)


ROWS = [
    Row(FLOAT32, "nearest", None, "lamb", "nothing", "memory does not matter"),
    Row(FLOAT32, "nearest", "float16", "lamb-fp16", "updates are off by 0.3%", "half the state is enough"),
    Row(FLOAT32, "nearest", "int8", "lamb-int8", "updates are off by 3%, trust ratios by 0.1%", "it must be a quarter"),
    Row(
        FLOAT32, "nearest", "bfloat16", "lamb-bf16", "updates are off by 13%, trust ratios by 14%", "only speed counts"
    ),
    Row(BFLOAT16, "nearest", None, "lamb-nearest", "every step of less than half an ulp", "it is to be as in torch"),
    Row(BFLOAT16, "stochastic", None, "lamb-stochastic", "a weight is noisy in its last bit", "kahan is too large"),
    Row(BFLOAT16, "kahan", None, "lamb-kahan", "nothing, but for one float32 ulp at ties", "weights are in bfloat16"),
    Row(BFLOAT16, "master", None, "lamb-master", "nothing", "others write weights between steps"),
    Row(BFLOAT16, "kahan", "int8", None, "as with int8 above", "memory is all that matters"),
]


def measured(shapes: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Bytes of state, and the time of a step beside that in float32; the first row is beside another of its kind."""
    baseline, found = ROWS[0].optimizer(shapes), {}
    for row in ROWS:
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
    losses = {cell["name"]: cell["loss"] for cell in json.loads(LOSSES.read_text())["cells"]}
    exact = losses["lamb"]["median"]
    lines = [
        "| weights | `state_dtype` | bytes per parameter | step | loss | what is lost | pick it if |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        figures = result["rows"][row.name]
        ratio = figures["ratio"]
        cells = [
            str(row.weights).removeprefix("torch.") + (f', `"{row.rounding}"`' if row.weights == BFLOAT16 else ""),
            f'`"{row.state}"`' if row.state else "`None` (float32)",
            f"{row.weights.itemsize} + {figures['bytes_per_parameter']:.2f}",
            f"{ratio['median']:.2f} ({ratio['p10']:.2f}-{ratio['p90']:.2f})",
            f"{round(losses[row.study]['median'] / exact - 1, 3) + 0.0:+.1%}" if row.study else "not measured",
            row.lost,
            row.when,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["", *lines, "", ""])


def written() -> str:
    """docs/precision.md with its table written anew."""
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
            f"python benchmarks/precision_table.py --shapes {arguments.shapes} --seconds {arguments.seconds:g}"
        )
        files.write_json(RESULT, {**about, "rows": measured(arguments.shapes, arguments.seconds)})
    files.write_text(PAGE, written())


if __name__ == "__main__":
    main()
