"""Checkpoints: files from which a resumed run is bitwise equal to the run that was never interrupted."""

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from bighorn_workbench import files
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import environment
from bighorn_workbench.errors import InputError
from bighorn_workbench.options import flag_of
from bighorn_workbench.run import Run
from bighorn_workbench.tasks import defaults, map_tensors
from bighorn_workbench.values import device_package

FORMAT = "bighorn checkpoint 5"
PARTS = {"config": dict, "environment": dict, "data": str, "processes": int, "run": dict}
"""The entries of a checkpoint beside its format and its digest."""
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
    checkpoint["digest"] = digest(checkpoint)
    run.ranks.from_first(lambda: files.write(path, lambda file: torch.save(checkpoint, file)))


def digest(checkpoint: dict[str, Any]) -> str:
    """Return a digest of all but the values in tensors, which the file's own checksums protect."""
    rest = {name: value for name, value in checkpoint.items() if name != "digest"}
    return hashlib.sha256(repr(map_tensors(lambda tensor: (tensor.dtype, tensor.shape), rest)).encode()).hexdigest()


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint without running code from the file, or code that it names.

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
        found = digest(checkpoint) if isinstance(checkpoint, dict) else ""
    except Exception as error:  # torch.load can raise any error of its zip, pickle and storage readers
        raise InputError(f"--resume {path} is damaged or not a checkpoint of bighorn train. {REMEDY}") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise InputError(f"--resume {path} was not written by this version of `bighorn train --save`. {REMEDY}")
    wrong = [name for name, kind in PARTS.items() if not isinstance(checkpoint.get(name), kind)]
    if wrong or checkpoint.get("digest") != found:
        raise InputError(f"--resume {path} is damaged: it was changed after it was written. {REMEDY}")
    return checkpoint


def restore(run: Run, checkpoint: dict[str, Any]) -> list[str]:
    """Continue ``run`` from ``checkpoint``; return the differences that may change the last bits of the result.

    Raises:
        InputError: The data differ from the saved run's.
    """
    if checkpoint["data"] != run.fingerprint:
        raise InputError(
            f"the training data ({defaults(run.task).description}) differ from the checkpoint's: see --data."
        )
    try:
        run.load_state_dict(checkpoint["run"])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        text = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise InputError(f"the checkpoint does not fit the model: {text}. {REMEDY}") from error
    then, now = checkpoint["environment"], environment(run.config.device)
    then, now = then | {"processes": checkpoint["processes"]}, now | {"processes": run.ranks.size}
    return [f"{name}: {then.get(name)} then, {now[name]} now" for name in now if str(then.get(name)) != str(now[name])]


def config_of(checkpoint: dict[str, Any], given: dict[str, Any]) -> RunConfig:
    """Return the configuration of a checkpoint; ``given`` are the options on the command line other than ``--resume``.

    Raises:
        InputError: An option contradicts the checkpoint; only the options in :data:`ELSEWHERE` may differ. Or an option
            is missing that no file decides.
    """
    unknown = checkpoint["config"].keys() - {field.name for field in fields(RunConfig)}
    if unknown:
        raise InputError(
            f"the checkpoint has the option {min(map(str, unknown))!r}, which this version of bighorn does not know. "
            "Resume it with the version that has written it, or a later one."
        )
    saved = asdict(RunConfig(**checkpoint["config"]))  # with the defaults of options that were added later
    missing = {name: value for name, value in outside(saved).items() if name not in given}
    if missing:
        flags = " and ".join(map(flag_of, missing))
        has = ", ".join(f"{flag_of(name)} {value!r:.200}" for name, value in missing.items())
        raise InputError(
            f"give {flags} beside --resume. The checkpoint's run had {has}, but what a file names is neither imported "
            "nor opened: it may come from a stranger."
        )
    for name, value in given.items():
        moved = name in ELSEWHERE or (name == "task" and not {saved[name], value} & TASKS.keys())
        if not moved and saved[name] != value:
            flag = flag_of(name)
            has = f"no {flag}" if saved[name] is None else f"{flag} {saved[name]}"
            raise InputError(
                f"{flag} {value} contradicts the checkpoint, whose run has {has}. "
                f"Leave {flag} out to resume, or leave --resume out to start anew."
            )
    return RunConfig(**(saved | given))


def outside(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the options by which a run imports code or opens files, which a command line alone decides."""
    is_outside = {
        "task": config["task"] not in TASKS,
        "data": config["data"] is not None,
        "device": device_package(config["device"]) is not None,
    }
    return {name: config[name] for name, it_is in is_outside.items() if it_is}


def resuming(config: RunConfig, path: Path) -> list[str]:
    """Return the options of a command line that resumes a run from ``path``."""
    named = outside(asdict(config)).items()
    return ["--resume", str(path), *(word for name, value in named for word in (flag_of(name), value))]
