"""Output files, which are replaced as a whole or not at all."""

import errno
import json
import os
import re
import secrets
import shlex
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import click

from bighorn_workbench.errors import InputError, causes

KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFBLK: "block device",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "pipe",
    stat.S_IFCHR: "device",
}

ENDINGS = {
    "--report": ("HTML", (".html", ".htm")),
    "--json": ("JSON", (".json",)),
    "--save": ("a checkpoint", (".pt", ".pth", ".ckpt", ".bin")),
}
"""The kind of file that an option writes, and its endings."""

OTHERS = (
    *(".csv", ".docx", ".gif", ".ipynb", ".jpeg", ".jpg", ".jsonl", ".md", ".npz", ".pdf", ".pkl", ".png", ".py"),
    *(".safetensors", ".svg", ".toml", ".xlsx", ".xml", ".yaml", ".yml", ".zip"),
)
"""Endings of kinds of files that no option writes."""

STREAMED = (stat.S_IFIFO, stat.S_IFCHR)
"""Types of files that are written to and never replaced, such as /dev/stdout."""


class WriteError(InputError):
    """A file could not be written. The message names the file, the cause, and the state of the file."""


def check_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | str | None] | None = None) -> None:
    """Create the folders of outputs; raise an error for a path whose write would, hours later, fail or destroy a file.

    The folder of a relative path is made, with a message. An absolute path's must exist: if it is missing, the name is
    misspelt, or a disk is not mounted.

    Args:
        outputs: Path by option; None is an option that was not given.
        inputs: Likewise, files that no output may overwrite. Default: None

    Raises:
        InputError: A path cannot be written to, its name has the ending of another kind of file, or an output is the
            same file as another output or an input.
    """
    seen = {option: Path(path) for option, path in (inputs or {}).items() if path}
    for option, path in outputs.items():
        if path is None:
            continue
        for other, taken in seen.items():
            if _same(path, taken):
                raise InputError(
                    f"{option} {path} is the file of {other} {taken}, which it would overwrite. Give another name."
                )
        check_writable(path, option)
        seen[option] = path


def check_writable(path: Path, option: str) -> None:
    """Create the folder of ``path``, and raise an error for a path that cannot be written to."""
    try:
        status = _status(path) or _status(_target(path))  # "no/.." does not exist until a folder "no" does
        _check_kind(status, f"{option} {path}")
        if _replaceable(status):
            target = _target(path)
            _check_ending(path, option)
            if not target.parent.exists():
                if path.is_absolute():
                    raise InputError(
                        f"{option} {path}: there is no folder {path.parent}. Correct the name, or make the folder "
                        f"first: mkdir -p {shlex.quote(str(path.parent))}"
                    )
                target.parent.mkdir(parents=True)
                click.echo(f"{option}: made the folder {path.parent}", err=True)
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        if status is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error.strerror}. Choose another place.") from error


def _check_ending(path: Path, option: str) -> None:
    """Raise an error for a name with the ending of another kind of file."""
    kind, allowed = ENDINGS.get(option, ("", ()))
    ending = path.suffix.lower()
    if kind and ending not in allowed and ending in {*OTHERS, *(each for _, ends in ENDINGS.values() for each in ends)}:
        raise InputError(
            f"{option} {path}: this option writes {kind}, which {ending} does not name. Give "
            f"{path.with_suffix(allowed[0])}, or a name without an ending."
        )


def check_regular(path: Path, option: str) -> None:
    """Raise an error for a pipe or a device, since the file is written several times and read again."""
    if path.exists():  # `check_outputs` reports a path below a file, and a loop of links
        _check_kind(_status(path), f"{option} {path}", allowed=())


def unused(path: Path) -> Path:
    """Return ``path``, or if it exists, ``path`` with a number added to its name.

    Example:
        >>> unused(Path("no-such-file.pt"))
        PosixPath('no-such-file.pt')
    """
    number, free = 1, path
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def write(path: Path, content: Callable[[BinaryIO], object]) -> None:
    """Replace ``path``, or the target of a link, atomically by the output of ``content``; write to pipes and devices.

    An existing file keeps its mode.

    Raises:
        WriteError: The write has failed. An existing file has not changed.
    """
    left = "A part of it may be written"
    try:
        status = _status(path)
        _check_kind(status, str(path))
        if _replaceable(status):
            left = "The file was not made" if status is None else "The file is as it was before"
            _replace(_target(path), status, content)
        else:
            assert status is not None
            sys.stdout.flush()
            stream = _standard_stream(status)
            with path.open("wb") if stream is None else os.fdopen(os.dup(stream), "wb") as file:
                content(file)
    except (OSError, RuntimeError) as error:
        # torch.save raises its own error when it closes (torch 2.13).
        cause = next((each for each in causes(error) if isinstance(each, OSError)), None)
        if cause is None:
            raise
        raise WriteError(
            f"{path} cannot be written: {cause.strerror or cause}. {left}. Make space or give permissions there, or "
            "choose another place."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` atomically by ``text``; bytes of file names that are not UTF-8 are written as escapes."""
    write(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def write_json(path: Path, content: Any) -> None:
    """Replace ``path`` atomically by JSON, whose innermost lists and objects are on one line each if they are short.

    Infinity and NaN, which JSON lacks, become null.
    """

    def joined(match: re.Match[str]) -> str:
        tight = re.sub(r"(?<=[\[{])\n *|\n *(?=[\]}])", "", match[0])
        line = re.sub(r"\n *", " ", tight)  # line breaks are only between values, never within them
        return line if len(line) <= 200 else match[0]

    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    text = json.dumps(finite, indent=1)
    write_text(path, re.sub(r"[\[{][^\[\]{}]*[\]}]", joined, text) + "\n")


def finish(
    say: Callable[[str], object],
    report: Path | None,
    page: Callable[[], str],
    json_file: Path | None,
    content: Callable[[], Any],
) -> None:
    """Write the JSON and the report of a command, each if it was asked for, and print where they are.

    Raises:
        InputError: A file cannot be written, or the report not be drawn, which comes last for that.
    """
    if json_file is not None:
        write_json(json_file, content())
        say(f"JSON: {json_file}")
    if report is not None:
        try:
            text = page()
        except Exception as error:  # its figures are another package's, and hold what users name
            raise InputError(
                f"--report {report} cannot be drawn ({type(error).__name__}: {error}). All other results are kept; "
                "--json FILE holds the figures."
            ) from error
        write_text(report, text)
        say(f"Report: {report}")


def _replace(target: Path, status: os.stat_result | None, content: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file in the target's folder, then rename it; a killed process leaves the temporary file."""
    temporary = target.with_name(f".bighorn-{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("xb") as file:
            content(file)
            file.flush()
            if status is not None:
                temporary.chmod(status.st_mode & 0o777)
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _standard_stream(status: os.stat_result) -> int | None:
    """Return the descriptor of stdout or stderr if it is this file, which may be a regular one: ``> file``."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), status):
                return descriptor
    return None


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file; None if it, or the target of a link, does not exist."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _replaceable(status: os.stat_result | None) -> bool:
    return status is None or (stat.S_ISREG(status.st_mode) and _standard_stream(status) is None)


def _check_kind(status: os.stat_result | None, named: str, allowed: tuple[int, ...] = STREAMED) -> None:
    kind = stat.S_IFREG if status is None else stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFREG, *allowed):
        raise InputError(f"{named} is a {KINDS[kind]}. Give the name of a file.")


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them does not exist yet
        return _target(path) == _target(other)
