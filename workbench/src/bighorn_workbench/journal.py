"""The file of ``bighorn compare --study``: a journal of Optuna, which survives a full disk and a killed process."""

import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from bighorn_workbench.errors import InputError

START = b'{"op_code":'
"""The first bytes of a journal of Optuna."""


def opened(path: Path) -> JournalStorage:
    """Open a journal, or begin one.

    Raises:
        InputError: The file is no journal, or is damaged, or of a version of Optuna that writes other records.
    """
    if path.exists():
        with path.open("rb") as file:
            start = file.read(len(START))
        if not START.startswith(start):  # the storage would append to it
            raise _damaged(path, f"it starts with {start!r}")
    try:
        return JournalStorage(Journal(path))
    except (InputError, OSError):
        raise
    except Exception as error:  # Optuna may raise any error for an unknown record
        raise InputError(
            f"--study {path} has records of another version of Optuna ({type(error).__name__}: {error}). Use that "
            "version, or give another name."
        ) from error


class Journal(JournalFileBackend):
    """Optuna's journal in a file, whose lines are whole: a line that was cut off is no record.

    Optuna itself appends to such a line, and then can read neither (Optuna 5.0).

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, JournalFileSymlinkLock(str(path))
        super().__init__(str(path), self.lock)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append lines, after the last whole one; if that fails, the file is as it was before.

        Raises:
            InputError: The file cannot be written.
        """
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        try:
            with self._locked(), self.path.open("r+b", buffering=0) as file:
                end = _end_of_lines(file, file.seek(0, 2))
                self._check_last_line(file, end)
                file.truncate(end)
                file.seek(end)
                try:
                    _write_all(file, lines)
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise InputError(
                f"the study {self.path} cannot be written: {error.strerror or error}. All runs that have ended are in "
                "it. Make space or give permissions there, or copy it elsewhere, and repeat the command with --study."
            ) from error

    def _check_last_line(self, file: BinaryIO, end: int) -> None:
        """Raise if the last line is no record: Optuna ignores that until another line follows (5.0)."""
        if end:
            start = _end_of_lines(file, end - 1)
            file.seek(start)
            try:
                json.loads(file.read(end - start))
            except ValueError as error:
                raise _damaged(self.path, str(error)) from error

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the records from a number on.

        Raises:
            InputError: A line is damaged.
        """
        try:
            yield from super().read_logs(log_number_from)
        except ValueError as error:
            raise _damaged(self.path, str(error)) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()


def _end_of_lines(file: BinaryIO, at: int, block: int = 1 << 16) -> int:
    """Return the position after the last line break before `at`."""
    while at:
        before = max(0, at - block)
        file.seek(before)
        found = file.read(at - before).rfind(b"\n")
        if found >= 0:
            return before + found + 1
        at = before
    return 0


def _write_all(file: BinaryIO, lines: bytes) -> None:
    """Write through to the disk, since a full disk may show only then."""
    while lines:
        lines = lines[file.write(lines) :]
    os.fsync(file.fileno())


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"--study {path} is damaged or not a file of bighorn compare ({reason}). Give another name.")
