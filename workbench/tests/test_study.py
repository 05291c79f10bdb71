"""The study of ``bighorn compare``: each run is made once and kept, whatever ends its process or damages its file."""

import dataclasses
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bighorn_workbench import search, storage
from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.search import Search
from bighorn_workbench.storage import Database, Server, StudyPlace
from bighorn_workbench.trials import Trial
from bighorn_workbench.workers import fill
from tests.support.processes import FORKS, LIMIT, outcomes
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke
from workbench.tests.test_compare import SMALL, small, trial
from workbench.tests.test_files import files_at_most

WORDS = ["compare", *SMALL, "--processes", "1", "--study"]


def sql(path: Path, order: str, *values: object) -> list[tuple[Any, ...]]:
    """Run an order of SQL on the file of a study."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(order, values).fetchall()


def states(path: Path) -> Counter[str]:
    return Counter(state for (state,) in sql(path, "SELECT state FROM trials"))


def age(path: Path) -> None:
    """Let the last heartbeat of each run be too old."""
    sql(path, "UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')")


def marked(config: RunConfig, *_: object) -> Trial:
    """Return a result that names its run, and differs if the run is made again."""
    made = trial(config.lr or 0.0, config.seed, config.seed / 1024 + (config.lr or 0.0) / 1e6)
    return dataclasses.replace(made, config=config, seconds=random.SystemRandom().random())


def results(found: Search) -> dict[tuple[str, int], Trial]:
    return {key: made for key, (_, made) in found.finished().items()}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs be made in no time."""
    monkeypatch.setattr(search, "make", marked)


@pytest.mark.process
@pytest.mark.usefixtures("lost_runs_are_free")
def test_a_killed_comparison_loses_only_the_run_in_flight(tmp_path: Path) -> None:
    """A process dies in its second run; another command with the same study repeats the run."""
    path = tmp_path / "s.study"
    script = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from workbench.tests.test_compare import small\n"
        "from bighorn_workbench import search\n"
        "make, count = search.make, iter(range(9))\n"
        "search.make = lambda *a: os.kill(os.getpid(), signal.SIGKILL) if next(count) == 1 else make(*a)\n"
        f"small(Path({str(path)!r})).work()\n"
    )
    assert outcomes(script, [[]])[0].code == -signal.SIGKILL
    found = small(path)
    assert len(found.finished()) == 1
    assert states(path)["RUNNING"] == 1
    fill(found, 1, lambda: None)
    whole = small(tmp_path / "whole.study")
    whole.work()
    assert [(each.config, each.value, each.loss) for each in results(found).values()] == [
        (each.config, each.value, each.loss) for each in results(whole).values()
    ]
    assert states(path) == {"COMPLETE": 7, "FAIL": 1}


@pytest.mark.usefixtures("quick")
def test_a_run_of_a_living_process_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "s.study"
    one, other = small(path), small(path)
    taken = one._take()
    assert taken is not None
    other.release()
    assert [each[3] for each in (taken, other._take(), one._take()) if each] == [0, 1, 2]
    age(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE trial_heartbeats SET heartbeat = datetime('now') WHERE trial_id = 1")
    other.release()
    assert states(path) == {"RUNNING": 1, "FAIL": 2, "WAITING": 3}
    assert {each[3] for each in (other._take(), other._take(), one._take()) if each} == {1, 2, 3}


def test_a_process_that_dies_as_it_claims_a_run_leaves_it_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna alone would never take a trial that is running without a heartbeat for dead."""
    path = tmp_path / "s.study"
    found = small(path)
    for name in ("record_heartbeat", "set_trial_state_values", "set_trial_user_attr"):
        with monkeypatch.context() as patch:
            patch.setattr(found.database.storage, name, lambda *_, **__: 1 / 0)
            with pytest.raises(InputError):
                found._take()
    age(path)
    monkeypatch.setattr(search, "make", marked)
    fill(found, 1, lambda: None)
    assert (found.done, states(path)["COMPLETE"]) == (7, 7)


def test_a_run_of_another_machine_is_taken_over_and_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine sends no signal during its first run, and returns after another one has made all runs."""
    path = tmp_path / "s.study"
    asleep, awake = small(path), small(path)
    made: list[RunConfig] = []

    def slow(config: RunConfig, *_: object) -> Trial:
        made.append(config)
        if len(made) == 1:
            awake.release()
            assert states(path)["RUNNING"] == 1
            age(path)
            awake.release()
            awake.work()
        return marked(config)

    monkeypatch.setattr(search, "make", slow)
    asleep.work()
    assert len(made) == 8
    assert results(asleep) == results(awake)
    assert (len(results(awake)), states(path)) == (7, {"COMPLETE": 7, "FAIL": 1})


def test_a_run_that_two_processes_have_queued_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.study"
    one, other = small(path), small(path)
    for queue in (one._tuning[0], other._tuning[0]):  # neither has seen what the other one queues
        with monkeypatch.context() as patch:
            patch.setattr(queue, "look", lambda: None)
            queue._trials = []
            queue.fill()
    assert states(path) == {"WAITING": 12}
    made: list[RunConfig] = []

    def counted(config: RunConfig, *_: object) -> Trial:
        made.append(config)
        return marked(config)

    monkeypatch.setattr(search, "make", counted)
    taken = one._take()
    assert taken is not None
    assert {each[3] for each in (other._take(), other._take(), one._take()) if each} == {1, 2, 3}
    assert (one._take(), other._take()) == (None, None)
    age(path)
    other.release()
    other.work()
    assert (len(made), other.done, states(path)["COMPLETE"]) == (7, 7, 7)


def test_a_run_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.study"
    here = small(path, seeds=1, trials=1)

    def long(config: RunConfig, *_: object) -> Trial:
        age(path)
        until = time.monotonic() + LIMIT
        while sql(path, "SELECT heartbeat FROM trial_heartbeats WHERE heartbeat > datetime('now', '-1 minute')") == []:
            assert time.monotonic() < until
        return marked(config)

    monkeypatch.setattr(storage, "BEAT", 0.01)
    monkeypatch.setattr(search, "make", long)
    here.work()
    assert here.done == 2


@pytest.mark.usefixtures("quick")
def test_a_finished_run_whose_process_was_killed_before_it_said_so_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is one transaction, and Optuna's state of the trial another one."""
    path = tmp_path / "s.study"
    found = small(path)
    set_state = found.database.storage.set_trial_state_values

    def killed(identifier: int, state: Any, values: Any = None) -> bool:
        if values:
            raise SystemExit
        return set_state(identifier, state, values)

    with monkeypatch.context() as patch:
        patch.setattr(found.database.storage, "set_trial_state_values", killed)
        with pytest.raises(SystemExit):
            found.work()
    [made] = results(found).values()
    age(path)
    again = small(path)
    again.release()
    again.work()
    assert (again.done, states(path)) == (7, {"FAIL": 1, "COMPLETE": 6})
    assert results(again)[next(iter(results(found)))] == made


@pytest.mark.usefixtures("quick")
def test_records_carry_their_run_and_go_to_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "s.study"
    small(path).work()
    before = results(small(path))
    numbers = "SELECT trial_id, value_json FROM trial_user_attributes WHERE key = 'run' ORDER BY trial_id"
    (first, _), (second, _), *_ = sql(path, numbers)
    for identifier, number in ((first, "1"), (second, "0")):
        sql(
            path,
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'run' AND trial_id = ?",
            number,
            identifier,
        )
    again = small(path)
    assert again.done == 2, "the two runs are unknown, and with them the best one"
    again.work()
    assert [each.config for each in results(again).values()] == [each.config for each in before.values()]
    sql(path, "UPDATE trial_user_attributes SET value_json = '1000000000' WHERE key = 'run'")
    far = small(path, trials=1)
    assert (far.trials, far.done) == (1, 0), "a number that no study has is not waited for"


@for_every(
    ("key", "old", "new", "message"),
    [
        (
            "record",
            '"state_bytes"',
            '"bytes"',
            "another version of bighorn has written a run of lamb, batch 256, tuning",
        ),
        ("record", '"loss": ', '"loss": null, "ignored": ', "another version of bighorn"),
        ("record", '"trial": {', '"trial": {"pruned": 1, ', "another version of bighorn"),
        ("record", "{", "", "has records of another version of Optuna or bighorn (JSONDecodeError: Extra data"),
        ("record", '"took": ', '"took": [], "none": ', None),
        ("run", "", '"walk"', None),
        ("fingerprint", '"', '"0', None),
        ("owner", '"', '"0', None),
    ],
)
def test_records_of_another_version_are_named(
    invoke: Invoke, key: str, old: str, new: str, message: str | None, tmp_path: Path
) -> None:
    if not (tmp_path / "s.study").exists():
        invoke(*WORDS, "s.study")
    shutil.copy("s.study", "other.study")
    for identifier, text in sql(
        Path("other.study"), "SELECT trial_user_attribute_id, value_json FROM trial_user_attributes WHERE key = ?", key
    ):
        order = "UPDATE trial_user_attributes SET value_json = ? WHERE trial_user_attribute_id = ?"
        sql(Path("other.study"), order, text.replace(old, new, 1) if old else new, identifier)
    output = invoke(*WORDS, "other.study", code=0 if message is None else 1).output
    assert message is None or (message in output and output.count("\n") == 1), output
    assert output.startswith("Error: ") == (message is not None)


def test_a_study_of_another_version_of_optuna_is_named(invoke: Invoke) -> None:
    invoke(*WORDS, "s.study")
    sql(Path("s.study"), "UPDATE alembic_version SET version_num = 'v1.0.0.a'")
    output = invoke(*WORDS, "s.study", code=1).output
    assert "--study s.study has records of another version of Optuna or bighorn (RuntimeError: The runtime" in output


@for_every(
    ("start", "message"),
    [
        (b"not a study\n", "--study other is damaged or not a file of bighorn compare (it starts with b'not a"),
        (b"S", "--study other is damaged or not a file of bighorn compare (it starts with b'S')"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(invoke: Invoke, start: bytes, message: str) -> None:
    Path("other").write_bytes(start)
    output = invoke(*WORDS, "other", code=1).output
    assert message in output
    assert output.count("\n") == 1
    assert Path("other").read_bytes() == start


@for_every(
    ("order", "message"),
    [
        ("CREATE TABLE bookmarks (url TEXT)", "--study other is another program's database. Give another name."),
        (
            "CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM studies; END",
            "--study other has the trigger t, which no study has.",
        ),
        ("CREATE VIEW v AS SELECT 1", "--study other has the view v, which no study has."),
    ],
)
def test_a_database_with_orders_of_its_own_is_refused(invoke: Invoke, order: str, message: str) -> None:
    Path("other").unlink(missing_ok=True)
    if "TABLE" not in order:
        Database(Path("other")).close()
    sql(Path("other"), order)
    before = Path("other").read_bytes()
    assert message in invoke(*WORDS, "other", code=1).output
    assert Path("other").read_bytes() == before


@pytest.mark.usefixtures("quick")
@for_every("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: whole[:4096] + b"x" * 9000 + whole[13096:]])
def test_a_truncated_and_an_overwritten_file_are_named(
    invoke: Invoke, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "s.study"
    path.unlink(missing_ok=True)
    found = small(path)
    found.work()
    found.database.close()
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    output = invoke(*WORDS, path, code=1).output
    assert "is damaged or not a file of bighorn compare" in output.replace("\n", " ")
    assert path.read_bytes() == damaged


def test_a_file_that_is_overwritten_during_the_runs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.study"
    found = small(path)

    def overwrites(config: RunConfig, *_: object) -> Trial:
        for part in (path, path.with_name("s.study-wal")):
            part.write_bytes(b"other" * 40_000)
        return marked(config)

    monkeypatch.setattr(search, "make", overwrites)
    with pytest.raises(InputError, match="is damaged or not a file of bighorn compare"):
        found.work()


@pytest.mark.usefixtures("lost_runs_are_free", "quick")
def test_a_full_disk_leaves_a_study_whole_and_is_named(invoke: Invoke, tmp_path: Path) -> None:
    sizes: list[int] = []
    whole = small(tmp_path / "whole.study")
    whole.work(done=lambda: sizes.append((tmp_path / "whole.study-wal").stat().st_size))
    path = Path("s.study")
    with files_at_most(sizes[3]):
        output = invoke(*WORDS, path, code=1).output
    assert "Error: the study s.study cannot be written: " in output
    assert "All runs that have ended are in it. Make space or give permissions there" in output.replace("\n", " ")
    done = sum(each == "COMPLETE" for each in states(path).elements())
    assert 0 < done < 7
    assert f"Stopped after {done} of 7 runs. Repeat the command with --study s.study" in output
    assert f"{done} run{'s are' if done > 1 else ' is'} already in s.study" in invoke(*WORDS, path).output


def test_no_password_of_a_server_is_printed(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "1")
    for url in (
        "postgresql://me:pass%2Fword@127.0.0.1:1/runs",
        "redis://me:pass%2Fword@127.0.0.1:1",
        "mysql://me:pass%2Fword@127.0.0.1:1/runs?password=pass/word",
    ):
        result = invoke(*WORDS, url, code=2 if url.startswith("redis") else 1)
        assert "pass%2Fword" not in result.output
        assert "pass/word" not in result.output
        assert "://***@127.0.0.1:1" in result.output
    place = StudyPlace().convert("postgresql://me:secret@host/runs?sslpassword=secret", None, None)
    assert isinstance(place, Server)
    assert [str(place), repr(place), f"{place}"] == ["postgresql://***@host/runs"] * 3
    assert place.hidden("failed: secret") == "failed: ***"
    odd = Server("postgresql://me:sec?re#t@host/runs?sslmode=x&sslpassword=an%20other")
    assert str(odd) == "postgresql://***@"
    assert odd.hidden("sec?re#t, an other, an%20other, x") == "***, ***, ***, x"


# ---- processes that are killed or stopped ---------------------------------------------------------------------------


def working(place: str, log: str) -> None:
    """Make runs in a process of its own, and write down each that is in the study."""
    made: list[str] = []

    def slow(config: RunConfig, *_: object) -> Trial:
        time.sleep(0.02)
        found = marked(config)
        made.append(json.dumps([config.seed, config.lr, found.seconds]))
        return found

    def said() -> None:
        with Path(log).open("a") as file:
            file.write(made[-1] + "\n")

    setattr(search, "make", slow)  # noqa: B010 - as monkeypatch does
    storage.BEAT = storage.GRACE = 1
    found = small(StudyPlace().convert(place, None, None), **MANY)
    found.work(done=said)


MANY: dict[str, Any] = {"optimizers": "lamb,sgd,adamw", "trials": 20, "seeds": 20}


def assert_each_once(place: Path | Server, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the other runs here; check that each result is its own run's, and the first one that was in the study."""
    monkeypatch.setattr(storage, "BEAT", 1)
    monkeypatch.setattr(storage, "GRACE", 1)
    monkeypatch.setattr(search, "make", marked)
    found = small(place, **MANY)
    fill(found, 1, lambda: None)
    made = [each for _, each in found.finished().values()]
    assert len(made) == found.total == 3 * (20 + 6 * 5 + 20), "trials, repeats and final runs"
    assert all(each.value == marked(each.config).value for each in made)
    said = [json.loads(line) for line in log.read_text().splitlines()]
    kept = {each.seconds: [each.config.seed, each.config.lr] for each in made}
    assert all(kept[seconds] == [seed, lr] for seed, lr, seconds in said), "no finished run is lost or made again"
    completed = Counter(
        (queue.name, each.user_attrs["run"])
        for _, queue, _ in found.queues()
        for each in queue.study.trials
        if each.state.name == "COMPLETE"
    )
    assert set(completed.values()) == {1}
    found.database.close()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_are_killed_at_any_moment_lose_no_finished_run(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log, moments = tmp_path / "s.study", tmp_path / "log", random.Random(count)
    log.touch()
    for _ in range(20):
        processes = [FORKS.Process(target=working, args=(str(path), str(log))) for _ in range(count)]
        for process in processes:
            process.start()
        time.sleep(moments.uniform(0.5, 4.0))
        for process in processes:
            process.kill()
            process.join()
    assert_each_once(path, log, monkeypatch)


@pytest.mark.slow
@pytest.mark.process
def test_a_process_that_is_stopped_for_two_minutes_keeps_nobody_and_makes_no_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "s.study", tmp_path / "log"
    log.touch()
    stopped, *others = [FORKS.Process(target=working, args=(str(path), str(log))) for _ in range(3)]
    stopped.start()
    while len(log.read_text()) == 0:
        assert stopped.is_alive()
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    for process in others:
        process.start()
    time.sleep(120)
    os.kill(stopped.pid, signal.SIGCONT)
    for process in (stopped, *others):
        process.join(LIMIT)
        assert process.exitcode == 0
    assert_each_once(path, log, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: run as root")
@pytest.mark.usefixtures("quick")
def test_a_small_file_system_that_is_full_keeps_a_study_whole(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False)
    if mounted.returncode:
        pytest.skip("this machine mounts no file system")
    try:
        found = small(disk / "s.study", trials=20, seeds=20)
        with pytest.raises(InputError, match=r"the study .*s\.study cannot be written: .*full"):
            found.work()
        done = results(found)
        assert 0 < len(done) < found.total
        found.database.close()
        for part in disk.glob("s.study*"):
            shutil.copy(part, tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    sql(tmp_path / "s.study", "UPDATE trials SET state = 'FAIL' WHERE state = 'RUNNING'")
    again = small(tmp_path / "s.study", trials=20, seeds=20)
    again.work()
    assert {key: results(again)[key] for key in done} == done
