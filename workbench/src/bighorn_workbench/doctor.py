"""``bighorn doctor``: which backends work here, and what to do about the others."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import bighorn
from bighorn import CAME_PRESETS, LARS_PRESETS, PRESETS
from bighorn_workbench import files
from bighorn_workbench.environment import environment, machine
from bighorn_workbench.errors import InputError
from bighorn_workbench.optimizers import BACKENDS
from bighorn_workbench.options import FILE, Command
from bighorn_workbench.values import device_of

VARIABLES = ("BIGHORN_", "OMP_", "GOMP_", "MKL_", "CUDA_VISIBLE_DEVICES")


@click.command(cls=Command, epilog="Example: bighorn doctor --require cpu --json doctor.json")
@click.option("--require", multiple=True, type=click.Choice(BACKENDS), help="Fail unless this backend works.")
@click.option("--presets", is_flag=True, help="List what Lamb.like(), Came.like() and Lars.like() give, instead.")
@click.option("--device", help="Step on this device of torch, such as npu:0. Default: torch's accelerator, if any.")
@click.option("--json", "json_file", type=FILE, help="Write the findings as JSON.")
def doctor(require: tuple[str, ...], presets: bool, device: str | None, json_file: Path | None) -> None:
    """Say which backends work here, and why others do not."""
    if presets and (require or device):
        raise click.UsageError("--presets only prints a table: leave out --require and --device.")
    files.check_outputs({"--json": json_file})
    console = Console(highlight=False, emoji=False)
    if presets:
        content: dict[str, Any] = {"presets": preset_rows()}
        console.print(_preset_table(content["presets"]))
    else:
        content = findings(device_of(device) if device else None)
        for line in _lines(content):
            console.print(line, soft_wrap=True)
    files.finish(partial(console.print, markup=False), None, str, json_file, lambda: content)
    for name in require:
        if not content["backends"][name]["works"]:
            raise InputError(
                f"--require {name}: this backend does not work here ({content['backends'][name]['detail']})."
            )


def findings(device: torch.device | None = None) -> dict[str, Any]:
    """Return everything that doctor reports, with a step on a device if there is one."""
    status = bighorn.status(device=device)
    built = {"C library": status.c_library} if status.c_library else {}
    return {
        "backends": {row.name: _row(row) for row in status.backends if not row.has},
        "devices": {str(row.device): {**_row(row), **row.has} for row in status.backends if row.has},
        "environment": {name: value for name, value in environment().items() if name not in {"cpu backend", "device"}},
        "machine": machine() | built,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def _row(row: bighorn.BackendStatus) -> dict[str, Any]:
    return {"works": row.works, "detail": row.detail}


def preset_rows() -> list[dict[str, Any]]:
    """The presets of all optimizers as JSON."""
    names = ("name", "aliases", "options", "differs", "source")
    return [
        {"optimizer": optimizer, **{name: getattr(preset, name) for name in names}}
        for optimizer, presets in (("lamb", PRESETS), ("came", CAME_PRESETS), ("lars", LARS_PRESETS))
        for preset in presets
    ]


def _lines(content: dict[str, Any]) -> Iterator[Text]:
    """The findings as lines that the terminal wraps, so that a path can be copied."""
    devices = {f"foreach, {name}": found for name, found in content["devices"].items()}
    backends = {**content["backends"], **devices}
    headings = [heading for heading in ("environment", "machine", "variables") if content[heading]]
    width = 2 + max(len(name) for each in (backends, *(content[heading] for heading in headings)) for name in each)
    yield Text("Backends", "bold")
    for name, found in backends.items():
        verdict = Text("works", "green") if found["works"] else Text("does not work", "red")
        yield Text(f"{name:<{width}}").append(verdict).append(f"  {found['detail']}")
    for heading in headings:
        yield Text(f"\n{heading.capitalize()}", "bold")
        yield from (Text(f"{name:<{width}}{value}") for name, value in content[heading].items())


def _preset_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "preset", "differs from the paper (LAMB's version 5), and by which options", box=None, padding=(0, 2, 0, 0)
    )
    for row in rows:
        options = ", ".join(f"{name}={value!r}" for name, value in row["options"].items())
        text = Text(f"{row['optimizer'].capitalize()}: {row['differs']}").append(
            f"\n{options}" if options else "", "dim"
        )
        table.add_row("\n".join([row["name"], *row["aliases"]]), text)
    return table
