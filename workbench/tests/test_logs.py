"""``--log``: the values that the writers of TensorBoard and Weights & Biases receive."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bighorn_workbench import logs
from workbench.tests.command_line import Invoke

TRAIN = ["train", "--epochs", 1, "--batch-size", 256, "--json", "run.json"]
COMPARE = [
    *("compare", "--optimizers", "lamb", "--batch-sizes", 256, "--epochs", 1, "--trials", 1, "--seeds", 1),
    *("--processes", 1, "--json", "run.json"),
]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Return the runs of a replacement for wandb, with the values that it received."""
    made: list[SimpleNamespace] = []

    @contextmanager
    def init(**about: Any) -> Iterator[SimpleNamespace]:
        run = SimpleNamespace(**about, summary={}, values=[], open=True)
        run.log = lambda values, step: run.values.append((step, values))
        made.append(run)
        yield run
        run.open = False

    module: Any = ModuleType("wandb")
    module.__spec__, module.init = ModuleSpec("wandb", None), init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_every_step_and_evaluation_of_a_training_is_logged(invoke: Invoke, runs: list[SimpleNamespace]) -> None:
    invoke(*TRAIN, "--log", "wandb")
    (run,) = runs
    history = json.loads(Path("run.json").read_text())["history"]
    *steps, test = run.values
    assert [step for step, _ in steps] == list(range(1, len(history["loss"]) + 1))
    assert [values["train/loss"] for _, values in steps] == history["loss"]
    logged = [[step, values[key]] for step, values in run.values if (key := "validation/accuracy") in values]
    assert logged == [[step, found["accuracy"]] for step, found in history["evaluations"]]
    assert test == (len(history["loss"]), {f"test/{name}": value for name, value in history["test"].items()})
    assert (run.config["optimizer"], run.open) == ("lamb", False)
    invoke("train", "--lr", 1e30, "--warmup", 0, "--log", "wandb", code=1)
    assert [step for step, _ in runs[1].values] == list(range(1, len(runs[1].values) + 1)) != []


def test_each_run_of_a_comparison_is_logged(invoke: Invoke, runs: list[SimpleNamespace]) -> None:
    invoke(*COMPARE, "--log", "wandb")
    cell = json.loads(Path("run.json").read_text())["cells"][0]
    assert [run.summary["accuracy"] for run in runs] == [cell[kind][0]["accuracy"] for kind in ("tuning", "final")]
    assert [run.config["seed"] for run in runs] == [0, 1]
    assert [set(run.values[-1][1]) for run in runs] == [{"trial/accuracy"}, {"seed/accuracy"}]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("command", [TRAIN, COMPARE], ids=["train", "compare"])
def test_a_log_that_fails_is_not_worth_the_run(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: list[Any]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space")

    init = sys.modules["wandb"].init

    @contextmanager
    def init_full(**about: Any) -> Iterator[SimpleNamespace]:
        with init(**about) as run:
            run.log = full
            yield run

    monkeypatch.setattr(sys.modules["wandb"], "init", init_full)
    output = invoke(*command, "--log", "wandb").output
    assert output.count("Warning: --log wandb has failed, and gets nothing more (OSError: no space).") == 1
    assert Path("run.json").exists()
    monkeypatch.setattr(sys.modules["wandb"], "init", full)
    if command is TRAIN:
        assert "--log wandb cannot be opened (OSError: no space)" in invoke(*command, "--log", "wandb", code=1).output


def test_tensorboard_reads_what_is_logged(invoke: Invoke) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    invoke(*TRAIN, "--log", "tensorboard")
    (folder,) = Path("runs").iterdir()
    read = accumulator.EventAccumulator(str(folder)).Reload()
    history = json.loads(Path("run.json").read_text())["history"]
    assert [event.value for event in read.Scalars("train/loss")] == pytest.approx(history["loss"], rel=1e-6)


def test_a_missing_package_is_named(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda _: None)
    for command in (TRAIN, COMPARE):
        output = invoke(*command, "--log", "tensorboard", code=1).output
        assert "--log tensorboard needs its package. Install it with: pip install tensorboard" in output
