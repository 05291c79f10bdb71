"""``bighorn train --parallel``: real processes with shards of a model, their checkpoints, and processes that die."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.support.command_line import Invoke, write_text
from tests.support.torchrun import assert_same_run, history, in_processes, job

TEXT = ["train", "--task", "text", "--data", "text.txt", "--steps", "4", "--batch-size", "8", "--threads", "1"]
CLIPPED = [*TEXT, "--max-grad-norm", "0.5"]
MODES: dict[str, tuple[list[str], list[str]]] = {
    "fsdp-came-int8": ([*TEXT, "--optimizer", "came", "--state-dtype", "int8"], ["--parallel", "fsdp"]),
    "fsdp-adamw": ([*CLIPPED, "--optimizer", "adamw"], ["--parallel", "fsdp", "--accumulate", "2"]),
    "fsdp-fp16": ([*CLIPPED, "--precision", "fp16"], ["--parallel", "fsdp"]),
    "tp-came": ([*CLIPPED, "--optimizer", "came"], ["--parallel", "tp"]),
}
"""The command of one process, and the options that two processes get in addition."""

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
"""By the number of processes: the checkpoint that they resume, a file of one process or a folder of two, and how."""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one, two and four processes have run everything that the tests below check."""
    folder = tmp_path_factory.mktemp("sharded")
    write_text(folder / "text.txt")
    (folder / "text").mkdir()
    of_two = [job(*command) for command, _ in REFUSED]
    of_two += [job(*command, *besides, "--json", f"{name}.json") for name, (command, besides) in MODES.items()]
    of_two += [job(*CLIPPED, "--parallel", "fsdp", "--save", "two", interrupt=2)]
    jobs = {1: [job(*CLIPPED, "--save", "one.pt", interrupt=2)], 2: of_two, 4: []}
    for processes, resumed in RESUMED.items():
        for name, (saved, parallel) in resumed.items():
            to = name if parallel != "ddp" else f"{name}.pt"
            command = ["train", "--resume", saved, "--parallel", parallel, "--json", f"{name}.json", "--save", to]
            jobs[processes].append(job(*command))
    for processes, todo in jobs.items():
        ended = in_processes(processes, folder, todo)
        assert [process.code for process in ended] == [0] * processes, ended
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_shards_are_one_process_with_the_whole_model(mode: str, alone: Invoke) -> None:
    alone(*MODES[mode][0], "--json", "one.json")
    assert_same_run(Path(f"{mode}.json"), Path("one.json"), coarse=mode in {"fsdp-fp16", "fsdp-came-int8"})


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
    Path("half/step-3.bighorn-partial").mkdir()
    output = alone("train", "--resume", "half/step-3.bighorn-partial", code=1).output
    assert "--resume half/step-3.bighorn-partial is half-written" in output
    assert "The last complete checkpoint is half/step-2" in output
    shutil.rmtree("half/step-2")
    output = alone("train", "--resume", "half", code=1).output
    assert "--resume half/step-3.bighorn-partial is half-written" in output
    assert "There is no complete one" in output
    shutil.copytree("two", "torn")
    shard = next(Path("torn/step-2").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:1000])
    assert f"--resume {shard} is damaged" in alone("train", "--resume", "torn", code=1).output


@pytest.mark.parametrize("event", ["kill", "kill_saving"], ids=["in-a-step", "in-a-checkpoint"])
def test_a_killed_process_ends_the_others(event: str, tmp_path: Path, invoke: Invoke) -> None:
    """The other processes end at once with a message, and the last complete checkpoint can be resumed."""
    write_text(tmp_path / "text.txt")
    ended = in_processes(2, tmp_path, [job(*TEXT, "--parallel", "fsdp", "--save", "run", **{event: 3})])
    assert [process.code for process in ended] == [0, -signal.SIGKILL]
    assert "process 0 of 2 stops, since another one has stopped" in (tmp_path / "error-0-0").read_text()
    if event == "kill_saving":
        partial = "step-3.bighorn-partial"
        assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == ["step-2", partial]
    assert "resumed after step 2" in invoke("train", "--resume", "run").output
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["step-4"]
