"""``bighorn bench``: what a step costs here, beside its peers."""

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
from bighorn.cli import cuda, files
from bighorn.cli.config import MOST_THREADS, PRECISIONS
from bighorn.cli.display import counting, quantity
from bighorn.cli.environment import package_version, provenance
from bighorn.cli.errors import InputError
from bighorn.cli.measure import draw, error, prepared, rounds, spread, temporaries
from bighorn.cli.optimizers import state_bytes
from bighorn.cli.options import command_line, config_options, option
from bighorn.cli.peers import PEERS, TABLES, BenchTable, Build
from bighorn.cli.shapes import SHAPES, Shape
from bighorn.cli.values import at_least, names, positive

FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class Instrument:
    """How steps on a device are measured."""

    check: Callable[[], None]
    """Refuses a machine without such a device."""
    facts: Callable[[], dict[str, Any]]
    """What is known of the device, in JSON's terms."""
    rounds: Callable[[Optimizer, Optimizer, float], tuple[list[float], list[float]]]
    temporaries: Callable[[Callable[[], object]], int | None]
    host_seconds: Callable[[Callable[[], object]], float] | None = None
    """What a step costs the host, where it does not wait for the device."""


INSTRUMENTS = {
    "cpu": Instrument(lambda: None, dict, rounds, temporaries),
    "cuda": Instrument(cuda.check, cuda.facts, cuda.rounds, cuda.temporaries, cuda.host_seconds),
}


@dataclass(frozen=True)
class BenchConfig:
    """The options of a benchmark."""

    device: str = option("cpu", "Where the tensors lie, and whose time is taken.", choices=tuple(INSTRUMENTS))
    table: str | None = option(
        None,
        "Against torch's fused AdamW: Lamb and others (steps), Came and others (came), both on a GPU (gpu). Against a "
        "loop over the tensors: LAMBrrr's benchmark (lambrrr).",
        choices=tuple(TABLES),
        shown="steps; gpu with --device cuda",
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

    @property
    def layout(self) -> BenchTable:
        """The table, which the device chooses where none is asked for."""
        return TABLES[self.table or ("gpu" if self.device == "cuda" else "steps")]

    def __post_init__(self) -> None:
        if self.device not in self.layout.devices:
            raise InputError(f"--table {self.table} is measured with --device {' or '.join(self.layout.devices)}.")
        positive("--clip", self.clip)
        at_least("--threads", self.threads, 1, MOST_THREADS)
        at_least("--seconds", self.seconds, 0)


@click.command(epilog="Example: bighorn bench --shapes vit_small,bert_base --report bench.html")
@config_options(BenchConfig)
@click.option("--report", type=FILE, help="Write an HTML report: all figures, optimizers beside each other.")
@click.option("--json", "json_file", type=FILE, help="Write the figures, and what they depend on, as JSON.")
@click.pass_context
def bench(ctx: click.Context, /, report: Path | None, json_file: Path | None, **options: Any) -> None:
    """Time optimizer steps: this package's, torch's, and those of other packages that are installed.

    Each optimizer takes turns with the table's first row on parameters of real models' shapes, with random gradients
    and its state in place. Times are medians; ratios are of each round, as median and 10th to 90th percentile.
    Temporaries are what resident memory rises by during a step. The error is the weights', relative to float64,
    after two steps. Compile is what the first step of a compiled optimizer takes longer, without any cache.
    On a GPU, times are the device's, with cold caches; temporaries are what its allocator hands out during a step;
    of copy is how fast weights, gradients and state pass by, each read and written once, beside a plain copy; host is
    what a step costs the host.
    """
    config = BenchConfig(**options)
    layout, instrument = config.layout, INSTRUMENTS[config.device]
    sets = layout.shapes if config.shapes is None else names("--shapes", config.shapes, SHAPES)
    builds, absent = _load(config)
    instrument.check()
    for flag, path in (("--report", report), ("--json", json_file)):
        if path is not None:
            files.check_writable(path, flag)
    if config.threads is not None:
        torch.set_num_threads(config.threads)

    content: dict[str, Any] = {
        **provenance(command_line(ctx)),
        "packages": {PEERS[name].package: package_version(PEERS[name].package) for name in builds},
        "absent": absent,
        "config": asdict(config),
        "device": instrument.facts(),
        "baseline": layout.baseline,
        "results": [],
    }
    console = Console(soft_wrap=True, highlight=False)
    about, here = content["environment"], content["machine"]
    if content["device"]:
        speed = content["device"]["copy_bytes_per_s"]
        console.print(f"{content['device']['device']}, copies {quantity(round(speed))} bytes/s, {config.precision}")
    console.print(
        f"{about['processor']}, cores: {here['cores allowed']}, threads: {about['threads']}, {config.precision}"
    )
    for name in sets:
        shapes = list(SHAPES[name]())
        rows = _measure(shapes, builds, config, content["device"].get("copy_bytes_per_s"), console)
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
    if report is not None:
        from bighorn.cli.report import bench_report

        files.write_text(report, bench_report(content, COLUMNS, [PEERS[name].label for name in absent]))
        console.print(f"Report: {report}")
    if json_file is not None:
        files.write_json(json_file, content)
        console.print(f"JSON: {json_file}")


def _load(config: BenchConfig) -> tuple[dict[str, Build], dict[str, str]]:
    """The baseline and the others by name, and why some are absent, which is an error for one that was asked for."""
    layout, asked = config.layout, config.optimizers
    wanted = (layout.baseline, *(layout.peers if asked is None else names("--optimizers", asked, PEERS)))
    builds, absent = {}, {}
    for name in dict.fromkeys(wanted):
        try:
            builds[name] = PEERS[name].load_for(config.device)
        except ImportError as reason:
            if asked is not None:
                raise InputError(f"--optimizers {name}: {reason}") from reason
            absent[name] = str(reason)
    return builds, absent


def _measure(
    shapes: Sequence[Shape], builds: dict[str, Build], config: BenchConfig, copy_speed: float | None, console: Console
) -> list[dict[str, Any]]:
    """One row per optimizer. The baseline's compares it with itself: what it shows beside 1.00 is the noise."""
    dtype, instrument = PRECISIONS[config.precision], INSTRUMENTS[config.device]
    device = torch.device(config.device)
    weights, grads = draw(shapes, 0.02, dtype, device, seed=0), draw(shapes, 1e-3, dtype, device, seed=1)
    first, *_ = builds.values()
    baseline, _ = prepared(first, weights, grads, config.clip)
    rows = []
    with counting(console) as bar:
        task = bar.add_task("", total=len(builds))
        for name, build in builds.items():
            bar.update(task, description=PEERS[name].label)
            measured = _beside(baseline, *prepared(build, weights, grads, config.clip), config.seconds, instrument)
            compiling = measured["first_step_s"] - 1e-3 * measured["ms"]["median"] if PEERS[name].compiles else None
            if copy_speed is not None:
                passing = 3 * sum(weight.nbytes for weight in weights) + 2 * (measured["state_bytes"] or 0)
                measured["of_copy"] = passing / (1e-3 * measured["ms"]["median"]) / copy_speed
            # After the first step, since what is compiled for one optimizer serves the next.
            off = error(build, weights, grads)
            bar.advance(task)
            rows.append({"name": name, "label": PEERS[name].label, **measured, "compile_s": compiling, "error": off})
    return rows


def _beside(
    baseline: Optimizer, optimizer: Optimizer, first_step: float, seconds: float, instrument: Instrument
) -> dict[str, Any]:
    extra = instrument.temporaries(optimizer.step)
    theirs, mine = instrument.rounds(baseline, optimizer, seconds)
    return {
        "rounds": len(mine),
        "ms": spread(mine, 1e3),
        "baseline_ms": spread(theirs, 1e3),
        "ratio": spread([ours / other for ours, other in zip(mine, theirs, strict=True)]),
        "first_step_s": first_step,
        "host_ms": 1e3 * instrument.host_seconds(optimizer.step) if instrument.host_seconds else None,
        "temporaries_bytes": extra,
        "state_bytes": state_bytes(optimizer) or None,  # LoopLamb's is not where optimizers have theirs
        "explain": optimizer.explain() if isinstance(optimizer, Lamb | Came) else None,
    }


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms": lambda row: f"{row['ms']['median']:.2f}",
    "ms p10-p90": lambda row: f"{row['ms']['p10']:.2f}-{row['ms']['p90']:.2f}",
    "ratio": lambda row: f"{row['ratio']['median']:.2f}",
    "p10-p90": lambda row: f"{row['ratio']['p10']:.2f}-{row['ratio']['p90']:.2f}",
    "host": lambda row: "-" if row["host_ms"] is None else f"{row['host_ms']:.2f} ms",
    "of copy": lambda row: f"{row['of_copy']:.0%}" if "of_copy" in row else "-",
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
