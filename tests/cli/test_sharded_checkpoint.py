"""Folders of checkpoints: a run removes only its own earlier checkpoints, and only after it has saved a later one.

One process can save into an existing folder, so these tests need no other processes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from bighorn.cli import sharded_checkpoint
from tests.support.command_line import Invoke

TRAIN = ["train", "--steps", "4", "--threads", "1"]


def names(path: str) -> list[str]:
    return sorted(entry.name for entry in Path(path).iterdir())


def make_file(path: Path) -> None:
    path.write_text("kept")


def make_folder(path: Path) -> None:
    """Create a folder that looks like a checkpoint of torchtitan."""
    path.mkdir()
    (path / ".metadata").touch()
    (path / "__0_0.distcp").touch()


def make_link(path: Path) -> None:
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [make_file, make_folder, make_link], ids=["file", "folder", "dangling-link"])
@pytest.mark.parametrize("given", ["run", "run/step-3", "."])
def test_what_others_have_made_is_refused_before_training(
    make: Callable[[Path], None], given: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run").mkdir()
    make(Path("run/step-9"))
    if given == ".":
        monkeypatch.chdir("run")
    elif given != "run":
        Path(given).mkdir()
    before = names("." if given == "." else "run")
    output = invoke(*TRAIN, "--save", given, code=1).output
    assert f"--save {given}: " in output
    assert "step-9 is there and no earlier checkpoint of this run. Give another folder" in output
    assert "epoch" not in output  # training has not begun
    assert names("." if given == "." else "run") == before


def test_a_complete_checkpoint_of_another_run_is_refused(invoke: Invoke) -> None:
    Path("run").mkdir()
    invoke(*TRAIN, "--save", "run")
    assert names("run") == ["step-4"]
    output = invoke(*TRAIN, "--seed", 1, "--save", "run", code=1).output
    assert "run/step-4 is there" in output
    assert "--resume run/step-4" in output
    Path("new").mkdir()
    invoke(*TRAIN, "--seed", 1, "--save", "new")
    output = invoke("train", "--resume", "new", "--save", "run", code=1).output
    assert "run/step-4 is there" in output


def test_a_later_checkpoint_than_the_resumed_one_is_refused(
    invoke: Invoke, interrupt_after: Callable[[int], None]
) -> None:
    Path("run").mkdir()
    interrupt_after(2)
    invoke(*TRAIN, "--save", "run", code=130)
    shutil.copytree("run/step-2", "copy")
    interrupt_after(0)
    invoke("train", "--resume", "run")
    Path("copy").rename("run/step-2")
    assert "run/step-4 is there" in invoke("train", "--resume", "run/step-2", code=1).output
    assert names("run") == ["step-2", "step-4"]


def test_of_its_own_checkpoints_a_run_removes_the_earlier_ones_alone(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run").mkdir()
    finish = sharded_checkpoint._finish

    def with_others(checkpoint: dict[str, Any], partial: Path, place: Path) -> None:
        """Create files as another program does while the run trains."""
        Path("run/step-0").write_text("kept")
        Path("run/step-1000").mkdir(exist_ok=True)
        Path("run/notes").mkdir(exist_ok=True)
        finish(checkpoint, partial, place)

    monkeypatch.setattr(sharded_checkpoint, "_finish", with_others)
    invoke(*TRAIN, "--save", "run")
    assert names("run") == ["notes", "step-0", "step-1000", "step-4"]


def test_an_interrupt_in_a_step_that_was_just_saved_touches_nothing(
    invoke: Invoke, interrupt_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only complete checkpoint must be complete at any time, since the process may be killed at any moment."""
    Path("run").mkdir()
    write, written = FileSystemWriter.write_data, []

    def counting(self: FileSystemWriter, *arguments: Any) -> Any:
        written.append(sorted(entry.name for entry in Path("run").iterdir()))
        return write(self, *arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", counting)
    interrupt_after(2)
    invoke(*TRAIN, "--save", "run", code=130)
    # Each step is evaluated and saved; while one is written, the one before it is complete.
    assert written == [["step-1.bighorn-partial"], ["step-1", "step-2.bighorn-partial"]]
    assert names("run") == ["step-2"]
    assert "resumed after step 2" in invoke("train", "--resume", "run").output


def test_a_full_disk_keeps_the_last_checkpoint(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run").mkdir()
    write = FileSystemWriter.write_data

    def until_full(self: FileSystemWriter, *arguments: Any) -> Any:
        if Path("run/step-3.bighorn-partial").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", until_full)
        output = invoke(*TRAIN, "--save", "run", code=1).output
    assert "run/step-3 cannot be written: [Errno 28] No space left on device" in output
    assert "run/step-2 is kept: continue with --resume run/step-2" in output
    assert names("run") == ["step-2"]
    assert "resumed after step 2" in invoke("train", "--resume", "run/step-2").output


def test_a_full_disk_at_the_last_file_keeps_the_last_checkpoint(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run").mkdir()

    save = torch.save

    def full(content: Any, file: Any) -> None:
        if (
            isinstance(content, dict) and "config" in content
        ):  # run.pt, and no file that torch.distributed.checkpoint writes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        output = invoke(*TRAIN, "--save", "run", code=1).output
    assert "run.pt cannot be written: No space left on device. The file was not made." in output
    assert "No checkpoint is there." in output
    assert names("run") == []


@pytest.mark.parametrize("name", ["*.distcp", ".metadata"])
@pytest.mark.parametrize("damage", ["first", "middle", "last", "cut", "gone"])
def test_a_damaged_file_is_refused_in_one_line(name: str, damage: str, invoke: Invoke) -> None:
    """Torch detects neither a changed bit nor a changed length of a tensor's data, and it executes the pickle."""
    Path("run").mkdir()
    invoke(*TRAIN, "--save", "run")
    (file,) = Path("run/step-4").glob(name)
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        content[{"first": 0, "middle": len(content) // 2}.get(damage, -1)] ^= 1
        file.write_bytes(content[:-1] if damage == "cut" else content)
    output = invoke("train", "--resume", "run", code=1).output
    assert output.startswith(f"Error: --resume {file} is ")
    assert output.endswith("Resume an earlier checkpoint, or leave --resume out to start anew.\n")
    assert output.count("\n") == 1


def test_folders_without_checksums_are_resumed(invoke: Invoke) -> None:
    """Older folders have no checksums."""
    Path("run").mkdir()
    invoke(*TRAIN, "--save", "run")
    whole = torch.load("run/step-4/run.pt", weights_only=True)
    assert whole.pop("files").keys() == {".metadata", "__0_0.distcp"}
    torch.save(whole, "run/step-4/run.pt")
    invoke("train", "--resume", "run")


@pytest.mark.parametrize("files", [None, [], {"__0_0.distcp": "0"}, {1: 1}], ids=repr)
def test_checksums_of_another_kind_are_refused(files: Any, invoke: Invoke) -> None:
    Path("run").mkdir()
    invoke(*TRAIN, "--save", "run")
    whole = torch.load("run/step-4/run.pt", weights_only=True)
    torch.save(whole | {"files": files}, "run/step-4/run.pt")
    assert "run/step-4/run.pt is damaged" in invoke("train", "--resume", "run", code=1).output
