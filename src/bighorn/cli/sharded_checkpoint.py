"""Checkpoints as folders, by torch.distributed.checkpoint: each process writes its shards, and any number reads them.

A checkpoint such as ``RUN/step-120`` is written as ``RUN/step-120.bighorn-partial``. It is renamed when all processes
have written their shards, and only then earlier checkpoints are removed: the last complete one always exists.
"""

import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from bighorn.cli import files
from bighorn.cli.errors import InputError
from bighorn.cli.run import Run

COMPLETE = "run.pt"
STEP = re.compile(r"step-(\d+)")
PARTIAL = ".bighorn-partial"


def root(path: Path) -> Path:
    """Return the folder of a run, given this folder or one of its checkpoints."""
    return path.parent if STEP.fullmatch(path.name.removesuffix(PARTIAL)) else path


def steps(path: Path) -> list[Path]:
    """Return the entries of the folder of a run that have the name of a checkpoint, the last one first."""
    found = [(_number(entry), entry) for entry in path.iterdir() if STEP.fullmatch(entry.name)]
    return [entry for _, entry in sorted(found, reverse=True)]


def check(path: Path, resumed: str | None) -> None:
    """Raise an error for a folder of checkpoints that cannot be written to, or that has checkpoints of another run.

    Args:
        path: The folder.
        resumed: The checkpoint that the run continues, if that is a folder.

    Raises:
        InputError: The folder cannot be written to, or has checkpoints of another run.
    """
    if root(path).is_dir():
        place = None if resumed is None else Path(resumed)
        for entry in steps(root(path)):
            own = place is not None and place.parent.samefile(entry.parent) and _number(entry) <= _number(place)
            if not (own and _is_complete(entry)):
                raise InputError(
                    f"--save {path}: {entry} is there and no earlier checkpoint of this run. Give another folder, "
                    f"move {entry} away, or continue its run with --resume {entry}."
                )
    files.check_folder(root(path), "--save")


def find(path: Path) -> Path:
    """Return the checkpoint at ``path``, or the last complete one if ``path`` is the folder of a run.

    Raises:
        InputError: The checkpoint is incomplete, or there is none.
    """
    single = root(path) != path
    complete = [entry for entry in steps(root(path)) if _is_complete(entry)]
    if single and path in complete:
        return path
    if complete and not single:
        return complete[0]
    half = [path] if single else sorted(path.glob(f"step-*{PARTIAL}"))
    if not half:
        raise InputError(f"--resume {path} is a folder without checkpoints of bighorn train.")
    raise InputError(
        f"--resume {half[-1]} is half-written: the run ended while it was being saved. "
        + (f"The last complete checkpoint is {complete[0]}." if complete else "There is no complete one.")
    )


def save(run: Run, path: Path, about: dict[str, Any]) -> None:
    """Write a checkpoint of the run to ``path``; call it in all processes, which share that folder.

    Raises:
        InputError: In all processes, if a write has failed. Earlier checkpoints are kept.
    """
    place, ranks = root(path) / f"step-{run.step}", run.ranks
    if ranks.from_first(lambda: _is_complete(place)):
        return  # of this run (see check): interrupted in the step that was saved last, or before the first
    partial = place.with_name(place.name + PARTIAL)
    ranks.from_first(lambda: _remove_partial(place.parent))
    checkpoint = {**about, "run": run.progress()}
    try:
        with _quiet():
            save_shards(_tensors(run), checkpoint_id=partial)
        ranks.from_first(lambda: _finish(checkpoint, partial, place))
    except (CheckpointException, InputError, OSError) as error:
        ranks.from_first(lambda: _remove_partial(place.parent))
        kept = ranks.from_first(lambda: [entry for entry in steps(place.parent) if _is_complete(entry)])
        after = f"{kept[0]} is kept: continue with --resume {kept[0]} then." if kept else "No checkpoint is there."
        text = str(error) if isinstance(error, files.WriteError) else files.refusal(place, _cause(error))
        raise InputError(f"{text} {after}") from error


def _finish(checkpoint: dict[str, Any], partial: Path, place: Path) -> None:
    """Make a checkpoint complete, then remove those before it."""
    checkpoint["files"] = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
    files.write(partial / COMPLETE, lambda file: torch.save(checkpoint, file))
    partial.rename(place)
    for other in steps(place.parent):
        if _number(other) < _number(place) and _is_complete(other) and not other.is_symlink():
            with suppress(OSError):  # an old checkpoint that remains is harmless
                other = other.rename(other.with_name(other.name + PARTIAL))  # marked as incomplete before it is removed
                shutil.rmtree(other, ignore_errors=True)


def _remove_partial(path: Path) -> None:
    """Remove incomplete checkpoints of a run that was killed while it saved."""
    for entry in path.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(entry, ignore_errors=True)


def damage(place: Path, checksums: dict[str, int]) -> str | None:
    """Return a file of a checkpoint that is not as `save` has written it, and the difference; None if all files are.

    torch stores checksums of tensors but never verifies them, and has none for its metadata, a pickle that can run any
    code after a bit has flipped. This check therefore comes before torch reads any file.
    """
    for name, checksum in checksums.items():
        try:
            if _checksum(place / name) != checksum:
                return f"{place / name} is damaged: its checksum is another"
        except OSError as error:
            return f"{place / name} is missing or unreadable: {error.strerror}"
    return None


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(2**20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _is_complete(entry: Path) -> bool:
    return (entry / COMPLETE).is_file()


def _number(entry: Path) -> int:
    match = STEP.fullmatch(entry.name)
    assert match is not None
    return int(match[1])


def _cause(error: BaseException) -> str:
    """Return the first error of a process that has failed to write or read, as text."""
    first: BaseException = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
    return " ".join(str(files.system_error(first) or first).split())


def restore(run: Run, place: Path, progress: dict[str, Any]) -> None:
    """Continue from a checkpoint in a folder, which any number of processes may have written, with any sharding.

    Raises:
        InputError: A part of it is missing or damaged.
    """
    state = _tensors(run)
    try:
        with _quiet():
            load(state, checkpoint_id=place)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise InputError(f"--resume {place} is damaged, or of another model: {_cause(error)}") from error
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(run.model, run.whole_optimizer, model_state_dict=model, optim_state_dict=optimizer)
    run.load_progress(progress)


def restore_from_whole(run: Run, saved: dict[str, Any]) -> None:
    """Continue a sharded run from a checkpoint in a file, which every process has read."""
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(run.model, saved["model"], options=whole)
    groups = saved["optimizer"]["param_groups"]
    names = {
        number: name for group in groups for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    by_name: dict[str, Any] = {
        "state": {names[number]: state for number, state in saved["optimizer"]["state"].items()},
        "param_groups": [{**group, "params": group["param_names"]} for group in groups],
    }
    set_optimizer_state_dict(run.model, run.whole_optimizer, by_name, options=whole)
    run.load_progress(saved)


def _tensors(run: Run) -> dict[str, Any]:
    """Return this process's part of the state of the model and the optimizer, by the names of parameters."""
    model, optimizer = get_state_dict(run.model, run.whole_optimizer)
    return {"model": model, "optimizer": optimizer}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of torch that need no action (torch 2.13)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no_dist|.*torch.distributed is .*", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
