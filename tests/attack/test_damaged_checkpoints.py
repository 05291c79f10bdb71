"""A damaged checkpoint of `bighorn train`, file or folder, resumes or is refused with one message."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bighorn.cli import checkpoint
from bighorn.cli.commands import bighorn
from bighorn.cli.errors import InputError
from bighorn.cli.ranks import Ranks
from bighorn.cli.run import Run
from bighorn.cli.tasks import TASKS
from tests.support.attack_settings import tries
from tests.support.damage import damaged_bytes, edits
from tests.support.error_checks import same

Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints of the same run: the file `run.pt` and the folder `shards`."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "shards").mkdir()
    for place in (folder / "run.pt", folder / "shards"):
        assert train("--steps", 1, "--precision", "fp16", "--save", place)[0] == 0
    return folder


def train(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(bighorn, ["train", "--threads", "1", *map(str, words)], prog_name="bighorn")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def loaded(path: Path) -> dict[str, Any]:
    """Return the state of a run that has resumed from this checkpoint."""
    saved = checkpoint.load(path)
    run = Run(checkpoint.config_of(saved, {}), TASKS["digits"].load(None), Ranks())
    checkpoint.restore(run, saved)
    return run.state_dict()


def assert_as_it_was_or_refused(path: Path, damaged: Path, intact: Path) -> None:
    """Check that a checkpoint with one damaged file loads the same values, or is refused with the name of this file."""
    words = None
    try:
        found = loaded(path)
    except InputError as error:
        words = str(error)
    if words is None:
        assert same(found, loaded(intact)), "other values were loaded"
    else:
        assert str(damaged) in words


def assert_resumes_or_says_why(path: Path) -> None:
    """Check that a run resumes from this checkpoint, or refuses it with one message and changes none of its files."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    before = [file.read_bytes() for file in files]
    code, output = train("--resume", path, "--save", path.parent / "out.pt")
    assert code in {0, 1}, output
    assert code == 0 or (output.startswith("Error: ") and output.count("\n") == 1), output
    assert code == 0 or [file.read_bytes() for file in files] == before


@tries(100)
@given(damage=damaged_bytes())
def test_a_damaged_file(saved: Path, damage: Damage) -> None:
    path = saved / "damaged" / "run.pt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damage((saved / "run.pt").read_bytes()))
    assert_resumes_or_says_why(path)
    assert_as_it_was_or_refused(path, path, saved / "run.pt")


@tries(60)
@given(damage=damaged_bytes(), which=st.integers(0, 2))
def test_a_damaged_folder(saved: Path, damage: Damage, which: int) -> None:
    folder = saved / "damaged-shards"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved / "shards", folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[which % len(files)]
    path.write_bytes(damage(path.read_bytes()))
    assert_resumes_or_says_why(folder)
    assert_as_it_was_or_refused(folder, path, saved / "shards")


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
