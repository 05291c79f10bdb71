"""Checkpoints: files from which a resumed run is bitwise equal to the run that was never interrupted."""

import reprlib
import typing
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bighorn.cli import files
from bighorn.cli.config import RunConfig
from bighorn.cli.environment import environment
from bighorn.cli.errors import InputError
from bighorn.cli.options import flag_of
from bighorn.cli.run import Run
from bighorn.cli.values import matches
from bighorn.tasks import defaults

FORMAT = "bighorn checkpoint 3"
FIELDS = {"config": dict, "environment": dict, "data": str, "processes": int, "run": dict}
ELSEWHERE = ("data", "device", "threads")
"""Options that may differ when a run is resumed, for example on another machine."""
REMEDY = "Resume an earlier checkpoint, or leave --resume out to start anew."


def save(run: Run, path: Path) -> None:
    """Write the run to ``path``, atomically; call it in all processes."""
    about = {
        "format": FORMAT,
        "config": asdict(run.config),
        "environment": environment(run.config.device),
        "data": run.fingerprint,
        "processes": run.ranks.size,
    }
    checkpoint = {**about, "run": run.state_dict()}
    run.ranks.from_first(lambda: _write(checkpoint, path))


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    try:
        files.write(path, lambda file: torch.save(checkpoint, file))
    except files.WriteError as error:
        remedy = f" Then continue with: bighorn train --resume {path}" if path.exists() else ""
        raise InputError(f"{error}{remedy}") from error


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint without running code from the file.

    Raises:
        InputError: The file is missing, damaged or of another kind.
    """
    files.check_regular(path, "--resume")
    if not path.is_file():
        raise InputError(f"--resume {path}: there is no such file.")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch.load does not verify checksums
        if broken is not None:
            raise zipfile.BadZipFile(broken)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load can raise any error of its zip, pickle and storage readers
        raise InputError(f"--resume {path} is damaged or not a checkpoint of bighorn train. {REMEDY}") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise InputError(f"--resume {path} was not written by this version of `bighorn train --save`. {REMEDY}")
    for name, kind in FIELDS.items():
        if not isinstance(checkpoint.get(name), kind):
            raise InputError(f"--resume {path} is damaged: its {name} is missing or no {kind.__name__}. {REMEDY}")
    return checkpoint


def restore(run: Run, checkpoint: dict[str, Any]) -> list[str]:
    """Continue ``run`` from ``checkpoint``; return the differences that may change the last bits of the result.

    Raises:
        InputError: The data are not those of the saved run.
    """
    if checkpoint["data"] != run.fingerprint:
        raise InputError(
            f"the training data ({defaults(run.task).description}) are not those of the checkpoint: see --data."
        )
    try:
        run.load_state_dict(checkpoint["run"])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        text = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise InputError(f"the checkpoint does not fit the model: {text}. {REMEDY}") from error
    then, now = checkpoint["environment"], environment(run.config.device)
    then = {"device": "cpu"} | then  # for a checkpoint from a version without this option
    then, now = then | {"processes": checkpoint["processes"]}, now | {"processes": run.ranks.size}
    return [f"{name}: {then.get(name)} then, {now[name]} now" for name in now if str(then.get(name)) != str(now[name])]


def config_of(checkpoint: dict[str, Any], given: dict[str, Any]) -> RunConfig:
    """Return the configuration of a checkpoint; ``given`` are the options on the command line other than ``--resume``.

    Raises:
        InputError: An option contradicts the checkpoint; only those of :data:`ELSEWHERE` may differ.
    """
    saved: dict[str, Any] = asdict(_config(checkpoint["config"]))  # with the defaults of options that were added later
    for name, value in given.items():
        if name not in ELSEWHERE and saved[name] != value:
            flag = flag_of(name)
            has = f"no {flag}" if saved[name] is None else f"{flag} {saved[name]}"
            raise InputError(
                f"{flag} {value} contradicts the checkpoint, whose run has {has}. "
                f"Leave {flag} out to resume, or leave --resume out to start anew."
            )
    return RunConfig(**(saved | {name: given[name] for name in ELSEWHERE if name in given}))


def _config(saved: dict[str, Any]) -> RunConfig:
    """Return the options of a checkpoint, each with a value that the command line would accept."""
    hints = typing.get_type_hints(RunConfig)
    for name, value in saved.items():
        if name not in hints:
            raise InputError(
                f"the checkpoint has the option {name!r}, which this version of bighorn does not know. Resume it "
                "with the version that has written it, or a later one."
            )
        choices = RunConfig.__dataclass_fields__[name].metadata["choices"]
        if not matches(value, hints[name]) or (choices and value is not None and value not in choices):
            raise InputError(f"the checkpoint is damaged: its option {name} is {_short(value)}. {REMEDY}")
    return RunConfig(**saved)


def _short(value: object) -> str:
    return reprlib.repr(value).replace("\n", " ")
