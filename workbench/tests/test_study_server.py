"""A study of ``bighorn compare`` on a server: PostgreSQL, which this file starts on 127.0.0.1 as a user of its own."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from bighorn_workbench import search
from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.storage import Server
from bighorn_workbench.trials import Trial
from tests.support.processes import FORKS, LIMIT
from workbench.tests.command_line import Invoke
from workbench.tests.test_compare import small
from workbench.tests.test_study import WORDS, assert_each_once, marked, working

BINARIES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
PASSWORD = "pass/word"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(BINARIES is None, reason="needs a server: apt-get install postgresql"),
    pytest.mark.skipif(find_spec("psycopg") is None, reason="needs a driver: pip install 'psycopg[binary]'"),
]


class Postgres:
    """A server in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.place = Server(f"postgresql://bighorn:pass%2Fword@127.0.0.1:{self.port}/postgres")
        (folder / "password").write_text(PASSWORD)
        if os.geteuid() == 0:  # the server refuses to run as root
            for path in (folder, folder / "password"):
                shutil.chown(path, "postgres", "postgres")
        self.run("initdb", "--username=bighorn", f"--pwfile={folder}/password", "--auth=scram-sha-256", "--no-sync")

    def run(self, name: str, *words: str) -> None:
        assert BINARIES is not None
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        command = [*user, str(BINARIES / name), f"--pgdata={self.folder}/data", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder} -c fsync=off"
        self.run("pg_ctl", "start", "--wait", f"--log={self.folder}/log", "--options", options)

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "--mode=immediate")


@pytest.fixture
def server() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp())
    try:
        made = Postgres(folder)
        made.start()
        try:
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder)


def test_two_processes_share_a_server_and_one_that_is_killed_loses_its_run_alone(
    server: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.touch()
    processes = [FORKS.Process(target=working, args=(server.place.url, str(log))) for _ in range(2)]
    for process in processes:
        process.start()
    ends_at = time.monotonic() + LIMIT
    while len(log.read_text().splitlines()) < 10:
        assert time.monotonic() < ends_at
        assert all(process.is_alive() for process in processes)
        time.sleep(0.1)
    processes[0].kill()
    for process in processes:
        process.join(LIMIT)
    assert processes[1].exitcode == 0
    assert_each_once(server.place, log, monkeypatch)


def test_a_command_names_the_server_without_its_password(
    server: Postgres, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "make", marked)
    words = [*WORDS, server.place.url, "--json", "c.json", "--report", "c.html"]
    invoke(*words)
    output = invoke(*words).output
    assert f"7 runs are already in postgresql://***@127.0.0.1:{server.port}/postgres." in output
    for text in (output, Path("c.json").read_text(), Path("c.html").read_text()):
        assert "pass%2Fword" not in text
        assert PASSWORD not in text
    wrong = invoke(*WORDS, server.place.url.replace("word", "words"), code=1).output
    assert "password authentication failed" in wrong
    assert "pass%2Fwords" not in wrong


def test_a_server_that_ends_is_named_and_keeps_what_it_has(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RunConfig] = []

    def stopping(config: RunConfig, *_: object) -> Trial:
        made.append(config)
        if len(made) == 3:
            server.stop()
        return marked(config)

    monkeypatch.setattr(search, "make", stopping)
    found = small(server.place)
    with pytest.raises(InputError, match=r"postgresql://\*\*\*@127.*All runs that have ended are in it. Start the"):
        found.work()
    found.database.close()
    server.start()
    again = small(server.place)
    assert again.done == 2
    again.database.close()
