"""Files that are either whole or not there."""

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from bighorn.cli.errors import InputError


def check_writable(path: Path, option: str) -> None:
    """Make the folder of ``path`` and refuse one that cannot be written to, before hours of work depend on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error.strerror}. Choose another place.") from error
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder. Give the name of a file.")


def check_folder(path: Path, option: str) -> None:
    """Make the folder ``path``, and refuse one that cannot be written to."""
    if path.is_file():
        raise InputError(f"{option} {path} is a file, and sharded runs are saved in folders. Give another name.")
    check_writable(path / "checkpoint", option)


def write(path: Path, content: Callable[[BinaryIO], object]) -> None:
    """Replace ``path`` atomically by what ``content`` writes: whoever reads it sees the old file or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            content(file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` atomically by ``text``."""
    write(path, lambda file: file.write(text.encode()))


def write_json(path: Path, content: Any) -> None:
    """Replace ``path`` atomically by JSON whose innermost lists and objects have a line each where they are short."""

    def joined(match: re.Match[str]) -> str:
        tight = re.sub(r"(?<=[\[{])\n *|\n *(?=[\]}])", "", match[0])
        line = re.sub(r"\n *", " ", tight)  # line breaks stand between values alone, never within
        return line if len(line) <= 200 else match[0]

    text = json.dumps(content, indent=1, allow_nan=False)
    write_text(path, re.sub(r"[\[{][^\[\]{}]*[\]}]", joined, text) + "\n")
