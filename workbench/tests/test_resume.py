"""A resumed run equals the uninterrupted run bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bighorn_workbench.checkpoint import FORMAT, digest
from bighorn_workbench.ranks import Interrupt
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke, resuming, write_idx

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def content(path: Path) -> dict[str, Any]:
    """Return a checkpoint without its times, commands and digest, which may differ."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    del checkpoint["digest"]
    for name in ("seconds", "commands"):
        del checkpoint["run"]["history"][name]
    return checkpoint


def rewrite(checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint of another program or model, as `bighorn train` would."""
    torch.save({**checkpoint, "digest": digest(checkpoint)}, "run.pt")


def assert_same(left: Any, right: Any, where: str = "checkpoint") -> None:
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for name in left:
            assert_same(left[name], right[name], f"{where}[{name!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert left == right, where


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("lamb", "fp16"), ("lamb", "bf16"), ("adamw", "bf16"), ("adam", "fp32"), ("sgd", "fp32")],
)
def test_resumed_is_bitwise_the_uninterrupted_run(
    invoke: Invoke, interrupt_after: Callable[[int], None], optimizer: str, precision: str
) -> None:
    # An epoch has 9.0 batches, so step 17 is in the second one, between two evaluations; dropout is on.
    options = ["--optimizer", optimizer, "--precision", precision, "--epochs", 3, "--threads", 1, "--seed", 5]
    invoke("train", *options, "--save", "whole.pt")
    interrupt_after(17)
    result = invoke("train", *options, "--save", "parts.pt", code=130)
    assert "Interrupted after step 17 of 26" in result.output
    assert content(Path("parts.pt"))["run"]["step"] == 17
    interrupt_after(25)
    assert "Interrupted after step 25" in invoke("train", "--resume", "parts.pt", code=130).output
    interrupt_after(0)
    result = invoke("train", "--resume", "parts.pt")
    assert "resumed after step 25" in result.output
    assert "Warning" not in result.output
    assert_same(content(Path("parts.pt")), content(Path("whole.pt")))


@pytest.mark.parametrize(
    "task", ["text", "mnist", f"{BENCHMARKS}/mnist_rows.py:MnistRows"], ids=["text", "mnist", "rows"]
)
def test_other_tasks_resume_bitwise(
    invoke: Invoke, interrupt_after: Callable[[int], None], task: str, text_file: Path, idx_folder: Path
) -> None:
    data = text_file if task == "text" else idx_folder
    size = 4 if task == "text" else 24  # two epochs of images; a step of text takes long
    options = ["--task", task, "--data", data, "--steps", 6, "--batch-size", size]
    invoke("train", *options, "--save", "whole.pt")
    interrupt_after(4)
    invoke(*resuming(invoke("train", *options, "--save", "parts.pt", code=130).output))
    assert_same(content(Path("parts.pt")), content(Path("whole.pt")))


def test_dropout_is_on_and_its_generator_is_what_resumes(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run depends on the generator; if no step were random, the test above would pass without restoring it."""
    invoke("train", "--epochs", 1, "--threads", 1, "--save", "whole.pt")
    invoke("train", "--epochs", 1, "--threads", 1, "--save", "again.pt")
    assert_same(content(Path("again.pt")), content(Path("whole.pt")))
    monkeypatch.setattr("bighorn_workbench.run.seed_generators", lambda value: torch.manual_seed(value + 1))
    invoke("train", "--epochs", 1, "--threads", 1, "--save", "other.pt")
    assert content(Path("other.pt"))["run"]["history"]["loss"] != content(Path("whole.pt"))["run"]["history"]["loss"]


def test_a_second_ctrl_c_aborts_unless_torchrun_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with Interrupt(echoes=True) as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        monkeypatch.setattr(interrupt, "_echo", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_finished_run_resumes_to_its_end(invoke: Invoke) -> None:
    invoke("train", "--epochs", 1, "--save", "run.pt")
    before = content(Path("run.pt"))
    output = invoke("train", "--resume", "run.pt").output
    assert "resumed after step 8, its last one: nothing is left to train" in output
    assert_same(content(Path("run.pt")), before)


def test_moved_data_may_be_named_again_and_other_data_are_refused(invoke: Invoke, text_file: Path) -> None:
    invoke("train", "--task", "text", "--data", text_file, "--steps", 1, "--batch-size", 4, "--save", "run.pt")
    text_file.rename("elsewhere.txt")
    assert "give --data beside --resume" in invoke("train", "--resume", "run.pt", code=1).output
    invoke("train", "--resume", "run.pt", "--data", "elsewhere.txt")
    Path("elsewhere.txt").write_text(Path("elsewhere.txt").read_text().replace("times", "TIMES"))
    output = invoke("train", "--resume", "run.pt", "--data", "elsewhere.txt", code=1).output
    assert "differ from the checkpoint's" in output


def test_another_environment_is_warned_of(invoke: Invoke) -> None:
    invoke("train", "--epochs", 1, "--threads", 1, "--save", "run.pt")
    result = invoke("train", "--resume", "run.pt", "--threads", 2)
    assert "threads: 1 then, 2 now" in result.output
    checkpoint = torch.load("run.pt", weights_only=True)
    checkpoint["environment"]["torch"] = "1.0"
    checkpoint["environment"]["instruction set"] = "SSE2"
    rewrite(checkpoint)
    output = invoke("train", "--resume", "run.pt").output
    assert "torch: 1.0 then" in output
    assert "instruction set: SSE2 then" in output


@for_every(
    ("options", "message"),
    [
        (["--task", "text"], "--task text contradicts the checkpoint, whose run has --task digits"),
        (["--optimizer", "sgd"], "--optimizer sgd contradicts"),
        (["--seed", "1"], "--seed 1 contradicts"),
        (["--steps", "9"], "--steps 9 contradicts the checkpoint, whose run has no --steps"),
        (["--backend", "reference"], "--backend reference contradicts"),
        (["--schedule", "cosine"], "--schedule cosine contradicts the checkpoint, whose run has --schedule linear"),
        (["--data", "x"], "the task digits has its data built in"),
    ],
)
def test_contradictions_are_refused(invoke: Invoke, options: list[str], message: str) -> None:
    if not Path("run.pt").exists():
        invoke("train", "--epochs", 1, "--save", "run.pt")
    before = Path("run.pt").read_bytes()
    assert message in invoke("train", "--resume", "run.pt", *options, code=1).output
    assert Path("run.pt").read_bytes() == before


def test_a_checkpoint_from_before_an_option_has_its_default(invoke: Invoke) -> None:
    invoke("train", "--steps", 2, "--save", "run.pt")
    checkpoint = torch.load("run.pt", weights_only=True)
    del checkpoint["config"]["schedule"]
    rewrite(checkpoint)
    invoke("train", "--resume", "run.pt", "--schedule", "linear")
    output = invoke("train", "--resume", "run.pt", "--schedule", "cosine", code=1).output
    assert "--schedule cosine contradicts" in output


def test_damaged_and_foreign_checkpoints(invoke: Invoke) -> None:
    invoke("train", "--epochs", 1, "--save", "run.pt")
    whole = Path("run.pt").read_bytes()
    middle = len(whole) // 2
    wrong = {
        "truncated.pt": whole[:middle],
        "short.pt": whole[:100],
        "empty.pt": b"",
        "flipped.pt": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "text.pt": b"not a checkpoint\n" * 100,
    }
    for name, data in wrong.items():
        Path(name).write_bytes(data)
        assert f"--resume {name} is damaged or not a checkpoint" in invoke("train", "--resume", name, code=1).output
    torch.save({"model": {}}, "foreign.pt")
    assert "foreign.pt was not written by" in invoke("train", "--resume", "foreign.pt", code=1).output
    assert "there is no such file" in invoke("train", "--resume", "nowhere.pt", code=1).output


def test_a_checkpoint_of_another_model_or_version_is_refused(invoke: Invoke) -> None:
    invoke("train", "--epochs", 1, "--save", "run.pt")
    checkpoint = torch.load("run.pt", weights_only=True)
    weight = checkpoint["run"]["model"]["head.weight"]
    checkpoint["run"]["model"]["head.weight"] = torch.zeros(3, 3)
    rewrite(checkpoint)
    assert "head.weight" in invoke("train", "--resume", "run.pt", code=1).output
    checkpoint["run"]["model"]["head.weight"] = weight
    checkpoint["config"]["newer"] = 1
    rewrite(checkpoint)
    output = invoke("train", "--resume", "run.pt", code=1).output
    assert "the option 'newer', which this version of bighorn does not know. Resume it with the version" in output
    for part in ("config", "environment", "data", "processes", "run"):
        rewrite({**checkpoint, part: None})
        output = invoke("train", "--resume", "run.pt", code=1).output
        assert "run.pt is damaged: it was changed after it was written" in output


def test_nothing_in_a_checkpoint_is_run(invoke: Invoke, tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "was-here"),)

    torch.save({"format": FORMAT, "config": Malicious()}, "evil.pt")
    assert "damaged or not a checkpoint" in invoke("train", "--resume", "evil.pt", code=1).output
    assert not (tmp_path / "was-here").exists()


@for_every(
    ("named", "flags"),
    [
        ({"task": "os:mkdir", "data": "was-here"}, "--task and --data"),
        ({"task": "trap.py:Task"}, "--task"),
        ({"task": "trap:Task"}, "--task"),
        ({"task": "text", "data": "fifo"}, "--data"),
        ({"device": "trap:0"}, "--device"),
        ({"task": "\x1b[2J\udc80"}, "--task"),
    ],
)
def test_what_a_checkpoint_names_is_neither_imported_nor_opened(
    invoke: Invoke, named: dict[str, str], flags: str, trap: Path
) -> None:
    invoke("train", "--steps", 1, "--save", "run.pt")
    checkpoint = torch.load("run.pt", weights_only=True)
    checkpoint["config"] |= named
    rewrite(checkpoint)
    output = invoke("train", "--resume", "run.pt", code=1).output
    assert output.startswith(f"Error: give {flags} beside --resume. The checkpoint's run had {flags.split()[0]} '")
    assert "\x1b" not in output
    assert not trap.exists()


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path that a module creates if a name imports it by mistake; also make a FIFO without a writer."""
    for name in ("trap.py", "torch_trap.py"):
        (tmp_path / name).write_text("from pathlib import Path\nPath(__file__).with_name('was-here').mkdir()\n")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "was-here"


def test_a_task_of_the_user_may_have_moved(invoke: Invoke, tmp_path: Path) -> None:
    source = BENCHMARKS / "mnist_rows.py"
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.py").write_text(source.read_text())
    data = write_idx(tmp_path / "idx_of_rows")
    options = ["--task", "before/rows.py:MnistRows", "--data", data]
    invoke("train", *options, "--steps", 1, "--batch-size", 24, "--save", "run.pt")
    output = invoke("train", "--resume", "run.pt", "--task", "after/rows.py:MnistRows", "--data", data).output
    assert "after/rows.py:MnistRows: " in output
    output = invoke("train", "--resume", "run.pt", "--task", "mnist", "--data", data, code=1).output
    assert "--task mnist contradicts the checkpoint" in output


def test_an_interrupted_run_without_a_name_overwrites_no_other(
    invoke: Invoke, interrupt_after: Callable[[int], None]
) -> None:
    """It prints the command that resumes it, with quotes where a shell needs them."""
    interrupt_after(2)
    record = ["--json", "my record.json"]
    for seed, name in enumerate(("bighorn-digits-lamb-step2.pt", "bighorn-digits-lamb-step2-2.pt")):
        output = invoke("train", "--steps", 4, "--seed", seed, *record, code=130).output
        assert f"--resume {name} --json 'my record.json'\n" in output
        assert content(Path(name))["config"]["seed"] == seed
