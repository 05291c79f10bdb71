"""``bighorn bench``: the time of an optimizer step, relative to other optimizers."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from bighorn_workbench import cuda, files
from bighorn_workbench.bench_table import answers, as_text, mark_clear, notes
from bighorn_workbench.config import PRECISIONS
from bighorn_workbench.display import counting, quantity, table_of, terminal
from bighorn_workbench.environment import package_version, provenance
from bighorn_workbench.errors import InputError
from bighorn_workbench.measure import PARAM_SETS, Change, ParamSet, draw, error, prepared, step_times, temporaries
from bighorn_workbench.optimizers import KINDS
from bighorn_workbench.options import FILE, POSITIVE, THREADS, Command, Options, command_line, config_options, option
from bighorn_workbench.peers import PEERS, TABLES, BenchTable, Build
from bighorn_workbench.values import device_of, names

WIDTH_OF_FILES = 160
"""Columns of text if the output is not a terminal, where rich would wrap at 80; the widest table has 120."""

MOST_FOR_ERROR = 500_000_000
"""The largest number of parameters of a set whose error is measured: its float64 steps would take longer than all
others."""


@dataclass(frozen=True)
class Instrument:
    """The measurements on a device."""

    facts: Callable[[], dict[str, Any]]
    """Returns the properties of the device, as JSON."""
    step_times: Callable[[Optimizer, Optimizer, float, Sequence[Change]], dict[str, Any]]
    """Returns times of a baseline and an optimizer for some seconds, as JSON; changes come before their steps."""
    temporaries: Callable[[Callable[[], object]], int | None]
    seconds: float
    """The default of `--seconds`."""


INSTRUMENTS = {
    "cpu": Instrument(dict, step_times, temporaries, seconds=3.0),
    "cuda": Instrument(cuda.facts, cuda.step_times, cuda.temporaries, seconds=1.5),
}


@dataclass(frozen=True)
class BenchConfig(Options):
    """The options of a benchmark."""

    device: str = option("cpu", "The device of the tensors, whose time is measured.", choices=tuple(INSTRUMENTS))
    table: str | None = option(
        None,
        "Against torch's fused AdamW: Lamb and others (steps), Came and others (came), both on a GPU (gpu); against "
        "its fused SGD: Lars (lars).",
        choices=tuple(TABLES),
        shown="steps; gpu with --device cuda",
    )
    shapes: str | None = option(
        None,
        f"Parameter sets, of {', '.join(PARAM_SETS)}; a set takes about 40 bytes per parameter.",
        shown="; ".join(f"{name} {','.join(table.shapes)}" for name, table in TABLES.items()),
    )
    optimizers: str | None = option(
        None, f"What to time against the first row, of {', '.join(PEERS)}.", shown="the table's that are installed"
    )
    precision: str = option("fp32", "Type of weights and gradients; bf16 has bf16 states.", choices=tuple(PRECISIONS))
    clip: float | None = option(None, "Clip gradients to this norm.", shown="no clipping", check=POSITIVE)
    threads: int | None = option(None, "CPU threads.", shown="torch's choice", check=THREADS)
    seconds: float | None = option(
        None,
        "Time for each pair of optimizers, on a GPU for device time and for wall time; at least 5 rounds.",
        shown="3; 1.5 with --device cuda",
        check=POSITIVE,
    )

    @property
    def layout(self) -> BenchTable:
        """The table of columns; without ``--table``, the default of the device."""
        return TABLES[self.table or ("gpu" if self.device == "cuda" else "steps")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device not in self.layout.devices:
            raise InputError(f"--table {self.table} is measured with --device {' or '.join(self.layout.devices)}.")


@click.command(cls=Command, epilog="Example: bighorn bench --shapes vit_small,bert_base --report bench.html")
@config_options(BenchConfig)
@click.option("--report", type=FILE, help="Write an HTML report: all figures, optimizers beside each other.")
@click.option("--json", "json_file", type=FILE, help="Write the figures, and what they depend on, as JSON.")
@click.pass_context
def bench(ctx: click.Context, /, report: Path | None, json_file: Path | None, **options: Any) -> None:
    """Time optimizer steps beside torch's and other packages'.

    Each optimizer takes turns with the table's first row on parameters of real models' shapes, with random gradients
    and its state in place. Times are medians; ratios are of each round, as median and 10th to 90th percentile.
    Temporaries are what resident memory rises by during a step. The error is the weights', relative to float64,
    after two steps, in sets of at most 500M parameters.

    On a GPU, ms is device time with cold caches, measured while the device is behind the host, and "-" for a step that
    waits for the device; wall ms is the time of a step in 50 steps in a row, or of a single one in sets that change
    before each step, and host the time until a step returns. Temporaries are what torch's allocator hands out during
    a step.
    """
    config = BenchConfig(**options)
    layout, instrument = config.layout, INSTRUMENTS[config.device]
    sets = layout.shapes if config.shapes is None else names("--shapes", config.shapes, PARAM_SETS)
    refused = [name for name in sets if config.device == "cuda" and not PARAM_SETS[name].on_cuda]
    if refused:
        raise InputError(
            f"--shapes {refused[0]}: torch's fused AdamW, the first row, refuses gradients or state with other strides "
            "than the parameters' on CUDA; time it with --device cpu."
        )
    builds, absent = _load(config)
    device_of(config.device)
    files.check_outputs({"--report": report, "--json": json_file})
    if config.threads is not None:
        torch.set_num_threads(config.threads)

    content: dict[str, Any] = {
        **provenance(command_line(ctx), config.device),
        "packages": {PEERS[name].package: package_version(PEERS[name].package) for name in builds},
        "absent": absent,
        "config": asdict(config),
        "device": instrument.facts(),
        "baseline": layout.baseline,
        "results": [],
    }
    console = terminal()
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    about, machine = content["environment"], content["machine"]
    if content["device"]:
        console.print(f"{content['device']['device']}, {config.precision}")
    console.print(
        f"{about['processor']}, cores: {machine['cores allowed']}, threads: {about['threads']}, {config.precision}"
    )
    for name in sets:
        result = {"shapes": name, **_measure(PARAM_SETS[name], builds, config, console)}
        content["results"].append(result)
        if json_file is not None:  # written after each set, since an error of a peer on the device can end the run
            files.write_json(json_file, content)
        console.print(
            f"\n{name}: {result['tensors']} tensors, {quantity(result['parameters'])} parameters", style="bold"
        )
        console.print(table_of(("optimizer", *layout.columns), as_text(result["optimizers"], layout.columns)))
        for note in result["notes"]:
            console.print(note, markup=False)
    for name, reason in absent.items():
        console.print(f"Absent: {PEERS[name].label} ({reason})", markup=False)
    for line in answers(content["results"]):
        console.print(line, markup=False)
    if config.seconds is None:
        console.print(
            f"With more time: --seconds {10 * instrument.seconds:g} for steadier figures, --shapes for other models."
        )

    def page() -> str:
        from bighorn_workbench.reports.bench import bench_report

        return bench_report(content)

    files.finish(console.print, report, page, json_file, lambda: content)


def _load(config: BenchConfig) -> tuple[dict[str, Build], dict[str, str]]:
    """Return the optimizers by name, the baseline first, and why others are absent: an error for ``--optimizers``."""
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


def _measure(param_set: ParamSet, builds: dict[str, Build], config: BenchConfig, console: Console) -> dict[str, Any]:
    """Measure a set of parameters: one row per optimizer, and the reasons of failures.

    The baseline's row compares it with itself: the difference from 1.00 is the noise.
    """
    device = torch.device(config.device)
    shapes, dtype = list(param_set.shapes()), param_set.dtype or PRECISIONS[config.precision]
    weights, grads = (draw(shapes, scale, dtype, device, seed) for seed, scale in enumerate((0.02, 1e-3)))
    first, *_ = builds.values()
    baseline, _ = prepared(first, weights, grads, config.clip, param_set)
    rows: list[dict[str, Any]] = []
    failed = {}

    def row(name: str, build: Build) -> dict[str, Any]:
        instrument = INSTRUMENTS[config.device]
        seconds = instrument.seconds if config.seconds is None else config.seconds
        optimizer, first_step = prepared(build, weights, grads, config.clip, param_set)
        extra = instrument.temporaries(optimizer.step)
        changes = [
            param_set.change([param for group in each.param_groups for param in group["params"]])
            for each in (baseline, optimizer)
        ]
        times = instrument.step_times(baseline, optimizer, seconds, changes)
        peer = PEERS[name]
        exact = peer.float64 and "error" in config.layout.columns and sum(map(Tensor.numel, weights)) <= MOST_FOR_ERROR
        return {
            "name": name,
            "label": peer.label,
            "tensors": len(weights),
            **times,
            "first_step_s": first_step,
            "temporaries_bytes": extra,
            "state_bytes": peer.state_bytes(optimizer) or None,  # some optimizers keep tensors outside `state`
            "explain": optimizer.explain() if isinstance(optimizer, KINDS) else None,
            "error": error(build, weights, grads) if exact else None,
        }

    with counting(console) as bar:
        task = bar.add_task("", total=len(builds))
        for name, build in builds.items():
            bar.update(task, description=PEERS[name].label)
            try:
                rows.append(row(name, build))
            except Exception as reason:
                if not rows or config.optimizers is not None:  # the baseline, or an optimizer that was requested
                    raise
                failed[name] = f"{type(reason).__name__}: {reason}"
            gc.collect()  # otherwise an optimizer in a reference cycle would keep its memory during the next row
            bar.advance(task)
    mark_clear(rows)
    return {
        "tensors": len(shapes),
        "parameters": sum(weight.numel() for weight in weights),
        "optimizers": rows,
        "failed": failed,
        "notes": [*notes(rows, failed), *filter(None, [param_set.note])],
    }
