"""Checkpoints: everything that makes a resumed run bitwise the run that was never interrupted."""

import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bighorn.cli import files
from bighorn.cli.config import RunConfig
from bighorn.cli.environment import environment
from bighorn.cli.errors import InputError
from bighorn.cli.training import Run

FORMAT = "bighorn checkpoint 2"


def save(run: Run, path: Path) -> None:
    """Write the run to ``path``, atomically; call it in all processes."""
    checkpoint = {
        "format": FORMAT,
        "config": asdict(run.config),
        "environment": environment(),
        "data": run.dataset.fingerprint(),
        "processes": run.ranks.size,
        "run": run.state_dict(),
    }
    if run.ranks.first:
        files.write(path, lambda file: torch.save(checkpoint, file))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; it runs no code from the file.

    Raises:
        InputError: For a file that is missing, damaged or of another kind.
    """
    if not path.is_file():
        raise InputError(f"--resume {path}: there is no such file.")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch.load does not look at checksums
        if broken is not None:
            raise zipfile.BadZipFile(broken)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its zip, pickle and storage readers raise
        raise InputError(f"--resume {path} is damaged or not a checkpoint of bighorn train.") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise InputError(f"--resume {path} was not written by this version of `bighorn train --save`.")
    return checkpoint


def restore(run: Run, checkpoint: dict[str, Any]) -> list[str]:
    """Continue ``run`` from ``checkpoint``; returns what differs now and may change the last bits of the result.

    Raises:
        InputError: If the data are not those of the saved run.
    """
    if checkpoint["data"] != run.dataset.fingerprint():
        raise InputError(f"the training data ({run.dataset.description}) are not those of the checkpoint: see --data.")
    try:
        run.load_state_dict(checkpoint["run"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"the checkpoint does not fit the model: {error}") from error
    then, now = checkpoint["environment"], environment()
    then, now = then | {"processes": checkpoint["processes"]}, now | {"processes": run.ranks.size}
    return [f"{name}: {then.get(name)} then, {now[name]} now" for name in now if then.get(name) != now[name]]


def config_of(checkpoint: dict[str, Any], given: dict[str, Any]) -> RunConfig:
    """The configuration of a checkpoint; ``given`` are the options on the command line beside ``--resume``.

    Raises:
        InputError: If an option contradicts the checkpoint; only the place of the data and the threads may differ.
    """
    saved: dict[str, Any] = asdict(RunConfig(**checkpoint["config"]))  # with the defaults of options that came later
    for name, value in given.items():
        if name not in {"data", "threads"} and saved[name] != value:
            flag = "--" + name.replace("_", "-")
            has = f"no {flag}" if saved[name] is None else f"{flag} {saved[name]}"
            raise InputError(
                f"{flag} {value} contradicts the checkpoint, whose run has {has}. "
                f"Leave {flag} out to resume, or leave --resume out to start anew."
            )
    return RunConfig(**(saved | {name: given[name] for name in ("data", "threads") if name in given}))
