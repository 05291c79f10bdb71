"""The loss of training with fewer bits of state and of weights: each form beside float32, over the same seeds.

    python workbench/benchmarks/few_bits.py MNIST_DIR TEXT_FILE [--seeds 5] [--processes 2]
    python workbench/benchmarks/few_bits.py --page

LeNet on a tenth of MNIST at batch 60 and the character GPT at batch 8, with the options that the comparisons at equal
tuning chose for Lamb and for Came in float32, and the adapters of lora.py, with its best rates. Only the form differs,
so nothing is tuned for it. Writes results/few-bits.json, and with --page only its table in results/precision.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

import equal_tuning
import lora
from bighorn import Came, Lamb
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks.text import Text
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.metrics import is_share
from bighorn_workbench.verdict import interval
from evidence import value
from result_files import RESULTS

RESULT = RESULTS / "few-bits.json"
PAGE = RESULTS / "precision.md"
TABLE = re.compile(r"(<!-- table of few-bits\.json[^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
STUDIES = {"equal-lenet": 60, "equal-characters": 8}
"""The comparisons whose best options are taken, and the batch size."""

FLOAT32 = "float32"
FORMS: dict[str, dict[str, Any]] = {
    FLOAT32: {},
    "int8": {"state_dtype": "int8"},
    "int4": {"state_dtype": "int4"},
    **{f"float32, bf16 {way}": {"weight_rounding": way} for way in ("stochastic", "kahan8", "master")},
    "int4, bf16 stochastic": {"state_dtype": "int4", "weight_rounding": "stochastic"},
    "int4, bf16 kahan8": {"state_dtype": "int4", "weight_rounding": "kahan8"},
}
"""The dtype of the state, and for weights in bfloat16 how they are rounded."""

ADAPTERS: dict[str, Callable[..., Optimizer]] = {
    "lamb": lambda named, **form: Lamb(named, lr=0.005, exclude_from_layer_adaptation=["lora_B"], **form),
    "came": lambda named, **form: Came(named, lr=0.008, bias_correction=True, **form),
}
"""The optimizers of adapters of rank 4, whose state has fewer bits although each tensor is small."""


def config_of(cell: equal_tuning.Cell, data: str, form: dict[str, Any], seed: int) -> RunConfig:
    """Return the options of a cell's run, in another form."""
    config = cell.config(data)
    if "weight_rounding" in form:
        rounding = f"weight_rounding={form['weight_rounding']}"
        config = replace(config, precision="bf16", optimizer_option=(*config.optimizer_option, rounding))
    return replace(config, state_dtype=form.get("state_dtype"), seed=seed)


def measure(data: dict[str, str], seeds: int, processes: int) -> list[dict[str, Any]]:
    """Train every form with every seed; LeNet in float32 alone, since its convolutions in bfloat16 take minutes."""
    wanted = [
        (study, cell, form)
        for study, batch in STUDIES.items()
        for cell in equal_tuning.cells_of(study)[batch]
        for form, options in FORMS.items()
        if cell.name in ("lamb", "came") and (study != "equal-lenet" or "weight_rounding" not in options)
    ]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        runs = [
            [pool.submit(value, config_of(cell, data[study], FORMS[form], seed)) for seed in range(1, seeds + 1)]
            for study, cell, form in wanted
        ]
        rows = []
        for (study, cell, form), mine in zip(wanted, runs, strict=True):
            values = [run.result() for run in mine]
            rows.append({"study": study, "name": cell.name, "metric": cell.metric, "form": form, "values": values})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def adapter_losses(seed: int) -> dict[tuple[str, str], float]:
    """Return the losses of one seed's adapters, by optimizer and form."""
    task = Text()
    base, texts = lora.pretrained(task, seed), lora.upper_case(task)
    found = {}
    for name, kind in ADAPTERS.items():
        for form in (FLOAT32, "int8", "int4"):
            options = {**FORMS[form], "min_8bit_size": 1} if FORMS[form] else {}
            losses = lora.adapters_of(base, texts, lambda named: kind(named, **options), 4, 0, seed)["losses"]  # noqa: B023
            found[name, form] = losses[lora.SHOWN[-1]]
    return found


def measured_adapters(seeds: int, processes: int) -> list[dict[str, Any]]:
    """Train adapters in each form of state with every seed."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(adapter_losses, range(1, seeds + 1)))
    return [
        {"study": "lora", "name": name, "metric": "loss", "form": form, "values": [each[name, form] for each in found]}
        for name, form in found[0]
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text: mean, range, and the paired difference from float32, in bold if it is clear."""
    lines = ["| | state, weights | test (min-max) | from float32 |", "|---|---|---|---|"]
    exact: list[float] = []
    comparisons = sum(row["form"] != FLOAT32 for row in rows)
    for row in rows:
        metric, values = row["metric"], row["values"]
        exact = values if row["form"] == FLOAT32 else exact
        mean, low, high = (
            equal_tuning.text(metric, each) for each in (statistics.fmean(values), min(values), max(values))
        )
        words = ""
        if row["form"] != FLOAT32:
            away, half = interval([a - b for a, b in zip(values, exact, strict=True)], comparisons)
            scale, digits = (100, 1) if is_share(metric) else (1, 4)
            words = f"{scale * away:+.{digits}f} ± {scale * half:.{digits}f}"
            words = f"**{words}**" if abs(away) > half else words
        task = {"equal-lenet": "LeNet, accuracy", "equal-characters": "GPT, loss", "lora": "LoRA, loss"}[row["study"]]
        algorithm = {"lamb": "`Lamb`", "came": "`Came`"}[row["name"]]
        lines.append(f"| {algorithm}, {task} | {row['form']} | {mean} ({low}-{high}) | {words} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the file and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", metavar="DATA")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if not arguments.page:
        if len(arguments.data) != 2:
            parser.error("give MNIST_DIR and TEXT_FILE")
        about = provenance("python workbench/benchmarks/few_bits.py MNIST_DIR TEXT_FILE")
        rows = measure(dict(zip(STUDIES, arguments.data, strict=True)), arguments.seeds, arguments.processes)
        rows += measured_adapters(arguments.seeds, arguments.processes)
        files.write_json(RESULT, {**about, "seeds": arguments.seeds, "rows": rows})
    rows = json.loads(RESULT.read_text())["rows"]
    PAGE.write_text(TABLE.sub(lambda match: match[1] + table(rows) + match[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
