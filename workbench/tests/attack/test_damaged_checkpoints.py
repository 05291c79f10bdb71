"""A damaged checkpoint of `bighorn train` resumes or is refused with one message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bighorn_workbench import checkpoint
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.builtin_tasks.trial import held_out
from bighorn_workbench.errors import InputError
from bighorn_workbench.ranks import Ranks
from bighorn_workbench.run import Run
from tests.support.attack_settings import tries
from tests.support.damage import damaged_bytes, edits
from tests.support.error_checks import same
from workbench.tests.command_line import call

Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoint of a run, `run.pt`."""
    folder = tmp_path_factory.mktemp("saved")
    assert train("--steps", 1, "--precision", "fp16", "--save", folder / "run.pt")[0] == 0
    return folder


def train(*words: object) -> tuple[int, str]:
    result = call("train", "--threads", 1, *words)
    return result.exit_code, result.output


def loaded(path: Path) -> dict[str, Any]:
    """Return the state of a run that resumes from a checkpoint."""
    saved = checkpoint.load(path)
    run = Run(checkpoint.config_of(saved, {}), held_out(TASKS["digits"](None)), Ranks())
    checkpoint.restore(run, saved)
    return run.state_dict()


def assert_as_it_was_or_refused(path: Path, intact: Path) -> None:
    """Check that a damaged checkpoint loads the same values, or is refused by name."""
    words = None
    try:
        found = loaded(path)
    except InputError as error:
        words = str(error)
    if words is None:
        assert same(found, loaded(intact)), "other values were loaded"
    else:
        assert str(path) in words


def assert_resumes_or_says_why(path: Path) -> None:
    """Check that a run resumes from a checkpoint, or refuses it with one message and does not change it."""
    before = path.read_bytes()
    code, output = train("--resume", path, "--save", path.parent / "out.pt")
    assert code in {0, 1}, output
    assert code == 0 or (output.startswith("Error: ") and output.count("\n") == 1), output
    assert code == 0 or path.read_bytes() == before


@tries(100)
@given(damage=damaged_bytes())
def test_a_damaged_file(saved: Path, damage: Damage) -> None:
    path = saved / "damaged" / "run.pt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damage((saved / "run.pt").read_bytes()))
    assert_resumes_or_says_why(path)
    assert_as_it_was_or_refused(path, saved / "run.pt")


@tries(60)
@given(data=st.data())
def test_an_edited_file(saved: Path, data: st.DataObject) -> None:
    whole: dict[str, Any] = torch.load(saved / "run.pt", weights_only=True)
    path = saved / "damaged" / "run.pt"
    path.parent.mkdir(exist_ok=True)
    try:
        torch.save(data.draw(edits(whole)), path)
    except (NotImplementedError, RuntimeError):  # a file cannot contain values that torch.save refuses
        return
    assert_resumes_or_says_why(path)
