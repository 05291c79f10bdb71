"""The number of command-line files on the way of a reader from the call of `bighorn train` to its first step."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

from click.testing import CliRunner
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bighorn_workbench
from bighorn_workbench.commands import bighorn as group

ROOT = Path(bighorn_workbench.__file__).parent
MAX_FILES, MAX_MOVES = 12, 31
LEAVES = {"checks", "tasks"}
"""Modules whose functions are called for each option, and are clear from their names."""


def calls_to_the_first_step(*words: str) -> list[CodeType]:
    """Return the Python functions that a command calls, in order, without comprehensions and lambdas."""
    found: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            found.append(frame.f_code)

    hook = register_optimizer_step_pre_hook(lambda *_: sys.setprofile(None))
    sys.setprofile(note)
    try:
        result = CliRunner().invoke(group, words, catch_exceptions=False)
    finally:
        sys.setprofile(None)
        hook.remove()
    assert result.exit_code == 0, result.output
    return found


def test_train_reaches_its_first_step_through_few_files() -> None:
    command = ("train", "--steps", "1")
    calls_to_the_first_step(*command)  # imports and filled caches are no part of the walk
    found = calls_to_the_first_step(*command)
    start = [(Path(code.co_filename).name, code.co_name) for code in found].index(("train.py", "train"))
    files = [Path(code.co_filename) for code in found[start:]]
    own = [file.relative_to(ROOT) for file in files if file.is_relative_to(ROOT) and file.stem not in LEAVES]
    walk = [str(path) for path, _ in groupby(own)]
    assert walk[0] == "train.py"
    assert walk[-1] == "train_step.py"
    assert len(set(walk)) <= MAX_FILES, sorted(set(walk))
    assert len(walk) - 1 <= MAX_MOVES, walk
