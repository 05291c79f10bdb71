"""Checkpoints as folders, through torch.distributed.checkpoint: each process writes its shards, any number reads them.

``RUN/step-120`` is one. The file ``run.pt`` in it is written last, when all processes have written theirs, and only
then earlier ones go. So the last complete checkpoint is there whatever happens, and a half-written one shows.
"""

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
from bighorn.cli.training import Run

COMPLETE = "run.pt"
STEP = re.compile(r"step-(\d+)")


def root(path: Path) -> Path:
    """The folder of a run, given it or one of its checkpoints."""
    return path.parent if STEP.fullmatch(path.name) else path


def steps(path: Path) -> list[Path]:
    """The checkpoints of a run, half-written ones too, the last one first."""
    found = [(int(match[1]), entry) for entry in path.iterdir() if (match := STEP.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found, reverse=True)]


def find(path: Path) -> Path:
    """The checkpoint that ``path`` stands for: itself, or the last complete one of a run.

    Raises:
        InputError: It is half-written, or there is none.
    """
    candidates = [path] if STEP.fullmatch(path.name) else steps(path)
    complete = [entry for entry in candidates if (entry / COMPLETE).is_file()]
    if complete:
        return complete[0]
    if not candidates:
        raise InputError(f"--resume {path} is a folder without checkpoints of bighorn train.")
    others = [entry for entry in steps(root(path)) if (entry / COMPLETE).is_file()]
    raise InputError(
        f"--resume {candidates[0]} is half-written: the run ended while it was being saved. "
        + (f"The last complete checkpoint is {others[0]}." if others else "There is no complete one.")
    )


def save(run: Run, path: Path, about: dict[str, Any]) -> None:
    """Write a checkpoint of the run to ``path``; call it in all processes, which share that folder."""
    place, ranks = root(path) / f"step-{run.step}", run.ranks
    ranks.from_first(lambda: shutil.rmtree(place, ignore_errors=True))
    with _quiet():
        save_shards(_tensors(run), checkpoint_id=place)
    checkpoint = {**about, "run": run.progress()}

    def finish() -> None:
        files.write(place / COMPLETE, lambda file: torch.save(checkpoint, file))
        for other in steps(place.parent):
            if other != place:
                shutil.rmtree(other)

    ranks.from_first(finish)


def restore(run: Run, place: Path, progress: dict[str, Any]) -> None:
    """Continue from a checkpoint in a folder, whatever the number of processes and the places of tensors were then.

    Raises:
        InputError: A part of it is missing or damaged.
    """
    state = _tensors(run)
    try:
        with _quiet():
            load(state, checkpoint_id=place)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        cause = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
        raise InputError(f"--resume {place} is damaged, or of another model: {cause}") from error
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(run.model, run.whole_optimizer, model_state_dict=model, optim_state_dict=optimizer)
    run.load_progress(progress)


def restore_from_whole(run: Run, saved: dict[str, Any]) -> None:
    """Continue a run whose tensors are sharded from a checkpoint in a file, which every process has read."""
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
    """The model's and the optimizer's state, by the names of parameters, each process's own part of it."""
    model, optimizer = get_state_dict(run.model, run.whole_optimizer)
    return {"model": model, "optimizer": optimizer}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's words on what is as it should be (torch 2.13)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no_dist|.*torch.distributed is .*", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
