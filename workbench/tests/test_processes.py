"""``bighorn train`` under torchrun, in real processes on this machine and on two simulated by network namespaces."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.support.processes import LIMIT, TORCHRUN, VARIABLES, assert_ended_well
from workbench.tests.command_line import Invoke, changed, write_idx, write_text
from workbench.tests.torchrun import TWO, WORKER, assert_same_run, history, in_processes, job

DIGITS = ["train", "--steps", "6", "--batch-size", "96", "--threads", "1"]
MODES: dict[str, tuple[list[str], list[str]]] = {
    "plain": (DIGITS, []),
    "clip": ([*DIGITS, "--max-grad-norm", "0.5"], []),
    "accumulate": ([*DIGITS, "--optimizer", "came"], ["--accumulate", "3"]),
    "overlap": (DIGITS, ["--tail-overlap"]),
    "overlap-clip": ([*DIGITS, "--max-grad-norm", "0.5"], ["--tail-overlap", "--accumulate", "2"]),
    "overlap-adamw-clip": ([*DIGITS, "--optimizer", "adamw", "--max-grad-norm", "0.5"], ["--tail-overlap"]),
    "shard": ([*DIGITS, "--max-grad-norm", "0.5"], ["--shard-update"]),
    "shard-adamw-accumulate": (
        [*DIGITS, "--optimizer", "adamw", "--max-grad-norm", "0.5"],
        ["--shard-update", "--accumulate", "2"],
    ),
    "fp16": ([*DIGITS, "--precision", "fp16", "--max-grad-norm", "0.5"], ["--shard-update"]),
    "fp16-overlap": ([*DIGITS, "--precision", "fp16", "--loss-scale", "512"], ["--tail-overlap"]),
    "text": (["train", "--task", "text", "--data", "text.txt", "--steps", "3", "--batch-size", "16"], []),
    "mnist": (["train", "--task", "mnist", "--data", "idx", "--steps", "3", "--batch-size", "16"], ["--tail-overlap"]),
}
"""The command of one process, and the additional options of several processes."""

RESUMED = [*DIGITS, "--max-grad-norm", "0.5"]
REFUSED: list[tuple[list[str], str]] = [
    (["--batch-size", "97"], "--batch-size 97 cannot be split evenly over 2 processes: take a multiple"),
    (["--batch-size", "98", "--accumulate", "2"], "evenly over 2 processes x --accumulate 2"),
    (["--task", "text", "--data", "only{rank}.txt"], "process 1 of 2: --data only1.txt cannot be read"),
    (["--task", "text", "--data", "other{rank}.txt"], "process 1 of 2 has other training data than process 0"),
    (["--seed", "{rank}"], "process 1 of 2 has other options than process 0"),
    (["--resume", "nowhere.pt"], "--resume nowhere.pt: there is no such file"),
    (["--lr", "1e30", "--warmup", "0"], "the loss became nan in step 2"),
]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the runs of two processes that the tests check."""
    folder = tmp_path_factory.mktemp("together")
    write_idx(folder / "idx")
    for name, text in (("text", "a"), ("only0", "a"), ("other0", "a"), ("other1", "+")):
        write_text(folder / f"{name}.txt", text)
    in_processes(1, folder, [job(*RESUMED, "--save", "from1.pt", interrupt=3)])
    shutil.copy(folder / "from1.pt", folder / "from1-again.pt")
    jobs = [job(*changed(RESUMED, *options)) for options, _ in REFUSED]
    for name, (command, besides) in MODES.items():
        jobs.append(job(*command, *besides, "--json", f"{name}.json", "--save", f"{name}.pt"))
    jobs += [
        job(*RESUMED, "--save", "from2.pt", interrupt=3),
        job(*RESUMED, "--save", "from2-shards.pt", "--shard-update", interrupt=3),
        job("train", "--resume", "from1.pt", "--json", "to2.json"),
        job("train", "--resume", "from1-again.pt", "--json", "to2-shards.json", "--shard-update"),
    ]
    ended = in_processes(2, folder, jobs)
    assert_ended_well(ended)
    (folder / "output").write_text("".join(end.output for end in ended))
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_are_one_with_the_whole_batch(mode: str, alone: Invoke) -> None:
    alone(*MODES[mode][0], "--json", "one.json")
    assert_same_run(Path(f"{mode}.json"), Path("one.json"), coarse=mode.startswith("fp16"))
    saved = torch.load(f"{mode}.pt", weights_only=True)["run"]
    assert len(saved["optimizer"]["state"]) == len(saved["model"])


def test_one_process_prints(together: Path) -> None:
    output = (together / "output").read_text()
    finished = len(MODES) + 4  # resumed runs are four; the run that diverges does not get that far
    assert output.count("2 processes, each with 48 samples of a batch") == finished + 1 - 2  # without text and mnist
    assert output.count("Optimizer state ") == finished
    assert history(together / "overlap.json")["commands"][0].startswith(
        "torchrun --nproc-per-node 2 --no-python bighorn"
    )


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[text[:40] for _, text in REFUSED])
def test_what_one_process_refuses_ends_all(number: int, together: Path) -> None:
    """One process prints the error, even if another one raises it; the others end silently."""
    assert REFUSED[number][1] in (together / f"error-{number}-0").read_text()
    assert (together / f"error-{number}-1").read_text() == "1"


@pytest.mark.parametrize("name", ["from2", "from2-shards"])
def test_one_process_resumes_what_two_have_saved(name: str, alone: Invoke) -> None:
    shutil.copy(f"{name}.pt", "copy.pt")
    assert torch.load("copy.pt", weights_only=True)["run"]["step"] == 3
    output = alone("train", "--resume", "copy.pt", "--json", "resumed.json").output
    assert "processes: 2 then, 1 now" in output
    alone(*RESUMED, "--json", "one.json")
    assert history(Path("resumed.json"))["loss"] == pytest.approx(history(Path("one.json"))["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["to2", "to2-shards"])
def test_two_processes_resume_what_one_has_saved(name: str, alone: Invoke) -> None:
    resumed = history(Path(f"{name}.json"))
    assert len(resumed["commands"]) == 2
    alone(*RESUMED, "--json", "one.json")
    assert resumed["loss"] == pytest.approx(history(Path("one.json"))["loss"], rel=1e-4)


def test_an_exception_in_one_process_ends_all(tmp_path: Path) -> None:
    ended = in_processes(2, tmp_path, [job(*DIGITS, fail=3)])
    assert ended[1].code != 0
    assert "ZeroDivisionError: the reason of it all" in ended[1].errors


@pytest.mark.parametrize(
    ("event", "parallel"),
    [("kill", []), ("kill_saving", ["--tail-overlap"]), ("kill", ["--shard-update"])],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_killed_process_ends_the_others(event: str, parallel: list[str], tmp_path: Path, invoke: Invoke) -> None:
    """The other process ends at once, and a run resumes from the last complete checkpoint."""
    ended = in_processes(2, tmp_path, [job(*DIGITS, *parallel, "--save", "run.pt", **{event: 3})])
    killed, other = (1, 0) if event == "kill" else (0, 1)
    assert ended[killed].code == -signal.SIGKILL
    assert ended[other].code == 0
    if other == 0:  # the first process prints for all
        assert "process 0 of 2 stops, since another one has stopped" in (tmp_path / "error-0-0").read_text()
    assert "resumed after step 2" in invoke("train", "--resume", "run.pt").output
    assert [path.name for path in tmp_path.glob("*run.pt*")] == ["run.pt"]


def test_ctrl_c_saves_once_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Torchrun and all of its processes receive the signal, as from a terminal; one process starts slowly."""
    data = ["--data", str(write_idx(tmp_path / "idx"))]
    options = ["--task", "mnist", *data, "--epochs", "20000", "--batch-size", "16", "--tail-overlap"]
    command = [*TWO, str(WORKER), json.dumps([job("train", *options, late=1)])]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=VARIABLES | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        while not process.stdout.readline().startswith(" epoch"):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    found = re.findall(r"Resume with:\n {2}(torchrun .*)\n", output)
    assert len(found) == 1, output + errors
    assert re.fullmatch(
        r"torchrun --nproc-per-node 2 --no-python bighorn train --resume \S+ --data \S+ --tail-overlap",
        found[0].strip(),
    )
    assert torch.load(next(tmp_path.glob("bighorn-mnist-lamb-step*.pt")), weights_only=True)["processes"] == 2


# ---- two machines ---------------------------------------------------------------------------------------------------


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """Yield, for two linked network namespaces, the prefix of a command that runs inside."""
    missing = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"two machines need {', '.join(missing)}: install iproute2 and util-linux")
    kept = ["setpriv", "--pdeathsig", "KILL"]
    own = Path("/proc/self/ns/net").readlink()
    with ExitStack() as stack:
        holders = []
        for _ in range(2):
            holder = subprocess.Popen([*kept, "unshare", "--net", "sleep", "600"], stderr=subprocess.DEVNULL)
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            holders.append(holder)
        while any(Path(f"/proc/{holder.pid}/ns/net").readlink() == own for holder in holders):
            if any(holder.poll() is not None for holder in holders):
                pytest.skip("two machines need network namespaces, which this user may not make: run as root")
            time.sleep(0.01)
        inside = [[*kept, "nsenter", "--net", "--target", str(holder.pid)] for holder in holders]
        peer = ["peer", "name", "wire", "netns", str(holders[1].pid)]
        subprocess.run([*inside[0], "ip", "link", "add", "wire", "type", "veth", *peer], check=True)
        for number, prefix in enumerate(inside, start=1):
            subprocess.run([*prefix, "ip", "address", "add", f"10.0.0.{number}/24", "dev", "wire"], check=True)
            for device in ("lo", "wire"):
                subprocess.run([*prefix, "ip", "link", "set", device, "up"], check=True)
        yield inside


@pytest.mark.slow
def test_two_machines(
    machines: list[list[str]],
    tmp_path: Path,
    invoke: Invoke,
    interrupt_after: Callable[[int], None],
) -> None:
    """The machines share only a link; the first one has the checkpoint, and it alone prints and writes."""
    interrupt_after(4)
    invoke(*RESUMED, "--save", "run.pt", code=130)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "run.pt").rename(folders[0] / "run.pt")
    started = [
        subprocess.Popen(
            [
                *prefix,
                *TORCHRUN,
                *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"),
                *("--master-addr", "10.0.0.1", "--master-port", "29500"),
                *("-m", "bighorn_workbench", "train", "--resume", "run.pt", "--tail-overlap", "--json", "run.json"),
            ],
            cwd=folders[number],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=VARIABLES | {"GLOO_SOCKET_IFNAME": "wire"},
        )
        for number, prefix in enumerate(machines)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "2 processes on 2 machines, each with 48 samples of a batch" in outputs[0][0]
    assert outputs[1][0] == ""
    assert list(folders[1].iterdir()) == []
    found = history(folders[0] / "run.json")
    assert len(found["loss"]) == 6
    assert found["commands"][1] == (
        "torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 1 --no-python "
        "bighorn train --tail-overlap --resume run.pt --json run.json"
    )
