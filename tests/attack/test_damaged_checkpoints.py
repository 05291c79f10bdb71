"""Checkpoints of `bighorn train`, as a file and as a folder, that were damaged: one message, or the run goes on."""

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

from bighorn.cli.commands import bighorn
from tests.support.attack_settings import tries
from tests.support.damage import damaged_bytes, edits

Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run.pt`, and with `shards`, a folder in which a run was saved."""
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


def assert_resumes_or_says_why(path: Path) -> None:
    """Of its files none changes where it is refused."""
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


@tries(60)
@given(data=st.data())
def test_an_edited_file(saved: Path, data: st.DataObject) -> None:
    whole: dict[str, Any] = torch.load(saved / "run.pt", weights_only=True)
    path = saved / "damaged" / "run.pt"
    path.parent.mkdir(exist_ok=True)
    try:
        torch.save(data.draw(edits(whole)), path)
    except (NotImplementedError, RuntimeError):  # what torch cannot save cannot be in a file
        return
    assert_resumes_or_says_why(path)
