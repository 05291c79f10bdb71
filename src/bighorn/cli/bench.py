"""``bighorn bench``: what a step costs here, beside its peers."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.optim import Optimizer

from bighorn import Came, Lamb
from bighorn.cli import files
from bighorn.cli.config import PRECISIONS
from bighorn.cli.display import quantity
from bighorn.cli.environment import package_version, provenance
from bighorn.cli.errors import InputError
from bighorn.cli.measure import draw, error, prepared, rounds, temporaries
from bighorn.cli.optimizers import state_bytes
from bighorn.cli.options import config_options, option
from bighorn.cli.peers import PEERS, TABLES, BenchTable, Build
from bighorn.cli.shapes import SHAPES, Shape
from bighorn.cli.values import at_least, names, positive

FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class BenchConfig:
    """The options of a benchmark."""

    table: str = option(
        "steps",
        "Against torch's fused AdamW: Lamb and others (steps), Came and others (came). Against a loop over the "
        "tensors: LAMBrrr's benchmark (lambrrr).",
        choices=tuple(TABLES),
    )
    shapes: str | None = option(
        None,
        f"Parameter sets, of {', '.join(SHAPES)}; a set takes about 40 bytes per parameter.",
        shown="; ".join(f"{name} {','.join(table.shapes)}" for name, table in TABLES.items()),
    )
    optimizers: str | None = option(
        None, f"What to time against the first row, of {', '.join(PEERS)}.", shown="the table's that are installed"
    )
    precision: str = option("fp32", "Type of weights and gradients; bf16 has bf16 states.", choices=tuple(PRECISIONS))
    clip: float | None = option(None, "Clip gradients to this norm.", shown="no clipping")
    threads: int | None = option(None, "CPU threads.", shown="torch's choice")
    seconds: float = option(3.0, "Time for each pair of optimizers; at least 5 rounds.")

    def __post_init__(self) -> None:
        positive("--clip", self.clip)
        at_least("--threads", self.threads, 1)
        at_least("--seconds", self.seconds, 0)


@click.command
@config_options(BenchConfig)
@click.option("--json", "json_file", type=FILE, help="Write the figures, and what they depend on, as JSON.")
@click.pass_context
def bench(ctx: click.Context, /, json_file: Path | None, **options: Any) -> None:
    """Time optimizer steps on the CPU: this package's, torch's, and those of other packages that are installed.

    Each optimizer takes turns with the table's first row on parameters of real models' shapes, with random gradients
    and its state in place. Times are medians; ratios are of each round, as median and 10th to 90th percentile.
    Temporaries are what resident memory rises by during a step. The error is the weights', relative to float64,
    after two steps. Compile is what the first step of a compiled optimizer takes longer, without any cache.
    """
    config = BenchConfig(**options)
    layout = TABLES[config.table]
    sets = layout.shapes if config.shapes is None else names("--shapes", config.shapes, SHAPES)
    builds, absent = _load(layout, config.optimizers)
    if json_file is not None:
        files.check_writable(json_file, "--json")
    if config.threads is not None:
        torch.set_num_threads(config.threads)

    content: dict[str, Any] = {
        **provenance(ctx),
        "packages": {PEERS[name].package: package_version(PEERS[name].package) for name in builds},
        "absent": absent,
        "config": asdict(config),
        "baseline": layout.baseline,
        "results": [],
    }
    console = Console(soft_wrap=True, highlight=False)
    about, here = content["environment"], content["machine"]
    console.print(
        f"{about['processor']}, cores: {here['cores allowed']}, threads: {about['threads']}, {config.precision}"
    )
    for name in sets:
        shapes = list(SHAPES[name]())
        rows = _measure(shapes, builds, config, console)
        parameters = sum(torch.Size(shape).numel() for shape in shapes)
        content["results"].append(
            {"shapes": name, "tensors": len(shapes), "parameters": parameters, "optimizers": rows}
        )
        console.print(f"\n[bold]{name}[/]: {len(shapes)} tensors, {quantity(parameters)} parameters")
        console.print(_table(rows, layout.columns))
        noise = rows[0]["ratio"]
        if noise["p90"] > 1.2 * noise["p10"]:
            console.print("The baseline against itself varies this much: close other programs for steadier figures.")
    for name, reason in absent.items():
        console.print(f"Absent: {PEERS[name].label} ({reason})")
    if json_file is not None:
        files.write_json(json_file, content)
        console.print(f"JSON: {json_file}")


def _load(layout: BenchTable, asked: str | None) -> tuple[dict[str, Build], dict[str, str]]:
    """The baseline and the others by name, and why some are absent, which is an error for one that was asked for."""
    wanted = (layout.baseline, *(layout.peers if asked is None else names("--optimizers", asked, PEERS)))
    builds, absent = {}, {}
    for name in dict.fromkeys(wanted):
        try:
            builds[name] = PEERS[name].load()
        except ImportError as reason:
            if asked is not None:
                raise InputError(f"--optimizers {name}: {reason}") from reason
            absent[name] = str(reason)
    return builds, absent


def _measure(
    shapes: Sequence[Shape], builds: dict[str, Build], config: BenchConfig, console: Console
) -> list[dict[str, Any]]:
    """One row per optimizer. The baseline's compares it with itself: what it shows beside 1.00 is the noise."""
    dtype = PRECISIONS[config.precision]
    weights, grads = draw(shapes, 0.02, dtype, seed=0), draw(shapes, 1e-3, dtype, seed=1)
    first, *_ = builds.values()
    baseline, _ = prepared(first, weights, grads, config.clip)
    rows = []
    for name, build in builds.items():
        with console.status(PEERS[name].label):
            measured = _beside(baseline, *prepared(build, weights, grads, config.clip), config.seconds)
            compiling = measured["first_step_s"] - 1e-3 * measured["ms"]["median"] if PEERS[name].compiles else None
            # After the first step, since what is compiled for one optimizer serves the next.
            off = error(build, weights, grads)
        rows.append({"name": name, "label": PEERS[name].label, **measured, "compile_s": compiling, "error": off})
    return rows


def _beside(baseline: Optimizer, optimizer: Optimizer, first_step: float, seconds: float) -> dict[str, Any]:
    extra = temporaries(optimizer.step)
    theirs, mine = rounds(baseline, optimizer, seconds)
    return {
        "rounds": len(mine),
        "ms": _spread([1e3 * second for second in mine]),
        "baseline_ms": _spread([1e3 * second for second in theirs]),
        "ratio": _spread([ours / other for ours, other in zip(mine, theirs, strict=True)]),
        "first_step_s": first_step,
        "temporaries_bytes": extra,
        "state_bytes": state_bytes(optimizer) or None,  # LoopLamb's is not where optimizers have theirs
        "explain": optimizer.explain() if isinstance(optimizer, Lamb | Came) else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"p10": deciles[0], "median": deciles[4], "p90": deciles[8]}


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms": lambda row: f"{row['ms']['median']:.2f}",
    "ms p10-p90": lambda row: f"{row['ms']['p10']:.2f}-{row['ms']['p90']:.2f}",
    "ratio": lambda row: f"{row['ratio']['median']:.2f}",
    "p10-p90": lambda row: f"{row['ratio']['p10']:.2f}-{row['ratio']['p90']:.2f}",
    "compile": lambda row: "-" if row["compile_s"] is None else f"{row['compile_s']:.1f} s",
    "temporaries": lambda row: _megabytes(row["temporaries_bytes"]),
    "state": lambda row: _megabytes(row["state_bytes"]),
    "error": lambda row: f"{row['error']:.1e}",
}
"""A measured row in words."""


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.1f} MB"


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("optimizer")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["label"], *(COLUMNS[name](row) for name in columns))
    return table
