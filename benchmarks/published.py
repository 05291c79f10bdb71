"""The published tables of CPU steps: how each is measured, and whether it still holds for the present code.

    python benchmarks/published.py [NAME ...]   # measure them again, 15 minutes; then run workbench/benchmarks/front.py

Measure on a machine that does nothing else, from a clean tree: each file names its commit. A test of the ledger fails
when a count on which a table depends has changed since then by more than 1%, and by more than one call.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ledger
from ledger_counts import KERNELS
from ledger_steps import ROWS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "workbench" / "benchmarks" / "results"
LARS = [row for row in (*ROWS, *KERNELS) if row.startswith(("lars cpu", "lars kernel")) and not row.endswith("first")]
CPU = [row for row in ROWS if " cpu " in row and row not in LARS]
OF_TWO = [row for row in KERNELS if row not in LARS]
FLOAT32 = [row for row in OF_TWO if row.endswith("float32")]
BFLOAT16 = [row for row in OF_TWO if row.endswith("bfloat16")]
MODELS = [row for row in CPU if row.endswith((" tiny", " efficientnet_b0", " large"))]


class Table(NamedTuple):
    """A file in results."""

    command: str
    """The arguments of `bighorn bench`."""
    rows: list[str]
    """The rows of the ledger whose counts its times depend on."""


TABLES = {
    "step-fp32": Table(
        "--shapes tiny,efficientnet_b0,vit_small,resnet50,bert_base,bert_large,one --optimizers lamb,lamb-adam,came "
        "--seconds 4",
        [*MODELS, *FLOAT32],
    ),
    "step-fp32-peers": Table(
        "--shapes vit_small,bert_base --optimizers lamb,lamb-foreach,timm,pytorch_optimizer",
        ["lamb cpu large", "lamb kernel float32", "lamb foreach efficientnet_b0", "lamb foreach large"],
    ),
    "step-bf16": Table(
        "--precision bf16 --shapes vit_small,bert_base --optimizers lamb,lamb-adam,came --seconds 2",
        [*(row for row in CPU if row.endswith("tiny bf16")), *BFLOAT16],
    ),
    "step-clip": Table(
        "--clip 1 --shapes bert_base --optimizers lamb,lamb-adam",
        [*(row for row in CPU if row.endswith("clip")), *FLOAT32],
    ),
    "step-came": Table(
        "--table came --shapes vit_small,resnet50,bert_base --seconds 2",
        [row for row in (*CPU, *OF_TWO) if row.startswith("came") and "first" not in row],
    ),
    "step-lars": Table("--table lars --shapes vit_small,resnet50,bert_base --seconds 3", LARS),
    "step-cliffs": Table("--table cliffs --seconds 3", [*CPU, *FLOAT32]),
    "step-precision": Table(
        "--table precision --precision bf16 --shapes vit_small,bert_base --seconds 2",
        [*(row for row in CPU if row.endswith(("bf16", "int8"))), *OF_TWO],
    ),
}
OWN_TABLES = ("step-cliffs", "step-precision")
"""The arguments of `bench_tables.py`, for tables that `bighorn bench` does not have."""


def changed_since(name: str) -> list[str]:
    """Return the counts that have changed since a table was measured, as "ROW: COUNT THEN, NOW".

    Raises:
        LookupError: The commit, or a ledger in it, is not in this repository: the table is from before the ledger.
    """
    commit = json.loads((RESULTS / f"{name}.json").read_text())["commit"]
    path = ledger.FILE.relative_to(ROOT)
    command = ["git", "-C", str(RESULTS), "show", f"{commit}:{path.as_posix()}"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise LookupError(f"{name}.json is of commit {commit}, which has no ledger here") from error
    return changes(json.loads(text)["rows"], json.loads(ledger.FILE.read_text())["rows"], TABLES[name].rows)


def changes(then: dict[str, Any], now: dict[str, Any], rows: list[str]) -> list[str]:
    """Return the counts that are better or worse by more than the ledger's 1%, and whole ones by more than 1."""
    found = []
    for row in rows:
        before, after = then.get(row, {}), now[row]
        for count in dict.fromkeys([*ledger.worse(before, after), *ledger.worse(after, before)]):
            a, b = before.get(count, 0), after.get(count, 0)
            if not isinstance(b, int) or abs(a - b) > 1:
                found.append(f"{row}: {count} {a:,} then, {b:,} now")
    return found


def main() -> None:
    for name in sys.argv[1:] or TABLES:
        own = "workbench/benchmarks/bench_tables.py"
        program = [own] if name in OWN_TABLES else ["-m", "bighorn_workbench", "bench"]
        arguments = [*TABLES[name].command.split(), "--json", f"workbench/benchmarks/results/{name}.json"]
        print("bighorn bench", *arguments, flush=True)
        subprocess.run([sys.executable, *program, *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
