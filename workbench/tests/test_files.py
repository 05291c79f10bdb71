"""Output files of commands: allowed names, failed writes, and the mode of new files."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from bighorn_workbench import files
from bighorn_workbench.errors import InputError
from tests.support.processes import LIMIT, assert_ended_well, outcomes
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke


@contextmanager
def umask(mask: int) -> Iterator[None]:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Make writes beyond this number of bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- allowed paths --------------------------------------------------------------------------------------------------


def test_the_target_of_a_symbolic_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    links = [tmp_path / "link", tmp_path / "link-to-link"]
    links[0].symlink_to("far/target")  # the target does not exist yet
    links[1].symlink_to("link")
    for text, link in zip(("first", "second"), links, strict=True):
        files.check_outputs({"--json": link})
        files.write_text(link, text)
        assert link.is_symlink()
        assert (tmp_path / "far" / "target").read_text() == text
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["target"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path, invoke: Invoke) -> None:
    pipe, seen = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()), daemon=True)
    reader.start()
    invoke("memory", "--json", pipe)
    reader.join(LIMIT)
    assert seen[0].startswith("{")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_output_that_goes_to_a_file_is_not_replaced_through_another_name(tmp_path: Path) -> None:
    """After `bighorn memory --json /dev/stdout > log`, for example, both texts are in the log."""
    program = """
    import sys
    from pathlib import Path
    from bighorn_workbench import files
    print("before")
    files.check_outputs({"--json": Path("log")})
    files.write_text(Path("log"), "content\\n")
    print("after")
    """
    with (tmp_path / "log").open("w") as log:
        text = "\n".join(line.strip() for line in program.splitlines())
        subprocess.run([sys.executable, "-c", text], cwd=tmp_path, stdout=log, check=True, timeout=LIMIT)
    assert (tmp_path / "log").read_text() == "before\ncontent\nafter\n"


def test_a_name_that_is_no_text_can_be_written_and_printed(invoke: Invoke) -> None:
    """Such names occur on a terminal with another encoding; the report contains the command line."""
    name = os.fsdecode(b"\xff.html")
    assert "Report: \\udcff.html" in invoke("train", "--steps", 1, "--report", name).output
    assert "--report \\udcff.html" in Path(name).read_text().replace("&#39;", "").replace("'", "")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets must be short
    for kind, make in (("folder", Path.mkdir), ("socket", make_socket)):
        make(Path(kind))
        before = Path(kind).stat()
        Path(f"link-to-{kind}").symlink_to(kind)
        for name in (kind, f"link-to-{kind}"):
            with pytest.raises(InputError, match=f"--json {name} is a {kind}. Give the name of a file"):
                files.check_outputs({"--json": Path(name)})
            with pytest.raises(InputError, match=r"cannot be written|is a"):
                files.write_text(Path(name), "text")
        assert Path(kind).stat().st_mode == before.st_mode


def test_a_checkpoint_is_no_pipe_nor_below_a_file_nor_behind_a_loop(tmp_path: Path, invoke: Invoke) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for command, option in (("train", "--save"), ("compare", "--study")):
        for path, message in {
            "pipe": "is a pipe. Give the name of a file",
            "file/run.pt": "cannot be written: Not a directory. Choose another place.",
            "loop": "cannot be written: Too many levels of symbolic links. Choose another place.",
        }.items():
            assert f"{option} {path} {message}" in invoke(command, option, path, code=1).output


def test_a_folder_that_is_made_is_named(invoke: Invoke) -> None:
    """Its name may be misspelt."""
    made = "--save: made the folder rnus/deep"
    options = ("train", "--steps", 1, "--save", "rnus/deep/run.pt")
    assert [made in invoke(*options).output for _ in range(2)] == [True, False]


@for_every(("command", "option"), [("train", "--save"), ("train", "--json"), ("memory", "--report")])
def test_a_missing_folder_of_an_absolute_path_is_no_wish(
    command: str, option: str, invoke: Invoke, tmp_path: Path
) -> None:
    """Its name is misspelt, or a disk is not mounted; the remedy can be pasted into a shell."""
    wanted = tmp_path / "a b; exit" / "run"
    output = " ".join(invoke(command, option, wanted, code=1).output.split())
    assert f"{option} {wanted}: there is no folder {wanted.parent}. Correct the name, or make" in output
    assert f"mkdir -p '{wanted.parent}'" in output
    assert not wanted.parent.exists()


@for_every(
    ("option", "name", "remedy"),
    [
        ("--report", "r.pdf", "this option writes HTML, which .pdf does not name. Give r.html, or a name without"),
        ("--report", "r.JSON", "this option writes HTML, which .json does not name. Give r.html"),
        ("--json", "r.html", "this option writes JSON, which .html does not name. Give r.json"),
        ("--save", "r.json", "this option writes a checkpoint, which .json does not name. Give r.pt"),
    ],
)
def test_a_name_of_another_kind_of_file_is_refused(option: str, name: str, remedy: str, invoke: Invoke) -> None:
    assert f"{option} {name}: {remedy}" in invoke("train", "--steps", 1, option, name, code=1).output
    assert not Path(name).exists()


def test_other_names_and_pipes_of_any_name_are_taken(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pdf")
    for option, names in {"--report": ("r", "r.htm", "r.HTML", "r.v2", "pipe.pdf"), "--json": ("j", "j.txt")}.items():
        for name in names:
            files.check_outputs({option: tmp_path / name})


def test_names_that_are_empty_or_too_long_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    for option in ("--save", "--json", "--report", "--resume"):
        assert "is empty" in invoke("train", "--steps", 1, option, "", code=2).output
    with pytest.raises(InputError, match="too long"):
        files.check_outputs({"--json": tmp_path / ("x" * 300)})
    longest = tmp_path / ("x" * 255)
    files.check_outputs({"--json": longest})
    files.write_text(longest, "text")
    assert longest.read_text() == "text"


NAMES = ["run.pt", "folder/../run.pt", "link.pt", "folder/link.pt"]


def test_two_outputs_in_one_file_are_refused(tmp_path: Path, invoke: Invoke) -> None:
    Path("folder").mkdir()
    Path("link.pt").symlink_to("run.pt")
    Path("folder/link.pt").symlink_to(tmp_path / "run.pt")

    def refused(other: str) -> None:
        output = invoke("train", "--steps", 1, "--save", "run.pt", "--json", other, code=1).output
        assert f"--json {other} is the file of --save run.pt" in output

    for name in NAMES:
        refused(name)
    assert not Path("run.pt").exists()
    Path("run.pt").write_text("kept")
    os.link("run.pt", "hard.pt")
    for name in (*NAMES, "hard.pt"):
        refused(name)
    assert Path("run.pt").read_text() == "kept"


@for_every("command", ["train", "lr-find"])
def test_an_input_is_not_overwritten(command: str, invoke: Invoke, text_file: Path) -> None:
    before = text_file.read_bytes()
    output = invoke(command, "--task", "text", "--data", "text.txt", "--json", "text.txt", code=1).output
    assert "is the file of --data text.txt" in output
    assert text_file.read_bytes() == before


def test_a_resumed_checkpoint_is_overwritten_by_its_run_alone(invoke: Invoke) -> None:
    invoke("train", "--steps", 2, "--save", "run.pt")
    before = Path("run.pt").read_bytes()
    output = invoke("train", "--resume", "run.pt", "--save", "new.pt", "--json", "run.pt", code=1).output
    assert "--json run.pt is the file of --resume run.pt" in output
    assert Path("run.pt").read_bytes() == before
    invoke("train", "--resume", "run.pt", "--save", "./run.pt")


# ---- modes ----------------------------------------------------------------------------------------------------------


def test_a_new_file_has_the_mode_of_the_umask_and_a_replaced_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for mask in (0o022, 0o027, 0o077, 0o002):
        path.unlink(missing_ok=True)
        with umask(mask):
            files.write_text(path, "text")
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    for kept in (0o600, 0o664, 0o640):
        path.chmod(kept)
        with umask(0o022):
            files.write_text(path, "text")
        assert path.stat().st_mode & 0o777 == kept


# ---- writes that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["old", None])
def test_a_failed_write_leaves_what_was_there_and_names_the_file(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "file"
    if before is not None:
        files.write_text(path, before)

    def fail(file: BinaryIO) -> None:
        file.write(b"half of the ne")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = "is as it was" if before is not None else "was not made"
    with pytest.raises(InputError, match=rf"{path} cannot be written: No space left on device. The file {kept}"):
        files.write(path, fail)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == [before] * (before is not None)


def test_a_defect_of_the_writer_is_no_matter_of_the_disk(tmp_path: Path) -> None:
    def fail(_: BinaryIO) -> None:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        files.write(tmp_path / "file", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_training_with_a_message_and_the_last_checkpoint(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = torch.save, []

    def save_until_full(content: Any, file: Any) -> None:
        calls.append(content)
        with files_at_most(4096 if len(calls) == 3 else resource.RLIM_INFINITY):
            save(content, file)

    with monkeypatch.context() as patch:
        patch.setattr("torch.save", save_until_full)
        output = invoke("train", "--steps", 10, "--save", "run.pt", code=1).output
    assert "run.pt cannot be written: File too large. The file is as it was" in output
    assert "bighorn train --resume run.pt" in output
    assert torch.load("run.pt", weights_only=True)["run"]["step"] == 2
    assert [path.name for path in Path().iterdir()] == ["run.pt"]


KILLED = """
import os, signal, sys
from pathlib import Path
from bighorn_workbench import files

path, events = Path("run.pt"), 0

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_the_last(*_):
    global events
    events -= 1
    if not events:
        die()

def write(file):
    file.write(b"half")
    file.flush()
    if events < 0:
        die()
    file.write(b" and half")

for events in (-1, *range(1, 100)):
    path.write_text("old")
    if os.fork() == 0:
        sys.addaudithook(die_at_the_last)
        files.write(path, write)
        os._exit(0)
    _, status = os.wait()
    print(events, status, path.read_text(), *(left.read_text() for left in path.parent.glob(".bighorn-*.partial")))
    for left in path.parent.glob(".bighorn-*.partial"):
        left.unlink()
    if not status:
        break
"""


def test_a_killed_save_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """Processes are killed in the middle of the content, and at each call of the system that Python reports."""
    [ended] = outcomes(KILLED, [[]], folder=tmp_path)
    assert_ended_well([ended])
    within, *at_calls, whole = [line.split(maxsplit=2) for line in ended.output.splitlines()]
    assert within == ["-1", "9", "old half"]  # the pattern of these files is .bighorn-*.partial
    assert {content for _, status, content in at_calls} <= {"old", "old half and half", "half and half"}
    assert len(at_calls) > 2
    assert whole[1:] == ["0", "half and half"]


def test_a_save_leaves_the_temporary_file_of_a_live_one(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"

    def slow(file: BinaryIO) -> None:
        file.write(b"slow")
        files.write_text(path, "quick")
        assert path.read_text() == "quick"

    files.write(path, slow)
    assert path.read_text() == "slow"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_holds_orders_to_a_terminal_is_printed_with_escapes(invoke: Invoke) -> None:
    output = invoke("train", "--resume", "a\x1b[2J.pt", code=1).output
    assert "a\\x1b[2J.pt: there is no such file" in output
    assert "\x1b" not in output
