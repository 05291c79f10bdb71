"""``bighorn train --parallel``: real processes with shards of a model, their checkpoints, and processes that die."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.helpers import Invoke, without_dropout
from cli.test_processes import SEVERAL, TORCHRUN, TWO, VARIABLES, history, job

LIMIT = 250
"""Seconds that a launch may take on a machine with much else to do."""

FOUR = [*TORCHRUN, "--standalone", "--nproc-per-node", "4"]
TEXT = ["train", "--task", "text", "--data", "text.txt", "--steps", "4", "--batch-size", "8", "--threads", "1"]
CLIPPED = [*TEXT, "--max-grad-norm", "0.5"]
MODES: dict[str, tuple[list[str], list[str]]] = {
    "fsdp-came-int8": ([*TEXT, "--optimizer", "came", "--state-dtype", "int8"], ["--parallel", "fsdp"]),
    "fsdp-adamw": ([*CLIPPED, "--optimizer", "adamw"], ["--parallel", "fsdp", "--accumulate", "2"]),
    "fsdp-fp16": ([*CLIPPED, "--precision", "fp16"], ["--parallel", "fsdp"]),
    "tp-came": ([*CLIPPED, "--optimizer", "came"], ["--parallel", "tp"]),
}
"""What one process is told, and what two are told besides."""

REFUSED: list[tuple[list[str], str]] = [
    (["train", "--parallel", "fsdp"], "--parallel fsdp is for --task text"),
    ([*TEXT, "--parallel", "tp", "--shard-update"], "--shard-update is for --parallel ddp"),
    ([*TEXT, "--parallel", "hsdp"], "or an even number of 4 or more on one, not 2 in all"),
    ([*TEXT, "--parallel", "fsdp", "--save", "text.txt"], "--save text.txt is a file, and sharded runs are saved in"),
    (["train", "--resume", "text", "--parallel", "fsdp"], "--resume text is a folder without checkpoints"),
]
RESUMED: dict[int, dict[str, tuple[str, str]]] = {
    2: {"file-to-fsdp": ("one.pt", "fsdp"), "folder-to-tp": ("two", "tp"), "folder-to-ddp": ("two", "ddp")},
    4: {"folder-to-hsdp": ("two", "hsdp")},
}
"""By the number of processes: what they continue, a file of one process or a folder of two, and how."""


def launch(folder: Path, launcher: list[str], jobs: list[dict[str, Any]], **variables: str) -> str:
    done = subprocess.run(
        [*launcher, SEVERAL, json.dumps(jobs)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=VARIABLES | variables,
    )
    assert done.returncode == 0, done.stderr
    for number in range(len(jobs)):
        (folder / f"store-{number}").unlink(missing_ok=True)
    return done.stdout


def write_text(folder: Path) -> None:
    lines = (f"{number} times {number} is {number * number}{'a' if number % 3 else 7}.\n" for number in range(400))
    (folder / "text.txt").write_text("".join(lines))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one, two and four processes have done all that the tests below look at."""
    folder = tmp_path_factory.mktemp("sharded")
    write_text(folder)
    (folder / "text").mkdir()
    launch(folder, [sys.executable], [job(*CLIPPED, "--save", "one.pt", interrupt=2)], RANK="0")
    jobs = [job(*command) for command, _ in REFUSED]
    jobs += [job(*command, *besides, "--json", f"{name}.json") for name, (command, besides) in MODES.items()]
    jobs += [job(*CLIPPED, "--parallel", "fsdp", "--save", "two", interrupt=2)]
    for processes, launcher in ((2, TWO), (4, FOUR)):
        for name, (saved, parallel) in RESUMED[processes].items():
            to = ["--save", name] if parallel != "ddp" else ["--save", f"{name}.pt"]
            jobs.append(job("train", "--resume", saved, "--parallel", parallel, "--json", f"{name}.json", *to))
        launch(folder, launcher, jobs)
        jobs = []
    return folder


@pytest.fixture
def alone(invoke: Invoke, together: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs in this process, in the folder of the others, without dropout as theirs."""
    monkeypatch.setattr(torch.nn.functional, "dropout", without_dropout)
    monkeypatch.chdir(together)
    return invoke


@pytest.mark.parametrize("mode", MODES)
def test_shards_are_one_process_with_the_whole_model(mode: str, alone: Invoke) -> None:
    alone(*MODES[mode][0], "--json", "one.json")
    one, sharded = history(Path("one.json")), history(Path(f"{mode}.json"))
    coarse = mode in {"fsdp-fp16", "fsdp-came-int8"}
    assert sharded["loss"] == pytest.approx(one["loss"], rel=2e-3 if coarse else 1e-4)
    assert sharded["accuracy"] == pytest.approx(one["accuracy"], abs=0.01 if coarse else 2e-3)
    assert sharded["layers"] == one["layers"]
    for gauge, rows in one["gauges"].items():
        for ours, theirs in zip(sharded["gauges"][gauge], rows, strict=True):
            assert ours == pytest.approx(theirs, rel=0.05 if coarse else 5e-3)
    for ours, theirs in zip(sharded["tests"], one["tests"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3 if coarse else 1e-3, abs=0.006)


@pytest.mark.parametrize("name", [name for names in RESUMED.values() for name in names])
def test_a_checkpoint_goes_on_in_other_shards(name: str, alone: Invoke) -> None:
    alone(*CLIPPED, "--json", "one.json")
    resumed = history(Path(f"{name}.json"))
    assert len(resumed["commands"]) == 2
    assert resumed["loss"] == pytest.approx(history(Path("one.json"))["loss"], rel=1e-4)


def test_one_process_goes_on_with_the_shards_of_two(alone: Invoke, together: Path) -> None:
    shutil.copytree("two", "alone")
    alone("train", "--resume", "alone", "--json", "resumed.json")
    alone(*CLIPPED, "--json", "one.json")
    assert history(Path("resumed.json"))["loss"] == pytest.approx(history(Path("one.json"))["loss"], rel=1e-4)
    assert [entry.name for entry in (together / "alone").iterdir()] == ["step-4"]


def test_what_cannot_be_sharded_is_refused_once(together: Path) -> None:
    for number, (_, text) in enumerate(REFUSED):
        assert text in (together / f"error-{number}-0").read_text()
        assert (together / f"error-{number}-1").read_text() == "1"


def test_a_half_written_checkpoint_is_refused_by_name(alone: Invoke) -> None:
    shutil.copytree("two", "half")
    Path("half/step-3").mkdir()
    assert "--resume half/step-3 is half-written" in alone("train", "--resume", "half/step-3", code=1).output
    Path("half/step-2/run.pt").unlink()
    output = alone("train", "--resume", "half", code=1).output
    assert "--resume half/step-3 is half-written" in output
    assert "There is no complete one" in output
    shutil.copytree("two", "torn")
    shard = next(Path("torn/step-2").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:1000])
    assert "--resume torn/step-2 is damaged" in alone("train", "--resume", "torn", code=1).output


@pytest.mark.parametrize("event", ["kill", "kill_saving"], ids=["in-a-step", "in-a-checkpoint"])
def test_a_killed_process_ends_the_others(event: str, tmp_path: Path, invoke: Invoke) -> None:
    """With a message, at once; and the last complete checkpoint goes on."""
    write_text(tmp_path)
    jobs = json.dumps([job(*TEXT, "--parallel", "fsdp", "--save", "run", **{event: 3})])
    ranks = [
        subprocess.Popen(
            [sys.executable, SEVERAL, jobs],
            cwd=tmp_path,
            env=VARIABLES | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, -9]
    assert "process 0 of 2 stops, since another one has stopped" in (tmp_path / "error-0-0").read_text()
    if event == "kill_saving":
        assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == ["step-2", "step-3"]
        output = invoke("train", "--resume", "run/step-3", code=1).output
        assert "--resume run/step-3 is half-written" in output
        assert "The last complete checkpoint is run/step-2" in output
    assert "resumed after step 2" in invoke("train", "--resume", "run").output
