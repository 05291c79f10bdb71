"""The study of ``bighorn compare``: a database of Optuna, in a file of SQLite or on a server."""

import re
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click
import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from sqlalchemy import Connection, event
from sqlalchemy.pool import QueuePool

from bighorn_workbench import files
from bighorn_workbench.errors import InputError, causes
from bighorn_workbench.options import FilePath

BEAT, GRACE = 10, 60
"""Seconds between heartbeats of a run, and without one until its process counts as dead."""

WAIT = 300.0
"""Seconds for which a process waits for another one that writes to the file, and may be stopped."""

ATTEMPTS = 5
"""Attempts to begin a study, which several processes may do at a time."""

HEADER = b"SQLite format 3\0"
"""The first bytes of a database."""

SERVERS = re.compile(r"(postgresql|mysql)(\+\w+)?://")

SECRETS = ("://[^:/]*:(.*)@", "://[^:/]*:([^@]*)@", "[?&][^=&]*pass[^=&]*=([^&]*)")
"""Passwords in an address, of which one with a bare @ may end early or late, and in its options."""

ENDED = "All runs that have ended are in it."


@dataclass(frozen=True, repr=False)
class Server:
    """The address of a database on a server. As text it has neither its user and password nor its options.

    Example:
        >>> print(Server("postgresql://me:secret@host/runs?password=secret"))
        postgresql://***@host/runs
    """

    url: str

    def __str__(self) -> str:
        address, _, options = self.url.partition("?")
        return re.sub("://.*" if "@" in options else "://.*@", "://***@", address)  # a password may have a "?"

    __repr__ = __str__

    def hidden(self, text: str) -> str:
        """Return a text without the passwords, which a driver may quote."""
        found = [secret for pattern in SECRETS for secret in re.findall(pattern, self.url)]
        for secret in sorted({*found, *map(unquote, found)} - {""}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


Place = Path | Server


class StudyPlace(FilePath):
    """The file of a study, or the address of a server."""

    name = "FILE|URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert an argument to a Place."""
        if not isinstance(value, str) or "://" not in value:
            return super().convert(value, param, ctx)
        if SERVERS.match(value) is None:
            self.fail(
                f"{Server(value)}: a server is postgresql://USER:PASSWORD@HOST/NAME or mysql://..., and a file has no "
                "address: give its name.",
                param,
                ctx,
            )
        return Server(value)


def check_place(place: Place) -> None:
    """Raise an error for a file that cannot be one of a study, before anything is run."""
    if isinstance(place, Path):
        files.check_regular(place, "--study")
        files.check_writable(place, "--study")
        _check_start(place)


_reading = ContextVar("reading", default=False)


class Database:
    """An open study.

    Args:
        place: The file or the server; a study begins in a file that does not exist.

    Raises:
        InputError: It is no study or damaged, or of another version, or cannot be reached.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ended = False
        """Whether nothing is written any more, since an error has ended the command: the disk may be full."""
        if isinstance(place, Path):
            _check_start(place)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.storage = _opened(place)
            except Exception as error:  # Optuna and drivers may raise any
                if attempt == ATTEMPTS or not re.search("already exists|is locked|duplicate key", str(error)):
                    raise self._refused(error) from error
                time.sleep(attempt)
            else:
                break

    def study(self, name: str, higher: bool) -> optuna.Study:
        """Return the study of Optuna with a name, a new one if there is none."""
        direction = StudyDirection.MAXIMIZE if higher else StudyDirection.MINIMIZE
        with self.asked():
            return optuna.create_study(storage=self.storage, study_name=name, direction=direction, load_if_exists=True)

    def fail_stale(self, study: optuna.Study) -> None:
        """Let the trials fail whose processes have recorded no heartbeat for :data:`GRACE` seconds."""
        with self.asked(), _without_experimental_warnings():
            optuna.storages.fail_stale_trials(study)

    @contextmanager
    def asked(self, reads: bool = False) -> Iterator[None]:
        """Let an error of the block name the study and the remedy; ``reads`` is for a block that writes nothing.

        Raises:
            InputError: The study cannot be read or written.
        """
        token = _reading.set(reads)
        try:
            yield
        except (InputError, UpdateFinishedTrialError):
            raise
        except Exception as error:  # a file may hold anything
            raise self._refused(error) from error
        finally:
            _reading.reset(token)

    def content(self) -> bytes:
        """Return the file of a study as it is now, in one piece."""
        assert isinstance(self.place, Path)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            with closing(_connected(self.place)) as connection, closing(sqlite3.connect(copy)) as other:
                connection.backup(other)
            return copy.read_bytes()

    def close(self) -> None:
        """Close all connections: the last one joins the file's parts."""
        self.storage.scoped_session.remove()
        self.storage.engine.dispose()

    def _refused(self, error: BaseException) -> InputError:
        chain = list(causes(error))
        found = next((each for each in chain if isinstance(each, sqlite3.Error | OSError | InputError)), error)
        if isinstance(found, InputError):
            return found
        reason = str(found).partition("\n")[0].rstrip(".")
        if any(isinstance(each, ImportError) for each in chain):
            return InputError(
                f"--study {self.place}: Python has no driver for it ({chain[-1]}). pip install 'psycopg[binary]' for "
                "postgresql://, or PyMySQL for mysql+pymysql://."
            )
        if isinstance(self.place, Server):
            return InputError(
                f"--study {self.place}: {type(found).__name__}: {self.place.hidden(reason)}. {ENDED} Start the server "
                "or correct the address, and repeat the command."
            )
        if isinstance(found, sqlite3.OperationalError | OSError) and "no such" not in reason:
            return InputError(
                f"the study {self.place} cannot be written: {reason}. {ENDED} Make space or give permissions there, or "
                f"copy it and {self.place}-wal, its end, elsewhere, and repeat the command with --study."
            )
        if isinstance(found, sqlite3.Error):
            return _damaged(self.place, reason)
        return InputError(
            f"--study {self.place} has records of another version of Optuna or bighorn ({type(found).__name__}: "
            f"{reason}). Use that version, or give another name."
        )


def _opened(place: Place) -> RDBStorage:
    options: dict[str, Any]
    with _without_experimental_warnings():
        if isinstance(place, Server):
            address = place.url
            if find_spec("psycopg") is not None:  # SQLAlchemy takes an older driver before 2.1
                address = re.sub("^postgresql:", "postgresql+psycopg:", address)
            url, options = address.replace("{", "{{").replace("}", "}}"), {"pool_pre_ping": True}  # it is a template
        else:
            _check_tables(place)
            url, options = "sqlite://", {"creator": partial(_connected, place), "poolclass": QueuePool}
        storage = RDBStorage(url, engine_kwargs=options, heartbeat_interval=BEAT, grace_period=GRACE)
    if isinstance(place, Path):
        event.listen(storage.engine, "begin", _begin)
    return storage


@contextmanager
def _without_experimental_warnings() -> Iterator[None]:
    """Silence Optuna's warnings that its heartbeats may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _connected(path: Path) -> sqlite3.Connection:
    """Open a file that may be somebody else's: no function of it is trusted."""
    connection = sqlite3.connect(path, timeout=WAIT, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA journal_mode = WAL")
    return connection


def _begin(connection: Connection) -> None:
    """Begin a transaction, which locks the file before it reads if it may write: two would claim the same run."""
    connection.exec_driver_sql("BEGIN" if _reading.get() else "BEGIN IMMEDIATE")


def _check_start(path: Path) -> None:
    """Raise an error for a file that is no database, which would be written to."""
    if not path.exists():
        return
    with path.open("rb") as file:
        start = file.read(len(HEADER))
    if start not in (b"", HEADER):
        raise _damaged(path, f"it starts with {start!r}")


def _check_tables(path: Path) -> None:
    """Raise an error for a damaged file, for another program's, and for one that would run orders of its own.

    It does not write to the file, which may be another program's.
    """
    if not path.exists():
        return
    address = f"{path.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, timeout=WAIT, isolation_level=None, uri=True)) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        [whole] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if whole != "ok":
            raise _damaged(path, whole)
        made = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    if made and not {"studies", "version_info"} & {name for _, name, _ in made}:
        raise InputError(f"--study {path} is another program's database. Give another name.")
    for kind, name, text in made:
        if kind not in ("table", "index") or (text or "").upper().startswith("CREATE VIRTUAL"):
            raise InputError(f"--study {path} has the {kind} {name}, which no study has. Give another name.")


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"--study {path} is damaged or not a file of bighorn compare ({reason}). Give another name.")
